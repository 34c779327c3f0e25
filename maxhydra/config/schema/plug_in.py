"""Schema of an object of the user; see maxhydra/config/plug_ins.py."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Options, PlugInUse, Schema, option, schema, section
from maxhydra.config.errors import Problem


@schema
class PlugIn(Schema):
    """An object of yours. That of train.loss replaces the next-token loss in the training steps of task=pretrain and
    task=sft; evaluations keep that one. docs/library.md describes the arguments and results of each kind of object."""

    function: str | None = option(None, plug_in=PlugInUse.here)
    """`package.module:object`, called with options= if it has a parameter of that name. null: none."""
    options: Options = section(Options)

    def check_use(self, path: str, choice: Enum) -> Iterator[Problem]:
        """Yield the problem of a section that a choice needs and that is empty, or that it does not use and is set."""
        if (self.function is not None) != (choice.value == path):
            reason = f"is {'needed' if self.function is None else 'not used'} by {choice.value}"
            yield Problem(f"{path}.function", reason, value=self.function)
