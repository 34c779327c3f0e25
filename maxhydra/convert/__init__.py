"""Import and export of weights: Hugging Face, PEFT, GGUF and maxhydra checkpoints.

load.py loads weights from any supported format. hf_config.py and tables/ do not import jax.
"""

from typing import Any

from maxhydra.config.registry import register_option_source


def _model_values(key: str, folder: str) -> dict[str, Any]:
    from maxhydra.convert.hf_config import stated_model  # noqa: PLC0415

    return stated_model(key, folder)


def _run_values(key: str, folder: str) -> dict[str, Any]:
    from maxhydra.convert.hf_config import stated_run  # noqa: PLC0415

    return stated_run(folder)


# hf_config is imported when the option is chosen: `maxhydra --help` must not wait for the tables of all model families.
register_option_source("model/from_hf", _model_values)
register_option_source("recipe/from_hf", _run_values)
