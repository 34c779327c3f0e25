"""Import and export of weights: Hugging Face, PEFT, GGUF and maxhydra checkpoints.

load.py loads weights from any supported format. hf_config.py and tables/ do not import jax.
"""

from typing import Any

from maxhydra.config.registry import register_option_source


def _model_values(key: str, folder: str) -> dict[str, Any]:
    from maxhydra.convert.hf_config import hf_model_section  # noqa: PLC0415

    return hf_model_section(key, folder)


def _vision_values(key: str, folder: str) -> dict[str, Any]:
    from maxhydra.convert.hf_config import hf_vision_section  # noqa: PLC0415

    return hf_vision_section(key, folder)


def _audio_values(key: str, folder: str) -> dict[str, Any]:
    from maxhydra.convert.hf_config import hf_audio_section  # noqa: PLC0415

    return hf_audio_section(key, folder)


def _media_values(key: str, folder: str) -> dict[str, Any]:
    return {"model": _vision_values(key, folder)["model"] | _audio_values(key, folder)["model"]}


def _speech_values(key: str, folder: str) -> dict[str, Any]:
    from maxhydra.convert.hf_config import hf_speech_section  # noqa: PLC0415

    return {"model": _media_values(key, folder)["model"] | hf_speech_section(key, folder)["model"]}


def _run_values(key: str, folder: str) -> dict[str, Any]:
    from maxhydra.convert.hf_config import hf_run_section  # noqa: PLC0415

    return hf_run_section(folder)


# hf_config is imported when the option is chosen: `maxhydra --help` must not wait for the tables of all model families.
register_option_source("model/from_hf", _model_values)
register_option_source("model/from_hf_vision", _vision_values)
register_option_source("model/from_hf_audio", _audio_values)
register_option_source("model/from_hf_media", _media_values)
register_option_source("model/from_hf_speech", _speech_values)
register_option_source("recipe/from_hf", _run_values)
