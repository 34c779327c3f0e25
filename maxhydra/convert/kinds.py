"""Lists of what each layer is, as others write them, and patterns, as we do."""

from collections.abc import Sequence

from maxhydra.config import model as config


def pattern_of(names: Sequence[str]) -> list[str]:
    """The shortest list that gives these names when repeated, the last time perhaps in part."""
    lengths = range(1, len(names) + 1)
    length = next(n for n in lengths if all(name == names[i % n] for i, name in enumerate(names)))
    return list(names[:length])


def layer_kinds(model: config.Model) -> list[config.Kind]:
    """The kind of every layer, from first to last."""
    repeated = model.num_layers - len(model.prefix)
    names = [*model.prefix, *(model.pattern[i % len(model.pattern)] for i in range(repeated))]
    return [model.kinds[name] for name in names]
