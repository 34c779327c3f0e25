"""Write a teacher's top logits for a source of documents, so that distilling needs no teacher.

The result is read with data=grain data.path=FOLDER data.record_type=teacher.
"""

from pathlib import Path

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.tasks.teacher_logits import TeacherLogitsTask
from maxhydra.convert.load import load_weights
from maxhydra.data.document import Document
from maxhydra.data.shard_index import open_index
from maxhydra.data.shards import COUNTED, Shards
from maxhydra.decode.checkpoint_check import check_origin
from maxhydra.distill.top_logits import TopLogits
from maxhydra.model import build
from maxhydra.model.params_hash import fingerprint
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.tasks import Job, Outcome
from maxhydra.tasks.tokenize import Display
from maxhydra.train import plan_batches

NEEDS_DEVICES, KEEPS_RUN = True, False


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, TeacherLogitsTask)
    top = _open_teacher(job, task)
    folder = Path(task.output).expanduser().absolute()
    counted = [0] * (COUNTED * task.shards)

    def enrich(documents: list[Document]) -> list[Document]:
        display.show(sum(counted[0::COUNTED]), sum(counted[1::COUNTED]))
        return top(documents)

    shards = Shards(config.data, folder, task.shards, enrich)
    depends = {
        "task.k": task.k,
        "train.seq_len": config.train.seq_len,
        "data.packing": str(config.data.packing),
        "the teacher's weights": fingerprint(top.weights),
    }
    with open_index(folder, config.data, shards, task.shards, depends) as index:
        with Display(shards.records, index.totals) as display:
            for shard in range(task.shards):
                if shards.name(shard) not in index.done:
                    index.add(shards.name(shard), shards.write(shard, counted))
        totals = index.totals
    print(
        f"{totals['records']:,} records, {totals['tokens']:,} tokens with {task.k} logits after each, {folder}\n"
        f"learn from them with: task=distill data=grain data.path={folder} data.record_type=teacher"
    )
    return Outcome("finished", "all shards written", {name: float(value) for name, value in totals.items()})


def _open_teacher(job: Job, task: TeacherLogitsTask) -> TopLogits:
    config = job.config
    location = config.checkpoint.load_parameters
    problems = []
    if location is None:
        reason = "is needed: it is the teacher"
        problems.append(Problem("checkpoint.load_parameters", reason, value=None, accepted="a run folder, and others"))
    if task.k > config.model.vocab_size:
        reason = f"is over model.vocab_size={config.model.vocab_size}"
        problems.append(Problem("task.k", reason, value=task.k))
    if job.machine.process_count > 1:
        problems.append(Problem("task.name", "runs in one process, which may have many devices", value=task.name))
    if location is None or problems:
        raise ConfigError(problems)
    check_origin(config, location)
    sharder = Sharder(build_mesh(config.mesh), config.mesh.rules)
    spec = plan_batches(config, sharder)
    model = build(config.model)
    sharder.check(model.axes, model.shapes)
    dtype = config.model.dtypes.compute.value
    weights = load_weights(location, model, shardings=sharder.tree(model.axes), dtype=dtype)
    return TopLogits(model, weights, sharder, spec, config.data.packing, task.k, config.train.loss_chunk)
