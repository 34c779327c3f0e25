"""A model in addition to that of the config, a teacher or a draft model: its settings and its tokenizer.

The settings are those of the run or Hugging Face folder of its weights, or of an option of the group `model`.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from maxhydra.config import ConfigError, Problem
from maxhydra.config.errors import quoted, show
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.data import Tokenizer as TokenizerConfig
from maxhydra.config.schema.hardware import Mesh as MeshConfig
from maxhydra.config.schema.model import Model
from maxhydra.config.serialize import from_yaml
from maxhydra.convert.adapter_lineage import run_folder
from maxhydra.convert.compatibility import changes_from_run
from maxhydra.convert.hf_config import is_hf_folder
from maxhydra.data import Tokenizer
from maxhydra.data.tokenizers import load_tokenizer
from maxhydra.modelfiles import model_path
from maxhydra.modelfiles.hub import is_hub_id


@dataclasses.dataclass(frozen=True)
class SecondModel:
    """The model that a section of the config describes with these keys."""

    section: str
    """Path of the section, for errors."""
    name: str
    """Name of the model in errors."""
    weights: str
    model: str | None
    """Option of the group model; None: the model of the weights."""
    overrides: Sequence[str]
    mesh: str | None = None
    """Option of the group mesh, if it has its own mesh."""

    def resolve(self) -> tuple[Model, MeshConfig | None]:
        """The model's config, and that of its mesh if it has its own."""
        run = run_folder(self.weights)
        choices = [f"model={self.model}"] if self.model is not None else []
        if not choices and run is None and is_hf_folder(self._folder):
            choices = ["model=from_hf", f"model.path={quoted(self.weights)}"]
        choices += [f"mesh={self.mesh}"] if self.mesh is not None else []
        # Imports Hydra, which workers of other tasks do not need.
        from maxhydra.config.compose.composer import compose  # noqa: PLC0415

        try:
            # A length that fits every context: the other sections are not those of the config.
            composed = compose([*choices, *self.overrides, "train.seq_len=1"]).config
        except ConfigError as error:
            raise ConfigError(problem.under(self.section) for problem in error.problems) from None
        mesh = None if self.mesh is None else composed.mesh
        if self.model is not None and run is not None:
            self._check_same(run, composed.model)
        if any(choice.startswith("model=") for choice in choices):
            return composed.model, mesh
        if run is None:
            reason = "is not a run folder with a config, so its model is unknown"
            hint = f"set {self.section}.model=NAME, an option of the group model"
            raise ConfigError(Problem(f"{self.section}.weights", reason, value=self.weights, hint=hint))
        return _model_of(run / "config.yaml"), mesh

    @property
    def _folder(self) -> Path:
        """The folder of the weights, which need not exist."""
        return model_path(f"{self.section}.weights", self.weights, weights=False)

    def _check_same(self, run: Path, model: Model) -> None:
        for change in changes_from_run(run, model):
            values = f"{change.key} is {show(change.before)} there, here {show(change.now)}"
            reason = f"differs from the run of the weights: {values}"
            hint = f"omit {self.section}.model and overrides: the model is then that of the run"
            raise ConfigError(Problem(f"{self.section}.model", reason, value=self.model, hint=hint))

    def check_tokenizer(self, data: Data, first: str, hint: str) -> None:
        """Raise ConfigError if a token id is another token for this model than for the first one.

        Its tokenizer is that of its run, or the one in its folder; if neither exists, nothing is compared.
        `first`: name of the config's model in errors. `hint`: alternative to using this model's tokenizer.
        """
        stored = self._stored_tokenizer()
        if stored is None or (stored.kind, stored.path) == (data.tokenizer.kind, data.tokenizer.path):
            return
        own = load_tokenizer(data)
        other = load_tokenizer(dataclasses.replace(data, tokenizer=stored))
        names = own.special_token_ids.keys() & other.special_token_ids.keys()
        special = {name: (other.special_token_ids[name], own.special_token_ids[name]) for name in sorted(names)}
        differences = [f"{name} is id {a} there and {b} here" for name, (a, b) in special.items() if a != b]
        for id in range(min(own.vocab_size, other.vocab_size)) if not differences else ():
            if (a := other.decode([id])) != (b := own.decode([id])):
                differences.append(f"id {id} is {a!r} there and {b!r} here")
                break
        if differences:
            reason = f"has another tokenizer than the {first}: {differences[0]}"
            hint = f"use the {self.name}'s tokenizer (data.tokenizer.kind and path){hint}"
            raise ConfigError(Problem(f"{self.section}.weights", reason, value=self.weights, hint=hint))

    def open_tokenizer(self, data: Data, *, needed_by: str) -> Tokenizer:
        """The tokenizer of its run or folder. `needed_by`: the setting that needs it."""
        if (stored := self._stored_tokenizer()) is None:
            reason = f"has no tokenizer, which {needed_by} needs"
            accepted = "a run whose tokenizer files exist, or a folder with tokenizer.json"
            raise ConfigError(Problem(f"{self.section}.weights", reason, value=self.weights, accepted=accepted))
        return load_tokenizer(dataclasses.replace(data, tokenizer=stored))

    def _stored_tokenizer(self) -> TokenizerConfig | None:
        """The tokenizer of its run or folder; None if it is unknown or its files are missing."""
        if (run := run_folder(self.weights)) is None:
            has_tokenizer = (self._folder / "tokenizer.json").is_file()
            return TokenizerConfig(kind="hf", path=str(self._folder)) if has_tokenizer else None
        content = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
        assert isinstance(content, dict)
        stored = content.get("data", {}).get("tokenizer", {})
        kind, path = stored.get("kind", TokenizerConfig.kind), stored.get("path")
        is_local = path is not None and kind != "tiktoken" and not is_hub_id(path)
        is_missing = is_local and not Path(path).expanduser().exists()
        return None if is_missing else TokenizerConfig(kind=kind, path=path)


def _model_of(path: Path) -> Model:
    """The model of a run's config. Its data section is ignored, because the data may no longer exist."""
    content = OmegaConf.load(path)
    assert isinstance(content, DictConfig)
    content.pop("data", None)
    return from_yaml(OmegaConf.to_yaml(content), str(path)).model
