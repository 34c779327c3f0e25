"""A run that is killed, preempted, or loses disk space or a checkpoint resumes as if it had never stopped."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import callbacks, skips
from tests.support import cli as running
from tests.support.cli import SMALL, facts, losses, parameter_hash, rewind, run, run_ok

STEPS = 24
RUN = [*SMALL, f"train.steps={STEPS}", "checkpoint.every=4", "checkpoint.keep=2", "model.dropout=0.1"]
RUN += ["train.eval_batches=0"]
# A learning rate that does not depend on the number of steps.
RUN += ["optimizer/schedule=constant"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("whole")
    run_ok(*RUN, "run.name=whole", cwd=cwd)
    return cwd / "outputs" / "whole"


@pytest.fixture(scope="module")
def eight_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with checkpoints of steps 4 and 8."""
    cwd = tmp_path_factory.mktemp("eight")
    run_ok(*RUN, "train.steps=8", "run.name=eight", cwd=cwd)
    return cwd / "outputs" / "eight"


KILLS = {
    "step": [callbacks.override("SignalItself", signal="SIGKILL", at=9)],
    "start": [],
    "save": [callbacks.override("KillInSave")],
}


def kill(cwd: Path, moment: str) -> None:
    """Run and kill -9: after a step, half a second after the start, or while a checkpoint is being written."""
    process = running.start_silent(*RUN, "run.name=killed", *KILLS[moment], cwd=cwd)
    if moment == "start":
        time.sleep(0.5)
        process.kill()
    assert process.wait(240) == -signal.SIGKILL


def list_names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


