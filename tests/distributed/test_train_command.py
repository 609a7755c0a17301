"""`scaledtensor train --parallel` runs under torchrun, is killed and resumed, and refuses wrong
options."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import scaledtensor
from scaledtensor.__main__ import main

TINY = "--layers 1 --width 16 --heads 2 --context 8 --batch 4 --threads 1 --sample 0"
PATIENCE = 180


@pytest.fixture
def words(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("one two three four five six seven eight nine ten\n" * 100)
    return path


def command(words, folder, *options):
    train = ["--text", str(words), "--checkpoint", str(folder), *TINY.split(), *options]
    return ["-m", "scaledtensor", "train", *train]


def start(ranks, arguments):
    """A job of torchrun, in a process group of its own."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    package = str(Path(scaledtensor.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, *torchrun, *arguments],
        env={**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(job):
    """Return the output of a job and its exit status."""
    try:
        told, _ = job.communicate(timeout=PATIENCE)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    return told, job.returncode


def losses(path):
    return dict(line.split() for line in path.read_text().splitlines())


def child_of(job, rank):
    """Return the process of a rank. torchrun tells each its rank by the environment."""
    for status in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = dict(v.split("=", 1) for v in status.read_text().split("\0") if "=" in v)
            parent = (status.parent / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if parent == str(job.pid) and variables.get("RANK") == str(rank):
            return int(status.parent.name)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test__a_killed_rank__ends_the_job_with_a_word__and_the_rest_is_as_if_it_had_not(
    words, tmp_path
):
    first, then = tmp_path / "first.txt", tmp_path / "then.txt"
    options = ["--parallel", "fsdp2", "--save-every", "8"]
    endless = [*options, "--steps", "4000", "--losses", str(first)]
    job = start(2, command(words, tmp_path / "kept", *endless))
    deadline = time.monotonic() + PATIENCE
    while not (first.exists() and len(losses(first)) > 12):
        assert time.monotonic() < deadline
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.02)
    os.kill(child_of(job, 1), signal.SIGKILL)
    told, code = ended(job)
    assert code != 0
    assert "Signal 9 (SIGKILL)" in told
    assert "rank 0 lost another rank" in told
    assert "--resume continues from" in told

    done = losses(first)
    to = ["--steps", str(len(done) + 5), "--resume", "--losses", str(then)]
    told, code = ended(start(2, command(words, tmp_path / "kept", *options, *to)))
    assert code == 0, told
    assert "held-out loss" in told
    # The steps after the checkpoint run again and give the same bits.
    again = losses(then)
    assert min(map(int, again)) % 8 == 1
    assert min(map(int, again)) <= len(done) + 1
    assert max(map(int, again)) == len(done) + 5
    assert all(loss == again[step] for step, loss in done.items() if step in again)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "tp", "fsdp2+tp"])
def test__other_kinds__train__and_go_on_with_another_number_of_ranks(words, tmp_path, kind):
    ranks = 4 if kind == "fsdp2+tp" else 2
    log = tmp_path / "losses.txt"
    options = ["--parallel", kind, "--steps", "10", "--losses", str(log)]
    told, code = ended(start(ranks, command(words, tmp_path / "a", *options)))
    assert code == 0, told
    options = ["--parallel", "fsdp2", "--steps", "20", "--losses", str(log), "--resume"]
    told, code = ended(start(1, command(words, tmp_path / "a", *options)))
    assert code == 0, told
    assert "at step 10" in told
    found = [float(loss) for loss in losses(log).values()]
    assert len(found) == 20
    assert found[-1] < found[9] < found[0]


# --- what is refused, before anything is done ------------------------------------------------


def refused(capsys, monkeypatch, words, tmp_path, options, world=None):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    if world is not None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert main(command(words, tmp_path / "kept", *options.split())[2:]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "world", "words_of_the_error"),
    [
        ("--parallel ddp", None, "torchrun --nproc-per-node 2"),
        ("", 2, "say how they share it, --parallel ddp"),
        ("--parallel fsdp2+tp", 3, "an even number of processes; there are 3"),
        ("--parallel fsdp2", 3, "--batch 4 cannot be divided among 3"),
        ("--parallel tp", 3, "--width 16 cannot be divided among 3"),
        ("--parallel tp --reduce fp8", 2, "leave --reduce out"),
        ("--parallel ddp --backend carrier-pigeon", 2, "carrier-pigeon is not in this build"),
    ],
)
def test__what_cannot_be__is_refused(
    capsys, monkeypatch, words, tmp_path, options, world, words_of_the_error
):
    assert words_of_the_error in refused(capsys, monkeypatch, words, tmp_path, options, world)


def test__a_file_is_no_folder(capsys, monkeypatch, words, tmp_path):
    (tmp_path / "kept").write_text("")
    told = refused(capsys, monkeypatch, words, tmp_path, "--parallel ddp", 2)
    assert "--checkpoint is a folder" in told
