"""maxhydra import maxtext: translated commands compose, run, and list the omitted keys."""

import inspect
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxhydra.cli import main
from maxhydra.cli.maxtext import architecture, docs
from maxhydra.cli.maxtext.table import STATES, newer_rows, reference_rows, rows
from maxhydra.cli.maxtext.translate import FUNCTIONS, experiment, translate
from maxhydra.config.compose.composer import compose
from maxhydra.config.errors import ConfigError
from maxhydra.config.fields import walk
from maxhydra.config.schema.config import Config
from maxhydra.config.serialize import to_stored_yaml
from maxhydra.optim.schedule import schedule
from tests.support import cli

TINY = """
base_emb_dim: 32
base_num_query_heads: 2
base_num_kv_heads: 2
base_mlp_dim: 64
base_num_decoder_layers: 2
head_dim: 16
vocab_size: 512
max_target_length: 32
per_device_batch_size: 2
steps: 2
dataset_type: synthetic
enable_checkpointing: false
"""
EXAMPLES = {
    "defaults": "run_name: first",
    "tiny": TINY,
    "wsd": TINY + "lr_schedule_type: wsd\nopt_type: muon\nremat_policy: save_qkv_proj\ngradient_accumulation_steps: 2",
    "experts": TINY
    + """
decoder_block: mixtral
num_experts: 4
num_experts_per_tok: 2
base_moe_mlp_dim: 64
capacity_factor: 1.5
megablox: false
""",
    "named": """
base_config: base.yml
model_name: llama3.1-8b
hardware: gpu
attention: cudnn_flash_te
remat_policy: minimal_with_context
scan_layers: false
ici_fsdp_parallelism: 4
ici_tensor_parallelism: 2
quantization: fp8
profiler: xplane
num_vocab_tiling: 4
""",
    "latent": """
model_name: deepseek3-671b
ici_expert_parallelism: 8
mtp_num_layers: 1
n_routing_groups: 8
topk_routing_group: 4
""",
    "replicas": """
model_name: qwen3-0.6b
enable_diloco: true
ici_diloco_parallelism: 2
""",
    "stages": """
model_name: qwen3-0.6b
ici_pipeline_parallelism: 2
num_pipeline_microbatches: 4
num_layers_per_pipeline_stage: 7
""",
    "sft": """
use_sft: true
sft_train_on_completion_only: true
model_name: qwen3-0.6b
dataset_type: hf
hf_path: org/chats
train_split: train_sft
train_data_columns: [messages]
tokenizer_path: org/tokenizer
enable_lora: true
lora_rank: 4
""",
    "dpo": """
use_dpo: true
dpo: {algo: dpo, dpo_beta: 0.2}
packing: false
model_name: qwen3-0.6b
dataset_type: hf
hf_path: org/pairs
train_data_columns: [input, chosen, rejected]
eval_interval: 5
hf_eval_split: test
""",
    "grpo": """
rl: {num_generations: 4, grpo_beta: 0.04, loss_algo: gspo-token}
model_name: qwen3-0.6b
dataset_name: org/problems
hf_subset: main
batch_size: 8
num_batches: 10
reward_exact_format_match: 0.1
max_target_length: 512
max_prefill_predict_length: 128
""",
    "distill": """
student_overrides: {model_name: qwen3-0.6b}
teacher_overrides: {model_name: qwen3-1.7b, load_parameters_path: org/teacher}
distill_alpha: 0.5
distill_alpha_end: 0.1
distill_alpha_schedule: cosine
dataset_type: tfds
dataset_path: gs://bucket/tfds
""",
    "compile": "model_name: llama2-7b\ncompile_topology: v5e-16\ncompile_topology_num_slices: 2",
}


def config_file(folder: Path, text: str) -> Path:
    path = folder / "config.yml"
    path.write_text(text)
    return path


@pytest.mark.slow
@pytest.mark.default_cases("grpo", "latent")
@pytest.mark.parametrize("name", EXAMPLES)
def test_command_composes_and_experiment_is_the_same_run(name: str, tmp_path: Path) -> None:
    t = translate(config_file(tmp_path, EXAMPLES[name]), [])
    expected = compose(t.overrides()).config
    option = tmp_path / "conf" / "experiment" / "translated.yaml"
    option.parent.mkdir(parents=True)
    option.write_text(experiment(t, ["A comment."]))
    found = compose(["experiment=translated"], str(tmp_path / "conf")).config
    assert to_stored_yaml(found) == to_stored_yaml(expected)


