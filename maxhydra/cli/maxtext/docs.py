"""Generator of docs/maxtext.md, the table of MaxText's keys: `python -m maxhydra.cli.maxtext.docs`."""

from collections import Counter
from collections.abc import Iterator

from maxhydra.cli.maxtext.table import CLOUD, DERIVED, HOME, NONE, OTHER, STATES, Row, newer_rows, reference_rows
from maxhydra.config.errors import UNSET, show
from maxhydra.config.registry import PACKAGE

PATH = PACKAGE.parent / "docs" / "maxtext.md"

HEAD = """\
# From MaxText

`maxhydra import maxtext` translates a config of MaxText to a command:

```bash
maxhydra import maxtext base.yml model_name=llama3.1-8b steps=1000 run_name=first
maxhydra import maxtext sft.yml model_name=llama3-8b --output conf/experiment/sft.yaml   # then maxhydra experiment=sft
maxhydra import maxtext base.yml model_name=llama3-8b load_parameters_path=gs://b/x --task decode
```

The arguments are those of MaxText: a YAML file, whose `base_config` is followed, and `key=value`. A missing `base.yml`
stands for the defaults of MaxText 0.2.5. The command is printed on stdout. Keys whose values it cannot express are
listed on stderr with the reason, or as comments of the experiment. An unknown key is an error (exit code 2) that names
the nearest one; unknown keys of `base.yml` itself are only listed, because it changes with every release of MaxText.

`model_name` chooses `model=NAME`. Without one, the model is the option with the architecture of `decoder_block`, and
the keys `base_*` replace its sizes; for a model of yours, `models/NAME.yml` is read from the folder of the config.

## Defaults that the command sets
The command sets defaults of MaxText that change training, where ours differ:

| key of MaxText | default | here |
|---|---|---|
"""

# Defaults that conversions set whatever the config says; those that are copied have `always` in the table.
CONVERTED = (
    "steps",
    "max_target_length",
    "gradient_accumulation_steps",
    "lr_schedule_type",
    "warmup_steps_fraction",
    "learning_rate_final_fraction",
    "adam_b1",
    "adam_b2",
    "adam_eps",
    "adam_weight_decay",
    "adamw_mask",
    "eval_interval",
    "remat_policy",
    "packing",
    "grain_packing_type",
    "use_truncation",
)
MEANINGS = {
    HOME: "has an equivalent: the value is translated, or describes what maxhydra always does",
    OTHER: "has an equivalent that the value cannot be translated to; the note says which",
    DERIVED: "follows from other keys, or belongs to a library or script that is not used here",
    CLOUD: "belongs to a service of Google",
    NONE: "has no equivalent; the note says why",
}


def page() -> str:
    """Return the page."""
    rows = reference_rows()
    always = [key for key, row in (rows | newer_rows()).items() if row.always or key in CONVERTED]
    lines = [HEAD + "\n".join(f"| `{key}` | `{_default(rows[key])}` | {_home(rows[key])} |" for key in always), ""]
    lines += ["## Coverage", *_coverage(rows), ""]
    lines += ["## Keys of the config reference", *_table(rows), ""]
    lines += ["## Newer keys", f"{len(newer_rows())} keys that the config reference does not list yet.", ""]
    return "\n".join([*lines, *_table(newer_rows()), ""])


def _coverage(rows: dict[str, Row]) -> Iterator[str]:
    counts = Counter(row.state for row in rows.values())
    outside = len(rows) - counts[CLOUD] - counts[DERIVED]
    yield f"The config reference of MaxText has {len(rows)} keys. {outside} of them have a meaning outside"
    yield f"of Google's services: {counts[HOME] + counts[OTHER]} have an equivalent, {counts[NONE]} do not."
    yield from ("", "| state | keys | meaning |", "|---|---|---|")
    yield from (f"| {state} | {counts[state]} | {MEANINGS[state]} |" for state in STATES)
    yield from ("", "| keys without an equivalent | reason |", "|---|---|")
    yield from (
        f"| {count} | {reason} |"
        for reason, count in Counter(row.none for row in rows.values() if row.none).most_common()
    )


def _table(rows: dict[str, Row]) -> Iterator[str]:
    yield from ("| key | default | state | here |", "|---|---|---|---|")
    for key, row in sorted(rows.items()):
        yield f"| `{key}` | {_code(_default(row))} | {row.state} | {_home(row)} |"


def _default(row: Row) -> str:
    return "" if row.default is UNSET else show(row.default).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _home(row: Row) -> str:
    if row.to:
        return ", ".join(f"`{part}`" for part in row.to.split(", ")) if " " not in row.to else row.to
    fixed = f"always {', '.join(map(show, row.fixed))}: " if row.fixed else ""
    return (fixed + row.text).replace("|", "\\|")


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