@pytest.mark.slow
def test_a_run_killed_three_times_is_bit_identical(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "killed"
    for moment in KILLS:
        kill(tmp_path, moment)
    assert any("tmp" in name for name in list_names(folder / "checkpoints")), "no kill happened during a save"
    run_ok(*RUN, "run.name=killed", cwd=tmp_path)
    assert losses(folder) == losses(uninterrupted)
    assert parameter_hash(folder, STEPS) == parameter_hash(uninterrupted, STEPS)
    assert facts(folder)["status"] == "finished"


@pytest.mark.slow
@pytest.mark.default_cases("SIGTERM")
@pytest.mark.parametrize(
    "numbers",
    [[signal.SIGTERM], [signal.SIGTERM, signal.SIGUSR1]],
    ids=lambda numbers: "-".join(each.name for each in numbers),
)
def test_signals_save_and_the_same_command_resumes(
    numbers: list[signal.Signals], uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "outputs" / "signalled"
    arguments = [*RUN, "run.name=signalled", "checkpoint.every=1000"]
    for number in numbers:
        done = run(*arguments, callbacks.override("SignalItself", signal=number.name), cwd=tmp_path)
        assert done.returncode == 128 + number, done.stderr
        assert facts(folder)["status"] == "preempted" and number.name in facts(folder)["reason"]
        assert len(list_names(folder / "checkpoints")) >= 1
    run_ok(*arguments, cwd=tmp_path)
    assert losses(folder) == losses(uninterrupted)
    assert parameter_hash(folder, STEPS) == parameter_hash(uninterrupted, STEPS)


@pytest.mark.exhaustive
def test_a_mixture_of_experts_resumes_after_a_kill(tmp_path: Path) -> None:
    """Experts, their router, and its bias, which is updated from the load and not by a gradient."""
    mixture = ["model=qwen3-moe-tiny", "model.kinds.layer.moe.router.bias_rate=0.001", "train.steps=8"]
    mixture += ["model.num_layers=2", "model.scan_unroll=1"]
    mixture += ["train.seq_len=16", "train.per_device_batch_size=2"]
    mixture += ["train.log_every=1", "train.eval_batches=0", "train.sample.tokens=0", "checkpoint.every=2"]
    whole = tmp_path / "outputs" / "whole"
    run_ok(*mixture, "run.name=whole", cwd=tmp_path)
    killed = rewind(whole, 4, "killed")
    assert "resuming from step 4" in run_ok(*mixture, "run.name=killed", cwd=tmp_path).stderr
    assert losses(killed) == losses(whole)
    assert parameter_hash(killed, 8) == parameter_hash(whole, 8)


def truncate(checkpoint: Path) -> None:
    for part in checkpoint.rglob("*"):
        if part.is_file() and part.parent.name == "d":
            os.truncate(part, part.stat().st_size // 2)


@pytest.mark.exhaustive
def test_a_truncated_checkpoint_is_named_and_the_one_before_is_used(
    uninterrupted: Path, eight_steps: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(eight_steps, tmp_path / "outputs" / "cut")
    newest = folder / "checkpoints" / "8"
    truncate(newest)
    done = run_ok(*RUN, "train.steps=12", "run.name=cut", cwd=tmp_path)
    assert f"cannot read checkpoint {newest}" in done.stderr
    assert "resuming from step 4" in done.stderr
    assert losses(folder) == {step: loss for step, loss in losses(uninterrupted).items() if step <= 12}
    assert (folder / "checkpoints" / "8.unreadable").is_dir()


@pytest.mark.exhaustive
def test_if_no_checkpoint_can_be_read_all_stay_and_no_new_run_starts(eight_steps: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(eight_steps, tmp_path / "outputs" / "away")
    checkpoints, before = folder / "checkpoints", losses(folder)
    shutil.copytree(checkpoints / "4", tmp_path / "4")
    truncate(checkpoints)
    done = run(*RUN, "run.name=away", cwd=tmp_path)
    assert done.returncode == 2 and "none of the run's 2 checkpoints can be read" in done.stderr
    assert sorted(list_names(checkpoints)) == ["4", "8"] and losses(folder) == before
    shutil.rmtree(checkpoints / "4")
    shutil.copytree(tmp_path / "4", checkpoints / "4")
    shutil.copytree(checkpoints / "8", checkpoints / "8.unreadable")
    assert "resuming from step 4" in run_ok(*RUN, "train.steps=8", "run.name=away", cwd=tmp_path).stderr
    assert sorted(list_names(checkpoints)) == ["4", "8", "8.unreadable", "8.unreadable-2"]
    assert losses(folder) == before


@pytest.mark.exhaustive
def test_a_damaged_checkpoint_of_another_run_is_reported(eight_steps: Path, tmp_path: Path) -> None:
    newest = shutil.copytree(eight_steps, tmp_path / "outputs" / "first") / "checkpoints" / "8"
    truncate(newest)
    for field in ("load_full_state", "load_parameters"):
        done = run(*RUN, "run.name=second", f"checkpoint.{field}=outputs/first", cwd=tmp_path)
        assert done.returncode == 2
        assert f"checkpoint.{field}={newest}: is damaged: " in done.stderr and "bytes instead of" in done.stderr


@pytest.mark.exhaustive
def test_a_checkpoint_of_another_model_is_rejected(eight_steps: Path, tmp_path: Path) -> None:
    shutil.copytree(eight_steps, tmp_path / "outputs" / "first")
    changed = [*RUN, "run.name=first", "model.mlp_dim=96"]
    done = run(*changed, cwd=tmp_path)
    assert done.returncode == 2 and "model.mlp_dim=96: was 64 in the last session of this run" in done.stderr
    done = run(*changed, "run.accept_changed_config=[model.mlp_dim]", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert (
        "belongs to a different model" in done.stderr and "(2, 64, 32)" in done.stderr and "(2, 96, 32)" in done.stderr
    )
    done = run(*RUN, "run.name=second", "checkpoint.load_parameters=nowhere", cwd=tmp_path)
    assert done.returncode == 2 and "checkpoint.load_parameters=nowhere: does not exist" in done.stderr


@pytest.mark.exhaustive
def test_loading_another_run(uninterrupted: Path, eight_steps: Path, tmp_path: Path) -> None:
    """load_full_state continues at the other run's step; load_parameters loads the weights and starts at step 0."""
    source = shutil.copytree(eight_steps, tmp_path / "outputs" / "first")
    run_ok(*RUN, "train.steps=12", "run.name=full", f"checkpoint.load_full_state={source}", cwd=tmp_path)
    expected = {step: loss for step, loss in losses(uninterrupted).items() if 8 < step <= 12}
    assert losses(tmp_path / "outputs" / "full") == expected
    run_ok(*RUN, "train.steps=4", "run.name=weights", f"checkpoint.load_parameters={source}", cwd=tmp_path)
    loaded = losses(tmp_path / "outputs" / "weights")
    assert list(loaded) == [1, 2, 3, 4]
    assert loaded[1] < losses(source)[1] - 0.1


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason=skips.ROOT)
def test_a_full_disk_leaves_the_last_checkpoint_intact(eight_steps: Path, tmp_path: Path) -> None:
    """The disk fills up between two saves; the run reports it, keeps its checkpoint and resumes when there is space."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=True)
    try:
        arguments = [*RUN, f"run.outputs={disk}", "run.name=full", "checkpoint.keep=1"]
        shutil.move(rewind(eight_steps, 4, "four"), disk / "full")
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "ballast").write_bytes(os.urandom(free - 60_000))
        done = run(*arguments, "train.steps=8", cwd=tmp_path)
        assert done.returncode == 1, done.stderr
        assert "could not write a checkpoint" in done.stderr
        assert "the checkpoint of step 4 is intact" in done.stderr
        assert "Traceback" not in done.stderr
        (disk / "ballast").unlink()
        run_ok(*arguments, "train.steps=8", cwd=tmp_path)
        assert list(losses(disk / "full")) == list(range(1, 9))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
