"""Hardware detection on fake hosts, flags, options, and real processes that connect over loopback."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from maxhydra.config import ConfigError
from maxhydra.config.schema.hardware import Cluster, Distributed, Hardware, Platform, Precision
from maxhydra.config.schema.quantization import Quantization, QuantizationKind
from maxhydra.runtime.detect import (
    DetectedDevices,
    cpu_rejects_cache,
    detect,
    hardware_options,
    matches_device,
    resolve,
)
from maxhydra.runtime.distributed import ClusterInfo, detect_cluster
from maxhydra.runtime.flags import backend_environment, merge_flags
from tests.support.ports import free_address

ROOT = Path(__file__).parents[2]
OPTIONS = sorted(path.stem for path in (ROOT / "conf/hardware").glob("*.yaml"))
CPU = DetectedDevices(Platform.cpu, "cpu", 1, "")
TPU = DetectedDevices(Platform.tpu, "TPU v5p", 4, "")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def gpu_host(root: Path, model: str, count: int) -> Path:
    for i in range(count):
        write(root / f"proc/driver/nvidia/gpus/0000:0{i}:00.0/information", f"Model: \t\t {model}\nIRQ:   \t\t 4\n")
    return root


def tpu_host(root: Path, device: str, count: int) -> Path:
    for i in range(count):
        write(root / f"sys/bus/pci/devices/0000:0{i}:04.0/vendor", "0x1ae0\n")
        write(root / f"sys/bus/pci/devices/0000:0{i}:04.0/device", f"{device}\n")
    return root


class TestDetect:
    @pytest.mark.parametrize(
        ("model", "option"),
        [
            ("NVIDIA A100-SXM4-80GB", "gpu-a100"),
            ("NVIDIA H100 80GB HBM3", "gpu-h100"),
            ("NVIDIA H200", "gpu-h200"),
            ("NVIDIA B200", "gpu-b200"),
            ("NVIDIA H100 PCIe", "gpu"),
            ("NVIDIA GB200", "gpu"),
            ("NVIDIA GeForce RTX 4090", "gpu"),
        ],
    )
    def test_gpu(self, tmp_path: Path, model: str, option: str) -> None:
        devices = detect(Platform.auto, {}, gpu_host(tmp_path, model, 8))
        assert (devices.platform, devices.kind, devices.count) == (Platform.gpu, model, 8)
        name, hardware = resolve(Hardware(), devices)
        assert (name, hardware.platform) == (option, Platform.gpu)

    @pytest.mark.parametrize(
        ("device", "accelerator", "jax_kind", "option"),
        [
            ("0x005e", "v4-8", "TPU v4", "tpu-v4"),
            ("0x0063", "v5litepod-16", "TPU v5 lite", "tpu-v5e"),
            ("0x0063", "tpu-v5-lite-podslice", "TPU v5e", "tpu-v5e"),
            ("0x0062", "v5p-128", "TPU v5", "tpu-v5p"),
            ("0x0062", "tpu-v5p-slice", "TPU v5p", "tpu-v5p"),
            ("0x006f", "v6e-8", "TPU v6 lite", "tpu-v6e"),
            ("0x0076", "tpu7x-128", "TPU7x", "tpu-v7"),
        ],
    )
    def test_tpu(self, tmp_path: Path, device: str, accelerator: str, jax_kind: str, option: str) -> None:
        by_bus = detect(Platform.auto, {}, tpu_host(tmp_path / "vm", device, 4))
        by_name = detect(Platform.auto, {"TPU_ACCELERATOR_TYPE": accelerator}, tmp_path / "pod")
        assert by_bus.count == 4
        assert resolve(Hardware(), by_bus)[0] == option
        assert resolve(Hardware(), by_name)[0] == option
        fitting = [name for name, hardware in hardware_options().items() if matches_device(hardware, jax_kind)]
        assert fitting == [option]

    def test_nvidia_smi_is_used_without_driver_files(self, tmp_path: Path) -> None:
        tool = tmp_path / "bin/nvidia-smi"
        write(tool, "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n")
        tool.chmod(0o755)
        devices = detect(Platform.auto, {"PATH": str(tmp_path / "bin")}, tmp_path)
        assert (devices.kind, devices.count) == ("NVIDIA H200", 2)

    @pytest.mark.parametrize(("visible", "count"), [("0", 1), ("2,3,5", 3), ("GPU-1,GPU-2", 2)])
    def test_only_visible_gpus_are_counted(self, tmp_path: Path, visible: str, count: int) -> None:
        root = gpu_host(tmp_path, "NVIDIA H200", 8)
        assert detect(Platform.auto, {"CUDA_VISIBLE_DEVICES": visible}, root).count == count

    @pytest.mark.parametrize("setting", ["CUDA_VISIBLE_DEVICES=", "CUDA_VISIBLE_DEVICES=-1", "JAX_PLATFORMS=cpu"])
    def test_cpu_is_used_if_gpus_are_hidden(self, tmp_path: Path, setting: str) -> None:
        name, value = setting.split("=")
        assert detect(Platform.auto, {name: value}, gpu_host(tmp_path, "NVIDIA H200", 8)).platform is Platform.cpu

    def test_host_without_accelerator_is_a_cpu(self, tmp_path: Path) -> None:
        write(tmp_path / "sys/bus/pci/devices/0000:00:03.0/vendor", "0x1af4\n")
        name, hardware = resolve(Hardware(), detect(Platform.auto, {}, tmp_path))
        assert (name, hardware.platform) == ("cpu", Platform.cpu)

    def test_compilation_cache_is_off_on_cpus_with_the_gds_bug(self, tmp_path: Path) -> None:
        assert not cpu_rejects_cache(tmp_path)
        write(tmp_path / "proc/cpuinfo", "flags\t\t: fpu gds_no\nbugs\t\t: spectre_v1 spec_store_bypass\n")
        assert not cpu_rejects_cache(tmp_path)
        write(tmp_path / "proc/cpuinfo", "flags\t\t: fpu\nbugs\t\t: spectre_v1 gds bhi\n")
        assert cpu_rejects_cache(tmp_path)


class TestOptions:
    def test_config_values_override_the_option(self) -> None:
        overrides = Hardware(
            compilation_cache=None,
            matmul_precision=Precision.highest,
            peak_tflops={"bfloat16": 783.0},
            distributed=Distributed(timeout_seconds=7),
        )
        name, hardware = resolve(overrides, DetectedDevices(Platform.gpu, "NVIDIA H200", 1, ""))
        assert name == "gpu-h200"
        assert hardware.compilation_cache is None
        assert hardware.matmul_precision is Precision.highest
        assert hardware.distributed.timeout_seconds == 7
        assert hardware.peak_tflops["bfloat16"] == 783.0
        assert hardware.peak_tflops["float8"] == hardware_options()["gpu-h200"].peak_tflops["float8"]
        assert hardware.xla_flags == hardware_options()["gpu-h200"].xla_flags

    @pytest.mark.parametrize("option", ["auto", "gpu-h200"])
    def test_flags_are_added_to_those_of_the_option(self, option: str) -> None:
        tuned = hardware_options()["gpu-h200"].xla_flags
        removed, replaced = (flag.partition("=")[0] for flag in tuned[:2])
        given = [f"~{removed}", f"{replaced}=other", "--xla_gpu_mine=1"]
        chosen = dataclasses.replace(hardware_options()[option], xla_flags=given)
        _, hardware = resolve(chosen, DetectedDevices(Platform.gpu, "NVIDIA H200", 1, ""))
        assert hardware.xla_flags == [*tuned[2:], *given[1:]]
        with pytest.raises(ConfigError, match="removes --xla_none, which is not set"):
            resolve(dataclasses.replace(hardware_options()["gpu-h200"], xla_flags=["~--xla_none"]), CPU)

    @pytest.mark.parametrize("name", [name for name in OPTIONS if name != "auto"])
    def test_an_option_chosen_by_name_is_unchanged(self, name: str) -> None:
        option = hardware_options()[name]
        assert resolve(option, CPU) == (name, option)

    @pytest.mark.parametrize("name", OPTIONS)
    def test_options_start_with_a_comment_and_have_peak_figures(self, name: str) -> None:
        assert (ROOT / f"conf/hardware/{name}.yaml").read_text().startswith("# ")
        option = hardware_options()[name]
        if option.platform in (Platform.gpu, Platform.tpu):
            assert option.memory_gib and option.bandwidth_gb_s
            assert option.peak_tflops["bfloat16"] >= option.peak_tflops["float32"] > 0

    def test_mfu_is_relative_to_the_format_of_the_matmuls(self) -> None:
        h200, a100 = (hardware_options()[name] for name in ("gpu-h200", "gpu-a100"))
        fp8, int8 = (Quantization(kind=kind, targets=["mlp"]) for kind in (QuantizationKind.fp8, QuantizationKind.int8))
        assert h200.mfu_peak("bfloat16", Quantization()) == ("bfloat16", 989.4)
        assert h200.mfu_peak("bfloat16", fp8) == ("float8", 1978.9)
        assert a100.mfu_peak("bfloat16", int8) == ("int8", 624)
        # An A100 has no float8 matmuls: values are converted to the compute dtype.
        assert a100.mfu_peak("bfloat16", fp8) == ("bfloat16", 312)

    @pytest.mark.slow
    def test_xla_accepts_the_flags(self) -> None:
        """The CPU build parses all GPU flags and aborts at an unknown one, naming it."""
        gpus = [option for option in hardware_options().values() if option.platform is Platform.gpu]
        lists = [flags for option in gpus for flags in (option.xla_flags, *option.flag_sets.values())]
        flags = sorted({flag for flags in lists for flag in flags})
        env = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", "import jax; jax.devices()"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert flags
        assert done.returncode == 0, done.stderr


class TestFlags:
    def test_flags_of_the_environment_take_precedence(self) -> None:
        merged = merge_flags(["--xla_a=1", "--xla_ab=2", "--xla_c"], "--xla_a=9  --xla_d=4")
        assert merged == "--xla_ab=2 --xla_c --xla_a=9 --xla_d=4"
        assert merge_flags([], "") == ""

    def test_flags_are_set_in_the_variable_of_the_platform(self) -> None:
        gpu, tpu = (Hardware(platform=platform, xla_flags=["--xla_x=1"]) for platform in (Platform.gpu, Platform.tpu))
        assert backend_environment(gpu, {}) == {"JAX_PLATFORMS": "cuda,cpu", "XLA_FLAGS": "--xla_x=1"}
        assert backend_environment(tpu, {"LIBTPU_INIT_ARGS": "--xla_y=2"}) == {
            "JAX_PLATFORMS": "tpu,cpu",
            "LIBTPU_INIT_ARGS": "--xla_x=1 --xla_y=2",
        }
        cpu = Hardware(platform=Platform.cpu, simulated_devices=4)
        assert backend_environment(cpu, {})["XLA_FLAGS"] == "--xla_force_host_platform_device_count=4"

    def test_another_platform_in_the_environment_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match="JAX_PLATFORMS=cpu"):
            backend_environment(Hardware(platform=Platform.gpu), {"JAX_PLATFORMS": "cpu"})
        assert backend_environment(Hardware(platform=Platform.gpu), {"JAX_PLATFORMS": "gpu"})["JAX_PLATFORMS"] == "gpu"

    def test_an_invalid_flag_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match=r"hardware\.xla_flags"):
            backend_environment(Hardware(platform=Platform.gpu, xla_flags=["xla_gpu_x=1"]), {})


SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "node[007-008]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
BATCH_SCRIPT = {name: value for name, value in SLURM.items() if "STEP" not in name}
JOBSET = {"JOBSET_NAME": "run", "REPLICATED_JOB_NAME": "w", "JOB_COMPLETION_INDEX": "1", "JAX_NUM_PROCESSES": "2"}
PLAIN = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


class TestDetectCluster:
    def test_slurm(self) -> None:
        eight_gpus = DetectedDevices(Platform.gpu, "NVIDIA H200", 8, "")
        cluster_info = detect_cluster(Cluster.auto, SLURM, eight_gpus)
        assert cluster_info == ClusterInfo("SLURM job 4100", f"node007:{61440 + 4102 % 4096}", 4, 3, (4, 5, 6, 7))

    @pytest.mark.parametrize(
        ("nodes", "first"),
        [("a", "a"), ("a,b[1-2]", "a"), ("n[3,7-9]", "n3"), ("gpu-x[01-02,5],y", "gpu-x01"), ("h-[1-2]", "h-1")],
    )
    def test_slurm_coordinator_is_the_first_node(self, nodes: str, first: str) -> None:
        cluster_info = detect_cluster(Cluster.auto, SLURM | {"SLURM_STEP_NODELIST": nodes}, CPU)
        assert cluster_info is not None and cluster_info.coordinator is not None
        assert cluster_info.coordinator.split(":")[0] == first

    @pytest.mark.parametrize(
        ("tasks", "gpus", "local_devices"),
        [
            ("1(x4)", 8, None),
            ("2(x2)", 1, None),
            ("2(x2)", 2, (1,)),
            ("2(x2)", 0, None),
            ("1,2(x3)", 8, (4, 5, 6, 7)),
            ("2,1", 8, None),
        ],
    )
    def test_slurm_tasks_share_the_gpus_of_a_node(
        self, tasks: str, gpus: int, local_devices: tuple[int, ...] | None
    ) -> None:
        env = SLURM | {"SLURM_STEP_TASKS_PER_NODE": tasks}
        cluster_info = detect_cluster(Cluster.auto, env, DetectedDevices(Platform.gpu, "NVIDIA H200", gpus, ""))
        assert cluster_info is not None and cluster_info.local_devices == local_devices

    def test_jobset(self) -> None:
        assert detect_cluster(Cluster.auto, JOBSET, CPU) == ClusterInfo("GKE JobSet run", "run-w-0-0.run:12321", 2, 1)
        second = {**JOBSET, "JAX_NUM_PROCESSES": "4", "JOBSET_JOB_INDEX": "1", "JOBSET_PODS_PER_JOB": "2"}
        assert detect_cluster(Cluster.auto, second, CPU) == ClusterInfo("GKE JobSet run", "run-w-0-0.run:12321", 4, 3)

    def test_tpu_pod_is_left_to_jax(self) -> None:
        cluster_info = detect_cluster(Cluster.auto, {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}, TPU)
        assert cluster_info is not None and cluster_info.coordinator is None
        assert detect_cluster(Cluster.auto, {"TPU_WORKER_HOSTNAMES": "localhost"}, TPU) is None

    def test_one_process_per_gpu(self) -> None:
        mpi = {"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
        cluster_info = detect_cluster(Cluster.gpu_multiprocess, mpi, CPU)
        assert cluster_info is not None
        assert (cluster_info.coordinator, cluster_info.count, cluster_info.index) == ("127.0.0.1:12321", 8, 3)
        assert cluster_info.local_devices == (3,)
        torchrun = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "9"}
        cluster_info = detect_cluster(Cluster.gpu_multiprocess, torchrun, CPU)
        assert cluster_info is not None and (cluster_info.coordinator, cluster_info.count) == ("h:9", 2)

    def test_processes_of_a_host_share_its_gpus(self) -> None:
        env, gpus = PLAIN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, DetectedDevices(Platform.gpu, "H200", 4, "")
        assert detect_cluster(Cluster.auto, env, gpus) == ClusterInfo(
            "JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234", 2, 1, (2, 3)
        )
        assert getattr(detect_cluster(Cluster.auto, PLAIN, gpus), "local_devices", 0) is None

    def test_plain_variables(self) -> None:
        expected = ("10.0.0.1:1234", 2, 1)
        for env in (PLAIN, {name.removeprefix("JAX_"): value for name, value in PLAIN.items()}):
            cluster_info = detect_cluster(Cluster.auto, env, CPU)
            assert (
                cluster_info is not None
                and (cluster_info.coordinator, cluster_info.count, cluster_info.index) == expected
            )

    @pytest.mark.parametrize(
        "env", [{}, SLURM | {"SLURM_NTASKS": "1"}, BATCH_SCRIPT, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}]
    )
    def test_single_process(self, env: dict[str, str]) -> None:
        assert detect_cluster(Cluster.auto, env, CPU) is None

    def test_cluster_none_is_a_single_process(self) -> None:
        assert detect_cluster(Cluster.none, SLURM | PLAIN, CPU) is None

    @pytest.mark.parametrize(
        ("cluster", "env", "message"),
        [
            (Cluster.auto, {"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_NUM_PROCESSES and JAX_PROCESS_ID are not set"),
            (Cluster.auto, {"JAX_NUM_PROCESSES": "2"}, "set: JAX_NUM_PROCESSES=2; required: JAX_COORDINATOR_ADDRESS"),
            (Cluster.environment, {}, "none of them"),
            (Cluster.auto, PLAIN | {"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2 is out of range for JAX_NUM_PROCESSES=2"),
            (Cluster.auto, PLAIN | {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES=two is not a number"),
            (Cluster.auto, PLAIN | {"JAX_COORDINATOR_ADDRESS": "host"}, "has no port"),
            (Cluster.slurm, BATCH_SCRIPT, "SLURM_STEP_NODELIST is not set"),
            (Cluster.gke, {"JOBSET_NAME": "run"}, "REPLICATED_JOB_NAME is not set"),
            (Cluster.gpu_multiprocess, {}, "LOCAL_RANK is not set"),
        ],
    )
    def test_missing_variables_are_named(self, cluster: Cluster, env: dict[str, str], message: str) -> None:
        with pytest.raises(ConfigError) as error:
            detect_cluster(cluster, env, CPU)
        assert message in str(error.value)
        assert error.value.problems[0].path == "hardware.distributed.cluster"


START = """
import json, sys
from maxhydra.config import ConfigError
from maxhydra.config.schema.hardware import Distributed, Hardware, Platform
from maxhydra.runtime import start
try:
    machine = start(Hardware(compilation_cache=None, **eval(sys.argv[1])))