@pytest.mark.slow
def test_printed_command_and_written_experiment(tmp_path: Path, capsys: Any) -> None:
    path, output = (
        config_file(tmp_path, TINY + "prompt: it's\nrope_min_timescale: 2"),
        tmp_path / "conf" / "experiment" / "x.yaml",
    )
    assert main.run(["import", "maxtext", str(path)]) == 0
    arguments = shlex.split(capsys.readouterr().out.replace("\\\n", ""))
    assert arguments[0] == "maxhydra" and compose(arguments[1:]).config.model.emb_dim == 32
    assert main.run(["import", "maxtext", "--output", str(output), str(path), "steps=3"]) == 0
    assert capsys.readouterr() == ("maxhydra experiment=x\n", "")
    assert "#   rope_min_timescale=2: " in output.read_text() and "steps: 3" in output.read_text()


@pytest.mark.slow
def test_decode_has_no_keys_of_training(tmp_path: Path) -> None:
    text = "model_name: gemma2-2b\nload_parameters_path: org/weights\nlearning_rate: 1\nquantize_kvcache: true"
    t = translate(config_file(tmp_path, text), ["prompt=Hello there"], task="decode")
    assert t.values["task.prompt"] == "Hello there" and t.values["task.engine.cache_dtype"] == "int8"
    assert not any(path.startswith(("optimizer", "train.")) for path in t.values)


@pytest.mark.slow
def test_defaults_that_change_training_are_set(tmp_path: Path) -> None:
    config = compose(translate(config_file(tmp_path, EXAMPLES["defaults"]), []).overrides()).config
    assert (config.train.steps, config.train.seq_len, config.train.per_device_batch_size) == (150_001, 2048, 12)
    assert config.model.num_layers == 16 and config.model.emb_dim == 2048 and config.model.mlp_dim == 7168
    assert config.optimizer.no_decay == [] and config.model.remat.policy.name == "full"
    assert config.train.eval_batches == 0


@pytest.mark.slow
@pytest.mark.default_cases("wsd")
@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_learning_rates_are_those_of_maxtext(kind: str, tmp_path: Path) -> None:
    """Linear warm-up over 10% of the steps, then the decay to a tenth, from the formulas in MaxText's base.yml."""
    arguments = ["steps=200", "learning_rate=1e-3", f"lr_schedule_type={kind}"]
    config = compose(translate(config_file(tmp_path, TINY), arguments).overrides()).config
    rate = schedule(config.optimizer.schedule, peak=config.optimizer.learning_rate, steps=config.train.steps)
    found = [float(rate(np.int32(step))) for step in range(200)]
    expected = []
    for step in range(200):
        if step < 20:
            expected.append(1e-3 * step / 20)
        elif kind == "cosine":
            expected.append(1e-3 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * (step - 20) / 180))))
        else:
            expected.append(1e-3 * (1 - 0.9 * max(0, step - 180) / 20))
    # One step of warm-up more or less: a schedule may count the first step as 0 or as 1.
    assert np.abs(np.array(found) - expected).max() <= 1e-3 / 20 + 1e-9


@pytest.mark.slow
def test_scale_doubles_heads_then_width_then_layers(tmp_path: Path) -> None:
    sizes = {}
    for scale in (1, 2, 4, 8):
        t = translate(config_file(tmp_path, TINY), [f"global_parameter_scale={scale}"])
        sizes[scale] = [t.values[f"model.{name}"] for name in ("num_heads", "mlp_dim", "emb_dim", "num_layers")]
    assert sizes == {1: [2, 64, 32, 2], 2: [4, 128, 32, 2], 4: [4, 128, 64, 2], 8: [4, 128, 64, 4]}


