"""Run a config that was composed before, in a folder that is fixed: job CONFIG.yaml [--run-dir DIR].

maxhydra job outputs/lr/3/job.yaml --run-dir outputs/lr/3      as launchers do; the same again resumes
maxhydra job outputs/first/config.yaml                         a config as runs keep it, in the folder that it names

Hydra is not needed. Exit codes: 0 finished, 1 failed, 2 a wrong config; 143 and 138, ended by SIGTERM or SIGUSR1 after
saving, are those on which a launcher starts it again.
"""

from pathlib import Path

from maxhydra.cli.flags import Parser


def main(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    parser = Parser(prog="maxhydra job", add_help=False)
    parser.add_argument("config", type=Path)
    parser.add_argument("--run-dir", type=Path)
    asked = parser.parse_args(arguments)
    from maxhydra.launch.job_spec import read_order  # noqa: PLC0415
    from maxhydra.launch.termination import write_termination_message  # noqa: PLC0415

    run_dir = None if asked.run_dir is None else asked.run_dir.absolute()
    with write_termination_message(run_dir):
        order = read_order(asked.config)
        # jax comes in here, and not before the config is valid.
        from maxhydra.cli.run_job import execute  # noqa: PLC0415

        execute(order.config, order.choices, overrides=order.overrides, path=run_dir, config_dir=order.config_dir)
    return 0