except ConfigError as error:
    print(error)
    sys.exit(2)
"""
SUM = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.sharding.Mesh(jax.devices(), ("x",))
ones = jax.make_array_from_callback((4,), NamedSharding(mesh, P("x")), lambda i: jnp.arange(4.0)[i])
total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(ones)
print(json.dumps([float(total), machine.process_index, machine.process_count, machine.devices, machine.notes]))
"""


def run(code: str, arguments: str, env: dict[str, str]) -> subprocess.Popen:
    clean = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-c", code, arguments]
    env = clean | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])} | env
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.exhaustive
def test_two_processes_connect_and_sum() -> None:
    address = free_address()
    processes = [
        run(
            START + SUM,
            "dict(platform=Platform.cpu, simulated_devices=2)",
            {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(i)},
        )
        for i in range(2)
    ]
    for i, process in enumerate(processes):
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        # stdout is a single JSON document: output of gloo goes to stderr.
        total, index, count, devices, notes = json.loads(out)
        assert (total, index, count, devices) == (6.0, i, 2, 4)
        assert f"JAX_COORDINATOR_ADDRESS: process {i} of 2, coordinator {address}" in notes


@pytest.mark.slow
@pytest.mark.default_cases("1-process 0 is not reachable")
@pytest.mark.parametrize(
    ("index", "message"), [(0, "not all of the other 1 processes"), (1, "process 0 is not reachable")]
)
def test_timeout_names_the_unreachable_process(index: int, message: str) -> None:
    address = free_address()
    env = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index)}
    process = run(START, "dict(platform=Platform.cpu, distributed=Distributed(timeout_seconds=1))", env)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 2, err
    assert message in out and "hardware.distributed.timeout_seconds=1" in out


