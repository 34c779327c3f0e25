"""A model of text inside a larger one, such as one that sees and hears: its part of the settings and of the tensors."""

import dataclasses
from functools import reduce
from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.name_table import Settings, Table, Weight

# The layers and the embedding of a model of text alone are below this, the head is not.
BODY = "model."


def nested(
    table: Table,
    *,
    model_type: str,
    architecture: str,
    below: tuple[str, ...],
    body: str,
    prefix: str,
    ignored: tuple[str, ...],
) -> Table:
    """The table of the text in a larger model; it is read and not written, since the other parts would be missing.

    `below`: keys of config.json under which its settings are. `body`: what stands for BODY in the names of its tensors.
    `prefix`: of the others. `ignored`: tensors of the rest.
    """

    def to_model(settings: Settings) -> dict[str, Any]:
        text = reduce(lambda section, key: section[key], below, settings)
        tied = {key: settings[key] for key in ("tie_word_embeddings",) if key in settings}
        return table.to_model({**tied, **text})

    def renamed(name: str) -> str:
        return body + name.removeprefix(BODY) if name.startswith(BODY) else prefix + name

    def to_settings(model: config.Model) -> Settings | None:
        return None

    def rows(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
        return tuple(dataclasses.replace(weight, hf=renamed(weight.hf), gguf="") for weight in weights)

    return Table(
        hf_types={model_type: architecture},
        layer=rows(table.layer),
        ends=rows(table.ends),
        to_model=to_model,
        to_settings=to_settings,
        ignored=(*ignored, *map(renamed, table.ignored)),
    )
