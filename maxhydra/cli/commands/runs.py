"""Find, compare, rerun, resume, delete and watch runs: runs VERB ...; `runs --help` lists the verbs.

Runs are searched in outputs/ and its subfolders, or in `-o FOLDER`, which may be a URL. A run is named by its path in
that folder (lr/3_learning_rate=0.003), by the last part of the path, or by a prefix of either. Conditions select runs:

  status=finished  tag=first  model=tiny  optimizer.learning_rate=1e-3  'eval/loss<2'  'train.steps>=100'  notes~base

A key is a field of the run, a key of its config, a group, or a metric; a metric stands for its last value, or with :min
or :max for its minimum or maximum ('eval/loss:min<2').
"""

import argparse
import importlib

from maxhydra.cli.flags import Parser
from maxhydra.cli.runs import verbs
from maxhydra.config.errors import ConfigError, Problem, did_you_mean
from maxhydra.record.storage import is_remote

# Verbs that change runs, or read more than their small files.
LOCAL_VERBS = frozenset(("tag", "note", "gc", "serve", "profile"))


def main(arguments: list[str]) -> int:
    """Run the verb; only its module is imported."""
    known = verbs()
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(__doc__ + "\nVerbs (details: maxhydra runs VERB --help):")
        print("\n".join(f"  {verb:<8} {entry.summary}" for verb, entry in known.items()))
        return 0
    if name not in known:
        raise ConfigError(
            Problem(f"runs {name}", "no such verb", accepted=", ".join(known), hint=did_you_mean(name, known))
        )
    module = importlib.import_module(f"maxhydra.cli.runs.{known[name].module}")
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog=f"maxhydra runs {name}", description=known[name].help, allow_abbrev=False, formatter_class=formatter
    )
    parser.add_argument(
        "-o", "--outputs", default="outputs", metavar="FOLDER", help="folder or URL that contains the runs"
    )
    getattr(module, f"declare_{name}")(parser)
    args = parser.parse_intermixed_args(arguments[1:])
    if is_remote(args.outputs) and (name in LOCAL_VERBS or getattr(args, "follow", False)):
        reason = f"is a URL, which runs {name} does not support"
        hint = "the runs of a URL are read-only, and are copied once, when the command starts"
        accepted = f"a local folder, or one of {', '.join(sorted(known.keys() - LOCAL_VERBS))}"
        raise ConfigError(Problem("--outputs", reason, args.outputs, accepted=accepted, hint=hint))
    exit_code: int = getattr(module, f"run_{name}")(args)
    return exit_code