@pytest.mark.slow
def test_an_unavailable_platform_is_an_error() -> None:
    process = run(START, "dict(platform=Platform.gpu)", {"CUDA_VISIBLE_DEVICES": ""})
    out, err = process.communicate(timeout=240)
    assert process.returncode == 2, err
    assert "hardware.platform=gpu" in out and "hardware=cpu" in out


HOST = """
from maxhydra import runtime
print(runtime.start_on_host().device_kind, runtime.original_environment()["JAX_PLATFORMS"])
"""


@pytest.mark.slow
def test_start_on_host_uses_the_cpu_and_preserves_the_original_environment() -> None:
    process = run(HOST, "", {"JAX_PLATFORMS": "tpu"})
    out, err = process.communicate(timeout=240)
    assert out.split() == ["cpu", "tpu"], err


AGAIN = """
for count in (4, 5):
    try:
        print(start(Hardware(platform=Platform.cpu, simulated_devices=count)).local_devices)
    except ConfigError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_second_start_with_other_flags_is_an_error() -> None:
    process = run(START + AGAIN, "dict(platform=Platform.cpu, simulated_devices=4)", {})
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert out.splitlines()[0] == "4"
    assert "this process has already started jax with XLA_FLAGS=--xla_force_host_platform_device_count=4" in out
