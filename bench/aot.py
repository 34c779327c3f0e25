"""Compile the training step for GPUs or TPUs that are not attached, and print the contents of the program as JSON.

python bench/aot.py model=llama3.1-8b model.num_layers=2 mesh.fsdp=8
python bench/aot.py topology=b200:4x8 hlo=/tmp/step.txt model=qwen3-30b-a3b model.num_layers=2 mesh.expert=32

topology: h200:8 unless given; the hardware option follows from it. hlo: file for the optimized program. The CUDA plugin
of jax's version must be installed (`pip install 'jax-cuda13-plugin[with-cuda]'`); no GPU is needed. For each mesh
axis the report has the MiB that a device sends in a step and the theoretical minimum (maxhydra/measure/minimum.py).
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

from arguments import split_arguments

# The compiler of the absent devices runs on this host's CPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.measure.compiled import compile_report
from maxhydra.runtime.topology import absent_devices
from maxhydra.sharding import Sharder, build_mesh

DEFAULTS = ["train.seq_len=4096", "train.per_device_batch_size=1"]


def main() -> None:
    own, overrides = split_arguments(sys.argv[1:], ("topology", "hlo", "slices"))
    topology = own.get("topology", "h200:8")
    chip = topology.partition(":")[0]
    hardware = "cpu" if chip == "cpu" else f"{'tpu' if chip.startswith('v') else 'gpu'}-{chip}"
    try:
        config = compose([f"hardware={hardware}", *DEFAULTS, *overrides]).config
        devices = absent_devices(topology, slices=int(own.get("slices", 1)), hardware=config.hardware)
        report, compiled = compile_report(config, Sharder.from_config(config.mesh, build_mesh(config.mesh, devices)))
    except ConfigError as error:
        sys.exit(str(error))
    if "hlo" in own:
        Path(own["hlo"]).write_text(compiled.as_text())
    print(json.dumps({"topology": topology, "overrides": overrides, **dataclasses.asdict(report)}, indent=1))


if __name__ == "__main__":
    main()
