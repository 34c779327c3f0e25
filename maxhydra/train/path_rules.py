"""Parameters that an optimizer treats differently: arrays of an adapter, layers without a loss, rates by layer."""

import re

import numpy as np

from maxhydra.config import Config
from maxhydra.config.schema.data import IMAGE_TYPES
from maxhydra.config.schema.encoders import has_audio
from maxhydra.layers.clipped_linear import BOUNDS
from maxhydra.layers.params import depth_ratio, width_ratio
from maxhydra.model import split_trainable
from maxhydra.model.lora import ADAPTER, CONSTANT, UNDECAYED
from maxhydra.model.model_def import ModelDef
from maxhydra.optim import PathRules, is_stacked
from maxhydra.optim.parameters import axes_by_path, matrix_dims

# Parameters of encoders that are loaded with the weights and not trained: bounds of clipped projections, and the shift
# and the factor of standardized patches.
ENCODER_CONSTANTS = (BOUNDS, "^vision/projector/(shift|factor)$")
# The last projection of a residual branch.
LAST = re.compile(r"/(attention/out|mlp/down)/")


def path_rules(config: Config, decoder: ModelDef) -> PathRules:
    """The rules of a config. Layers that the loss does not use are not decayed, so that they do not change."""
    ratio = config.adapter.b_rate_ratio
    types = {corpus.record_type for corpus in config.data.corpora().values()}
    unused = {"^mtp/": not config.task.trains_mtp, "^vision/": types.isdisjoint(IMAGE_TYPES)}
    unused["^audio/"] = not any(has_audio(each, config.model.vision) for each in types)
    unused["^speech/"] = True
    rates, transferred = _layer_rates(config, decoder), _transfer_rates(config, decoder)
    return PathRules(
        constant=(*CONSTANT, *ENCODER_CONSTANTS),
        undecayed=[*UNDECAYED, *(path for path, is_unused in unused.items() if is_unused)],
        rate_ratios={} if ratio == 1 else {f"/{ADAPTER}/b$": ratio},
        rates_by_path={path: rates.get(path, 1.0) * transferred.get(path, 1.0) for path in {**rates, **transferred}},
        # Learning rate times weight decay is the same for all sizes.
        decays_by_path={path: 1 / rate for path, rate in transferred.items()},
    )


def _transfer_rates(config: Config, decoder: ModelDef) -> dict[str, float]:
    """Learning rates of model.transfer, of the parameters whose rate depends on the size.

    Matrices with an input of the model's width, the head included, have the rate of the base model divided by the ratio
    of the widths. CompleteP divides the output of each residual branch by the ratio of the depths; for Adam this equals
    dividing initial values and rate of its last projection, so that the forward pass has no factors.
    """
    model, rates = config.model, dict[str, float]()
    if not model.transfer.is_used:
        return rates
    width, depth = width_ratio(model), depth_ratio(model)
    for path, axes in axes_by_path(split_trainable(decoder.axes)[0]).items():
        is_block = path.startswith(("prefix/", "pattern/", "remainder/"))
        is_hidden = matrix_dims(axes) is not None and (is_block or path.startswith("head/"))
        rate = (1 / width if is_hidden else 1.0) * (1 / depth if is_block and LAST.search(path) else 1.0)
        if rate != 1:
            rates[path] = rate
    return rates


def _layer_rates(config: Config, decoder: ModelDef) -> dict[str, float | np.ndarray]:
    """Learning rates of optimizer.layer_decay: 1 for the last layer and what follows it, less for earlier ones."""
    decay, rates = config.optimizer.layer_decay, dict[str, float | np.ndarray]()
    if decay is None:
        return rates
    last = config.model.num_layers - 1
    for path, axes in axes_by_path(split_trainable(decoder.axes)[0]).items():
        layers = _layers_of(config, path, is_repeated=is_stacked(axes))
        if layers is not None:
            ratios = decay ** (last - layers.astype(np.float64))
            shape = (-1, *(1 for _ in axes[1:])) if is_stacked(axes) else ()
            rates[path] = ratios.reshape(shape).astype(np.float32)
    return rates


def _layers_of(config: Config, path: str, *, is_repeated: bool) -> np.ndarray | None:
    """Numbers of the layers that a parameter belongs to; -1 for embeddings, None after the last layer."""
    group, _, rest = path.partition("/")
    if group in ("embedding", "per_layer"):
        return np.array([-1])
    if group not in ("prefix", "pattern", "remainder"):
        return None
    position, model = int(rest.partition("/")[0]), config.model
    prefix, period = len(model.prefix), max(1, len(model.pattern))
    repetitions = (model.num_layers - prefix) // period
    if group == "pattern":
        return prefix + position + period * np.arange(repetitions if is_repeated else 1)
    return np.array([position + (0 if group == "prefix" else prefix + period * repetitions)])
