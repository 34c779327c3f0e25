"""Verbs that show a run's log, rollouts, profiles, statistics, a report, or the dashboard."""

import argparse
import dataclasses
import time
from pathlib import Path

from maxhydra.cli.runs._common import add_direction, add_json, print_json, print_table, print_warnings, say
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.launch.base import CLAIM, CONSOLE
from maxhydra.record import RunDirectory, redact_text
from maxhydra.record.redact import redact_facts
from maxhydra.runs.profile import COLUMNS, profile_folders, summarize_profile
from maxhydra.runs.registry import Registry
from maxhydra.runs.report import write_report
from maxhydra.runs.rollouts import describe, find_rollouts, kinds_of, parse_query
from maxhydra.runs.server import Server
from maxhydra.runs.statistics import COLUMNS as COLUMNS_OF_LAYERS
from maxhydra.runs.statistics import read_statistics, summary_rows
from maxhydra.runs.sweep import write_sweep_report

_PAUSE = 0.5
# Bytes that are read from the end of the log.
_WINDOW = 1 << 20


def declare_tail(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="RUN")
    parser.add_argument("-n", "--lines", type=int, default=20)
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines until the run ends")


def run_tail(args: argparse.Namespace) -> int:
    """Show the end of a run's log and follow it: tail [RUN] [-n LINES] [-f]; default: the newest run.

    maxhydra runs tail lr/3 -f

    For a job that has not started its run yet, shows the output of the job, which says why.
    """
    pending = _pending_job(Path(args.outputs), args.name)
    if pending is not None:
        position = _print_end(pending.path / CONSOLE, args.lines)
        while args.follow and not pending.exists():
            time.sleep(_PAUSE)
            position = _print_from(pending.path / CONSOLE, position)
        if not pending.exists():
            say(f"{pending.path}: has not started yet")
            return 0
    directory = _find_run(args, "runs tail")
    position = _print_end(directory.log_path, args.lines)
    while args.follow:
        # Read the status before the log, so that the last lines of a run that ends in between are still printed.
        is_running = directory.read()["status"] == "running"
        position = _print_from(directory.log_path, position)
        if not is_running:
            break
        time.sleep(_PAUSE)
    facts = redact_facts(directory.read())
    say(f"{directory.path}: {facts['status']}{': ' + facts['reason'] if facts['reason'] else ''}")
    return 0


def _find_run(args: argparse.Namespace, command: str) -> RunDirectory:
    """The run that is named, or the newest."""
    registry = Registry(args.outputs)
    runs = registry.runs()
    if not runs:
        raise ConfigError(Problem(command, f"no runs in {args.outputs}"))
    return registry.directory(registry.find(args.name, runs) if args.name else runs[0])


def _pending_job(outputs: Path, name: str | None) -> RunDirectory | None:
    """Return the folder of a job that was started or submitted but has no run yet."""
    run = RunDirectory(outputs / (name or ""), writes=False)
    return run if name and (run.path / CLAIM).exists() and not run.exists() else None


def _print_end(log: Path, lines: int) -> int:
    """Print the last lines and return the position after them."""
    if not log.exists():
        return 0
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _WINDOW))
        content = file.read(size - file.tell())
    last = redact_text(content.decode(errors="replace")).splitlines()[-lines:] if lines > 0 else []
    say("\n".join(last), flush=True, end="\n" if last else "")
    return size


def _print_from(log: Path, position: int) -> int:
    if not log.exists():
        return position
    with log.open("rb") as file:
        file.seek(position)
        content = file.read()
    say(redact_text(content.decode(errors="replace")), end="", flush=True)
    return position + len(content)


def declare_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="RUN")
    add_json(parser)


def run_profile(args: argparse.Namespace) -> int:
    """Summarize the profiles of a run: profile [RUN or FOLDER] [--json]; default: the newest run.

    Time per step, idle time, collectives, and the operations that take most time. Profiles are written by
    profile.steps=[10,15], profile.every=1000, or `kill -USR2 PID` of a training process. To see a trace:
    `xprof --logdir FOLDER`, or open its trace.json.gz in https://ui.perfetto.dev.

    maxhydra runs profile lr/3
    """
    named = Path(args.name or "")
    # Profiles of task=decode and serve are in a folder that is not a run.
    path = named if args.name and profile_folders(named) else _find_run(args, "runs profile").path
    folders = profile_folders(path)
    if not folders:
        hint = "train with profile.steps=[FIRST,LAST] or profile.every=N, or send SIGUSR2 to a running one"
        raise ConfigError(Problem("runs profile", f"{path} has no profiles", hint=hint))
    try:
        summaries = {folder: summarize_profile(folder) for folder in folders}
    except ValueError as error:
        raise ConfigError(Problem("runs profile", str(error), hint="delete the folder of this profile")) from None
    if args.json:
        print_json({folder.name: dataclasses.asdict(summary) for folder, summary in summaries.items()})
        return 0
    for folder, summary in summaries.items():
        say(f"{folder}\n{summary.text}\n{summary.parts_text}")
        print_table(COLUMNS, summary.rows)
        say()
    return 0