@pytest.mark.slow
def test_keys_without_an_equivalent_are_named(tmp_path: Path, capsys: Any) -> None:
    text = TINY + "enable_mhc_lite: true\nuse_pathways: true\nhf_access_token: hf_abcdefghijklmnopqrstuvwxyz012345"
    assert main.run(["import", "maxtext", str(config_file(tmp_path, text)), "rope_min_timescale=2"]) == 0
    out, err = capsys.readouterr()
    first, other = err.split("set in another way")
    assert "enable_mhc_lite=true: The mixing matrix" in first and "rope_min_timescale=2" in first
    assert "use_pathways=true: Pathways" in other and "HF_TOKEN" in other and "hf_abcdef" not in out + err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learning_rat=1"], "did you mean 'learning_rate'?"),
        (["steps=many"], "is not a number"),
        (["model_name=llama3.1-8"], "did you mean 'llama3.1-8b'?"),
        (["decoder_block=other"], "is not implemented"),
        (["global_parameter_scale=3"], "is not a power of 2"),
        (["steps"], "is not an override"),
        (["--task", "dance"], "invalid choice"),
    ],
)
def test_bad_input_is_one_message(arguments: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    assert main.run(["import", "maxtext", str(config_file(tmp_path, "steps: 5")), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.yml").write_text("base_emb_dim: 48\nbase_num_decoder_layers: 3")
    (tmp_path / "base.yml").write_text("steps: 150001\nlearning_rate: 1.e-3\nkey_of_next_year: 1")
    (tmp_path / "middle.yml").write_text("base_config: base.yml\nsteps: 7\nmodel_name: mine")
    t = translate(config_file(tmp_path, "base_config: middle.yml\nlog_period: 3"), [])
    assert t.values["model.emb_dim"] == 48 and t.values["model.num_layers"] == 3
    assert t.values["train.steps"] == 7 and t.values["train.log_every"] == 3
    assert t.values["optimizer.learning_rate"] == 1e-3
    assert "key_of_next_year" in [note.key for note in t.notes]
    (tmp_path / "middle.yml").write_text("base_config: missing.yml")
    with pytest.raises(ConfigError, match="no such file"):
        translate(tmp_path / "config.yml", [])


def test_page_is_current() -> None:
    assert docs.PATH.read_text() == docs.page(), "run `python -m maxhydra.cli.maxtext.docs`"


def test_every_row_has_one_state_and_existing_keys() -> None:
    paths = {path for path, _ in walk(Config)}
    assert len(reference_rows()) == 724 and not reference_rows().keys() & newer_rows().keys()
    for key, row in rows().items():
        assert row.state in STATES
        texts = [row.to, row.fixed, row.instead, row.derived, row.cloud, row.none]
        assert sum(map(bool, texts)) == 1, key
        assert bool(row.why) == bool(row.fixed), key
        assert not row.by or row.by in FUNCTIONS, key
        assert row.by or not row.to or row.to in paths, f"{key}: {row.to}"


def test_conversions_read_their_keys() -> None:
    """A key with a function is named in its module, or is made from a pattern such as ici_NAME_parallelism."""
    sources = {name: inspect.getsource(inspect.getmodule(function) or main) for name, function in FUNCTIONS.items()}
    everything = "".join(sources.values()) + "".join(architecture.keys())
    patterns = ("_parallelism", "_end", "_schedule", "multi_tier_checkpointing_backup_interval_")
    sections = (
        "rl",
        "dpo",
        "lora",
        "cluster",
        "dataset",
        "reward",
        "special_tokens",
        "evaluation",
        "vllm",
        "base_config",
    )
    unread = [
        key
        for key, row in rows().items()
        if row.by and f'"{key}"' not in everything and key not in sections and not any(part in key for part in patterns)
    ]
    assert unread == []


def test_help_imports_neither_jax_nor_hydra() -> None:
    code = (
        "import sys; from maxhydra.cli import main; assert main.run(['import', '--help']) == 0;"
        "assert not {'jax', 'hydra', 'numpy'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["tiny", "wsd", "experts"])
def test_tiny_translations_train(name: str, tmp_path: Path) -> None:
    overrides = translate(config_file(tmp_path, EXAMPLES[name]), ["log_period=1"]).overrides()
    done = cli.run(*overrides, f"run.outputs={tmp_path}", "run.name=r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r" / "metrics.jsonl").read_text().count('"loss"') >= 1
