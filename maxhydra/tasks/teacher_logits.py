"""Write a dataset with a teacher's top-k logits, so that distillation does not need to run the teacher.

Read the result with data=grain data.path=FOLDER data.record_type=teacher.
"""

from contextlib import closing
from pathlib import Path

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.tasks.preparation import TeacherLogitsTask
from maxhydra.convert.load import load_weights
from maxhydra.data.rows import Document
from maxhydra.data.shards import COUNTERS_PER_SHARD, Shards, open_index
from maxhydra.decode.open import check_same_model
from maxhydra.distill.teacher import TopLogits
from maxhydra.model import build
from maxhydra.model.stored_params import fingerprint
from maxhydra.runtime.channel import is_main
from maxhydra.sharding import Sharder
from maxhydra.tasks import Job, Outcome
from maxhydra.tasks.tokenize import Display
from maxhydra.train import plan_batches

NEEDS_DEVICES, KEEPS_RUN = True, False


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, TeacherLogitsTask)
    top_logits = _open_teacher(job, task)
    # A device computation, which all processes take part in.
    digest = fingerprint(top_logits.weights)
    if not is_main():
        top_logits.follow()
        return Outcome("finished", "written by process 0")
    with closing(top_logits):
        return _write(config, task, top_logits, digest)


def _write(config: Config, task: TeacherLogitsTask, top_logits: TopLogits, digest: str) -> Outcome:
    folder = Path(task.output).expanduser().absolute()
    counts = [0] * (COUNTERS_PER_SHARD * task.shards)

    def enrich(documents: list[Document]) -> list[Document]:
        display.show(sum(counts[0::COUNTERS_PER_SHARD]), sum(counts[1::COUNTERS_PER_SHARD]))
        return top_logits(documents)

    shards = Shards(config.data, folder, task.shards, enrich)
    depends = {
        "task.k": task.k,
        "train.seq_len": config.train.seq_len,
        "data.packing": str(config.data.packing),
        "the teacher's weights": digest,
    }
    with open_index(folder, config.data, shards, task.shards, depends) as index:
        with Display(shards.records, index.totals) as display:
            for shard in range(task.shards):
                if shards.name(shard) not in index.done:
                    index.add(shards.name(shard), shards.write(shard, counts))
        totals = index.totals
    print(
        f"{totals['records']:,} records, {totals['tokens']:,} tokens with {task.k} logits each, {folder}\n"
        f"train on them with: task=distill data=grain data.path={folder} data.record_type=teacher"
    )
    return Outcome("finished", "all shards written", {name: float(value) for name, value in totals.items()})


def _open_teacher(job: Job, task: TeacherLogitsTask) -> TopLogits:
    config = job.config
    location = config.checkpoint.load_parameters
    problems = []
    if location is None:
        reason = "is required: it names the teacher"
        accepted = "a run folder or another checkpoint"
        problems.append(Problem("checkpoint.load_parameters", reason, value=None, accepted=accepted))
    if task.k > config.model.vocab_size:
        reason = f"exceeds model.vocab_size={config.model.vocab_size}"
        problems.append(Problem("task.k", reason, value=task.k))
    if location is None or problems:
        raise ConfigError(problems)
    check_same_model(config, location)
    sharder = Sharder.from_config(config.mesh)
    spec = plan_batches(config, sharder)
    model = build(config.model)
    model.check_mesh(sharder)
    dtype = config.model.dtypes.compute.value
    weights = load_weights(location, model, shardings=sharder.tree(model.axes), dtype=dtype)
    return TopLogits(model, weights, sharder, spec, config.data.packing, task.k, config.train.chunk)
