"""A real SLURM cluster on loopback: two virtual nodes on this machine, with all state in one folder."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.polling import wait_for
from tests.support.ports import free_ports

COMMANDS = ("munged", "mungekey", "munge", "slurmctld", "slurmd", "sinfo", "sbatch", "srun", "squeue", "scancel")
NODES = ("127.0.0.1", "127.0.0.2")
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

# Nodes are named by loopback addresses, which resolve without /etc/hosts; more CPUs than the machine has, so that jobs
# need not wait for each other; no cgroups, so that it runs in a container.
CONFIG = """
ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
MessageTimeout=20
KillWait=20
MinJobAge=600
CompleteWait=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
NodeName=DEFAULT CPUs=4 RealMemory=4000 State=UNKNOWN
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=main Nodes=127.0.0.[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def require() -> None:
    """Skip the test if SLURM is not installed."""
    missing = [name for name in COMMANDS if shutil.which(name, path=SEARCH) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install slurm-wlm munge")


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Environment for clients of a cluster that runs, with its jobs, until the context exits."""
    # SLURM rejects folders that others can write to.
    for path in (folder, folder / "munge", folder / "state", *(folder / "spool" / node for node in NODES)):
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o755)
    text = CONFIG.format(host=socket.gethostname(), user=getpass.getuser(), folder=folder, ports=free_ports(3))
    (folder / "slurm.conf").write_text(textwrap.dedent(text))
    environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SEARCH}
    daemons: list[subprocess.Popen] = []

    def start(*command: str) -> None:
        with open(folder / f"{len(daemons)}.out", "wb") as out:
            variables = {**os.environ, **environment}
            daemons.append(subprocess.Popen(command, env=variables, stdout=out, stderr=out, start_new_session=True))

    def output_of(*command: str) -> str:
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    try:
        munge = folder / "munge"
        output_of("mungekey", "--create", f"--keyfile={munge}/key")
        files = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
        start("munged", "--foreground", "--force", f"--socket={munge}/socket", *files)
        wait_for(lambda: output_of("munge", "-n", f"--socket={munge}/socket"))
        start("slurmctld", "-D", "-c")
        wait_for(lambda: "is UP" in output_of("scontrol", "ping"))
        for node in NODES:
            start("slurmd", "-D", "-N", node)
        wait_for(lambda: output_of("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").count("\n") == len(NODES))
        yield environment
    finally:
        output_of("scancel", "--full", f"--user={getpass.getuser()}")
        # munged last, because the others need it to authenticate.
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
        _kill_steps(environment["SLURM_CONF"])


def _kill_steps(config: str) -> None:
    """Kill remaining processes of jobs, which outlive the daemons by design."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:
            continue
        has_job_id = any(line.startswith(b"SLURM_JOB_ID=") for line in variables)
        if has_job_id and f"SLURM_CONF={config}".encode() in variables:
            os.kill(int(path.parent.name), signal.SIGKILL)
