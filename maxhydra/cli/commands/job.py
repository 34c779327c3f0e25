"""Run a saved config in a given folder, as launchers do: job CONFIG.yaml [--run-dir DIR].

maxhydra job outputs/lr/3/job.yaml --run-dir outputs/lr/3      the same command again resumes
maxhydra job outputs/first/config.yaml                         config.yaml of a run, in the folder that it names

Works without Hydra. Exit codes: 0 finished, 1 failed, 2 invalid config; 143, 138 and 129 mean that the run saved
and stopped on SIGTERM, SIGUSR1 or SIGHUP, and that the launcher should start it again.
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
    args = parser.parse_args(arguments)
    from maxhydra.launch.job_spec import read_job_spec, write_termination_message  # noqa: PLC0415

    run_dir = None if args.run_dir is None else args.run_dir.absolute()
    with write_termination_message(run_dir):
        spec = read_job_spec(args.config, is_run=True)
        # jax is imported here, after the config is known to be valid.
        from maxhydra.cli.run_job import execute  # noqa: PLC0415

        execute(spec.config, spec.choices, overrides=spec.overrides, path=run_dir, config_dir=spec.config_dir)
    return 0
