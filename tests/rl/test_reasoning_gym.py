"""reasoning-gym problems as a data source, and its verifiers as a reward."""

import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.reward import RewardKind, Term
from maxhydra.data import RowSpec
from maxhydra.data.sources import RecordSource, open_source
from maxhydra.rl.rewards import Sample, build_score
from tests.support.skips import import_optional


@pytest.fixture(scope="module", autouse=True)
def reasoning_gym() -> None:
    """Imported by the process that runs these tests, not by every one that collects them: it takes seconds."""
    import_optional("reasoning_gym", extra="rl")


def source(*overrides: str) -> RecordSource:
    data = compose(["data=reasoning_gym", "data.name=chain_sum", "data.problems=40", *overrides]).config.data
    opened = open_source(data, data, RowSpec(seq_len=64, vocab_size=300, seed=0))
    assert isinstance(opened, RecordSource)
    return opened


@pytest.mark.slow
def test_problems_are_reproducible_and_some_are_held_out() -> None:
    first, second = source("data.eval_fraction=0.25"), source("data.eval_fraction=0.25")
    assert (len(first.train), len(first.evaluation)) == (30, 10)
    assert first.train.read([3, 7]) == second.train.read([3, 7])
    trained, held_out = (part.read(range(len(part))) for part in (first.train, first.evaluation))
    assert not {record["entry"]["metadata"]["source_index"] for record in trained} & {
        record["entry"]["metadata"]["source_index"] for record in held_out
    }
    assert trained[0]["prompt"] == [{"role": "user", "content": trained[0]["entry"]["question"]}]


def test_the_tasks_verifier_scores() -> None:
    score = build_score(Term(kind=RewardKind.reasoning_gym))
    (record,) = source().train.read([0])

    def score_of(text: str | None) -> float:
        entry = {"entry": record["entry"]}
        return score(Sample(prompt="", text="", answer=text, expected=record["answer"], record=entry, tokens=1))

    assert score_of(f" {record['answer']}\n") == 1
    assert score_of("no") < 1 and score_of(None) < 1


def test_an_unknown_task_is_rejected() -> None:
    with pytest.raises(ConfigError, match="chain_sum"):
        source("data.name=chain_sums")
    with pytest.raises(ConfigError) as caught:
        compose(["data=reasoning_gym"])
    assert [problem.path for problem in caught.value.problems] == ["data.name"]
