"""Shell completion by Hydra's plugins, which know overrides but not our subcommands."""

import os
import sys

from hydra._internal.hydra import Hydra

from maxhydra.cli.help import commands, docstrings
from maxhydra.cli.runs import VERBS
from maxhydra.config.errors import ConfigError, Problem


def answer(app: Hydra, config_name: str, request: list[str]) -> int:
    """`install=SHELL`, `uninstall=SHELL`, or the shell's own `query=SHELL` with the line in COMP_LINE."""
    action, _, shell = request[0].partition("=") if len(request) == 1 else ("", "", "")
    shells = sorted(app.get_shell_to_plugin_map(app.config_loader))
    if action not in ("install", "uninstall", "query") or shell not in shells:
        accepted = f"install=SHELL or uninstall=SHELL, where SHELL is {', '.join(shells)}"
        raise ConfigError(Problem("--shell-completion", "needs to know what to do", " ".join(request), accepted))
    sys.argv[0] = "maxhydra"  # whose completion is installed, also from `python -m maxhydra`
    if action == "query":
        line = os.environ.get("COMP_LINE", "")
        words = line.split(" ")
        is_verb = words[1:-1] == ["runs"]
        names = docstrings(VERBS) if is_verb else commands() if len(words) == 2 else {}
        print("\n".join(name for name in names if name.startswith(words[-1])))
        if is_verb:
            return 0  # no override stands there
        os.environ["COMP_LINE"] = without_command(line)
    app.shell_completion(config_name=config_name, overrides=request)
    return 0


def without_command(line: str) -> str:
    """The line to complete without a subcommand, whose arguments are paths and overrides as everywhere."""
    words = line.split(" ")
    return " ".join(words[:1] + words[2:]) if len(words) > 2 and words[1] in commands() else line