def declare_rollouts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="RUN")
    parser.add_argument("--kind", default="train", help="train or eval")
    parser.add_argument("--steps", default="", metavar="FIRST:LAST", help="steps, such as 100:200, 100: or 100")
    parser.add_argument("--reward", default="", metavar="LOW:HIGH", help="rewards, such as 0.5: or :0")
    parser.add_argument("--prompt", default="", metavar="NUMBER", help="number of a prompt, to see it over steps")
    parser.add_argument("--text", default="", help="text in prompt or completion")
    parser.add_argument("--order", default="newest", help="newest, oldest, best or worst")
    parser.add_argument("-n", "--limit", default="5", help="number of completions")
    add_json(parser)


def run_rollouts(args: argparse.Namespace) -> int:
    """Show completions of reinforcement learning: rollouts [RUN] [--kind eval] [--steps 10:20] [--order best].

    Prompts, completions and rewards, of training or of evaluations. They are in rollouts/*.jsonl of the run's folder.

    maxhydra runs rollouts my_grpo --reward :0 --order newest
    maxhydra runs rollouts my_grpo --kind eval --prompt=-3 --order oldest
    """
    directory = _find_run(args, "runs rollouts")
    if not kinds_of(directory.path):
        raise ConfigError(Problem("runs rollouts", f"{directory.path} has no rollouts", hint="task=grpo writes them"))
    names = ("kind", "steps", "reward", "prompt", "text", "order", "limit")
    found = find_rollouts(directory.path, parse_query({name: getattr(args, name) for name in names}))
    if args.json:
        print_json({"total": found.total, "rollouts": found.records})
        return 0
    for record in found.records:
        say(f"{describe(record)}\n{record['prompt']}\n---\n{record['completion']}\n")
    total = "more" if found.total is None else found.total
    say(f"{len(found.records)} of {total} completions in {directory.path}")
    return 0


def declare_statistics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="RUN")
    parser.add_argument("--step", type=int, help="step of the record; default: the last one")
    add_json(parser)


def run_statistics(args: argparse.Namespace) -> int:
    """Show the statistics of a run's layers: statistics [RUN] [--step STEP] [--json]; default: the newest run.

    Norm and largest magnitude of gradients, weights and updates, activations, attention logits, dead units, load of
    experts: the smallest, median and largest layer. Recorded by statistics.every=50. The report shows all steps.

    maxhydra runs statistics lr/3 --step 500
    """
    directory = _find_run(args, "runs statistics")
    rows = read_statistics(directory.path)
    if not rows:
        hint = "train with statistics.every=50"
        raise ConfigError(Problem("runs statistics", f"{directory.path} has no statistics", hint=hint))
    chosen = [row for row in rows if args.step in (None, row["step"])]
    if not chosen:
        steps = f"{rows[0]['step']} to {rows[-1]['step']}, {len(rows)} records"
        raise ConfigError(Problem("--step", "is not a recorded step", args.step, accepted=steps))
    if args.json:
        print_json(chosen[-1])
        return 0
    say(f"{directory.path}, step {chosen[-1]['step']}")
    print_table(COLUMNS_OF_LAYERS, summary_rows(chosen[-1]))
    return 0


def declare_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default=".", metavar="SWEEP", help="a folder of runs; default: all runs")
    parser.add_argument("-m", "--metric", help="metric that ranks the runs; default: their objective")
    add_direction(parser)
    parser.add_argument("--to", type=Path, metavar="FILE", help="output file; default: sweep.html in the folder")


def run_report(args: argparse.Namespace) -> int:
    """Write an HTML report of a sweep or of one run: report [SWEEP|FOLDER|RUN] [--metric NAME] [--to FILE].

    Parallel coordinates, curves, importance of the settings, the best runs with the commands to run them again, and the
    differences between their configs. The page is self-contained.

    maxhydra runs report lr
    maxhydra runs report . --metric eval/loss:min --to all.html
    """
    registry = Registry(args.outputs)
    folder, runs = registry.runs_under(args.name)
    if not runs:
        raise ConfigError(Problem("runs report", f"no runs in {args.outputs}"))
    if runs[0].path == folder:
        say(str(write_report(registry.directory(runs[0]))))
        return 0
    path = args.to or registry.root / folder / "sweep.html"
    title = folder or registry.root.resolve().name
    say(str(write_sweep_report(registry, runs, path, title=title, metric=args.metric, largest=args.largest)))
    print_warnings(registry)
    return 0


def declare_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=8080, help="0: any free port")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; others than loopback need a token")
    parser.add_argument("--token", action="store_true", help="require an access token on loopback too")


def run_serve(args: argparse.Namespace) -> int:
    """Serve a live dashboard of the runs on this machine: serve [--port N] [--host ADDRESS] [--token].

    Curves, sweeps, comparisons, samples, machine load and logs; buttons stop, resume, tag and annotate runs. Listens on
    127.0.0.1; from another machine, use `ssh -L 8080:127.0.0.1:8080 host`. With another --host, and with --token on a
    machine that others use, every request needs the access token of the printed URL.

    maxhydra runs serve
    maxhydra runs serve --host 0.0.0.0
    """
    registry = Registry(args.outputs)
    try:
        server = Server(registry, host=args.host, port=args.port, needs_token=args.token)
    except (OSError, OverflowError) as error:
        hint = "--port 0 chooses a free port"
        raise ConfigError(
            Problem("--port", f"cannot listen on this port: {error}", value=args.port, hint=hint)
        ) from None
    say(f"{server.url}  (Ctrl-C to stop)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say()
    finally:
        server.server_close()
        registry.close()
    return 0
