"""Accuracy of experiment=shapes_sft or tones_sft on held-out records, greedily decoded, as one JSON line.

    python scripts/media_accuracy.py shapes_sft [RUN] [--count 1000]

RUN is outputs/EXPERIMENT by default. Exits with 1 if the accuracy is 95 % or less.
"""

import argparse
import dataclasses
import json
import sys
from collections import Counter

from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.inference import DecodeTask
from maxhydra.data.audio.tokens import AUDIO_PARTS, CLIP_MARKER
from maxhydra.data.image_tokens import with_markers
from maxhydra.data.sources import shapes, tones
from maxhydra.decode.open import open_engine, open_prompts
from maxhydra.decode.sampling_params import make_requests

MIN_ACCURACY = 0.95
RECORDS = {"shapes_sft": shapes.make_record, "tones_sft": tones.make_record}
DECODE = ["task=decode", "task.prompt=x", "task.sampling.temperature=0", "task.sampling.max_tokens=8"]
ENGINE = ["task.engine.max_context=128", "task.engine.max_batch=64", "task.engine.cache_tokens=8192"]


def held_out_accuracy(experiment: str, run: str, count: int) -> tuple[float, Counter[str]]:
    """The share of right responses, and the wrong ones."""
    config = compose([f"experiment={experiment}", f"checkpoint.load_parameters={run}", *DECODE, *ENGINE]).config
    assert isinstance(config.task, DecodeTask)
    prompts = open_prompts(config)
    engine = open_engine(config, config.task.engine, prompts)
    # Held-out records come first.
    records = [RECORDS[experiment](index) for index in range(count)]
    requests = []
    for number, record in enumerate(records):
        question = with_markers(with_markers(record["messages"][:1], AUDIO_PARTS, CLIP_MARKER))
        media = prompts.insert_media(
            prompts.encode_messages(question), images=record.get("images", ()), audios=record.get("audios", ())
        )
        (request,) = make_requests(media.prompt, config.task.sampling, samples=1, seed=0, number=number, logprobs=None)
        requests.append(dataclasses.replace(request, images=media.images, audio=media.audio))
    try:
        responses = [handle.result().text.strip() for handle in engine.submit_all(requests)]
    finally:
        engine.close()
    wrong = Counter(
        f"{record['answer']}: {response}"
        for record, response in zip(records, responses, strict=True)
        if response != record["answer"]
    )
    return 1 - wrong.total() / count, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=sorted(RECORDS))
    parser.add_argument("run", nargs="?")
    parser.add_argument("--count", type=int, default=1000)
    arguments = parser.parse_args()
    run = arguments.run or f"outputs/{arguments.experiment}"
    accuracy, wrong = held_out_accuracy(arguments.experiment, run, arguments.count)
    print(json.dumps({"records": arguments.count, "accuracy": round(accuracy, 4), "wrong": wrong.most_common(5)}))
    return int(accuracy <= MIN_ACCURACY)


if __name__ == "__main__":
    sys.exit(main())
