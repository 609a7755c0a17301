import os
import re
import signal
import subprocess
import sys
import time
import zipfile

import pytest
import torch

import scaledtensor as sct
from scaledtensor.__main__ import main
from scaledtensor.apps import (
    checkpoint,
    precision,
)
from scaledtensor.apps import (
    generate as generate_command,
)
from scaledtensor.apps import (
    train as train_command,
)
from scaledtensor.apps.gpt import GPT, GPTConfig
from scaledtensor.apps.training import Trainer
from scaledtensor.checkpoint import files
from scaledtensor.errors import CheckpointError

RECIPES = ["fp32", "bf16", "unit"]


@pytest.fixture
def train(words, tiny, tmp_path):
    def train(*more, path=tmp_path / "run.pt", recipe="fp32", steps=6):
        options = ["--checkpoint", str(path), "--recipe", recipe, "--steps", str(steps)]
        return main(["train", "--text", str(words), "--sample", "5", *options, *tiny, *more])

    return train


def contents(path):
    """Return the saved state with every tensor as its bytes, so that `==` compares bits."""

    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if hasattr(value, "qdata"):
            return plain(value.qdata), plain(value.scale)
        if isinstance(value, torch.Tensor):
            return value.dtype, value.detach().contiguous().numpy().tobytes()
        return value

    return plain(torch.load(path, weights_only=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test__resumed_training__equals_the_uninterrupted_one_to_the_last_bit(
    recipe, train, tmp_path, capsys
):
    straight, halved = tmp_path / "straight.pt", tmp_path / "halved.pt"
    options = ("--dropout", "0.1")  # This makes torch's own generator matter too.
    assert train(*options, path=straight, recipe=recipe) == 0
    sample = capsys.readouterr().out
    assert train(*options, path=halved, recipe=recipe, steps=3) == 0
    assert contents(halved) != contents(straight)
    assert train(*options, "--resume", path=halved, recipe=recipe) == 0
    assert contents(halved) == contents(straight)
    assert capsys.readouterr().out.endswith(sample)


def test__finished_training__resumes_to_its_sample(train, tmp_path, capsys):
    train()
    before = contents(tmp_path / "run.pt")
    assert train("--resume") == 0
    assert "step 6: held-out loss" in capsys.readouterr().out
    assert contents(tmp_path / "run.pt") == before


@pytest.mark.parametrize("recipe", RECIPES)
def test__a_sample__needs_nothing_but_the_checkpoint(recipe, train, words, tmp_path, capsys):
    train("--prompt", "two", "--dropout", "0.1", recipe=recipe)
    wanted = capsys.readouterr().out
    path = str(tmp_path / "run.pt")
    words.unlink()
    # Several processes keep it in the same way, in a folder for each step.
    known, state = generate_command.identity(tmp_path / "run.pt", torch.device("cpu"))
    model = GPT(GPTConfig(len(known["vocabulary"]), 8, 1, 2, 16))
    precision.get(recipe).prepare(model)
    model.load_state_dict(state["model"])
    (tmp_path / "runs").mkdir()
    step = sct.checkpoint.step_folder(tmp_path / "runs", 6)
    sct.checkpoint.save(step, model, extra={"identity": known})
    for where in (path, str(tmp_path / "runs"), str(step)):
        assert main(["sample", where, "--prompt", "two", "--count", "5"]) == 0
        sample = capsys.readouterr().out
        assert sample.startswith("two")
        assert wanted.endswith(sample)
    assert main(["sample", path, "--count", "3", "--seed", "1", "--temperature", "0.5"]) == 0
    assert len(capsys.readouterr().out) == len("\n" + "123" + "\n")
    assert main(["sample", path, "--prompt", "§"]) == 2
    assert "'§' does not occur" in capsys.readouterr().err


def test__generate__says_speed_and_bytes_of_a_cache_and_of_quantized_weights(
    train, tmp_path, capsys
):
    train()
    sizes = []
    for cache, weights in (("none", "none"), ("fp32", "none"), ("e4m3fn", "int8")):
        capsys.readouterr()
        options = ["--cache", cache, "--weights", weights, "--temperature", "0", "--tokens", "6"]
        assert main(["generate", str(tmp_path / "run.pt"), "--prompt", "o", *options]) == 0
        out, err = capsys.readouterr()
        assert len(out) == len("o" + "123456" + "\n")
        assert "prefill: 1 tokens, " in err
        assert "decode: 5 tokens, " in err
        told = re.search(r"weights: ([\d,]+) bytes, cache: ([\d,]+) bytes", err)
        sizes.append((out, *(int(n.replace(",", "")) for n in told.groups())))
    plain, cached, small = sizes
    assert plain[:2] == cached[:2]  # the same tokens with a cache
    assert plain[2] == 0 < small[2] < cached[2]
    assert small[1] < cached[1]
    for option, words in (("--cache", "e8m0fnu"), ("--weights", "fp7")):
        assert main(["generate", str(tmp_path / "run.pt"), option, words]) == 2
        assert words in capsys.readouterr().err.lower()


def test__a_sample_from_something_else__is_refused(tmp_path, capsys):
    torch.save({}, tmp_path / "other.pt")
    sct.checkpoint.save(tmp_path / "folder", torch.nn.Linear(2, 2), extra={"step": 1})
    for name, words in (
        ("nowhere.pt", "does not exist; give a file or folder"),
        ("other.pt", "not one that `scaledtensor train` saved"),
        ("folder", "no checkpoint of `scaledtensor train`"),
        (".", "is no checkpoint"),
    ):
        assert main(["sample", str(tmp_path / name)]) == 2
        assert words in capsys.readouterr().err


def test__existing_checkpoint__is_not_overwritten_unasked(train, tmp_path, capsys):
    train()
    before = (tmp_path / "run.pt").read_bytes()
    assert train() == 2
    assert "exists already: continue it with --resume" in capsys.readouterr().err
    assert (tmp_path / "run.pt").read_bytes() == before


@pytest.mark.parametrize("recipe", RECIPES)
def test__ctrl_c_twice__finishes_the_step_saves_and_resumes(
    recipe, train, tmp_path, capsys, monkeypatch
):
    straight, halted = tmp_path / "straight.pt", tmp_path / "halted.pt"
    train(path=straight, recipe=recipe)

    step = Trainer.step

    def interrupted(trainer):
        if trainer.steps_done == 2:
            signal.raise_signal(signal.SIGINT)
        loss = step(trainer)
        if trainer.steps_done == 3:
            signal.raise_signal(signal.SIGINT)
        return loss

    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        assert train(path=halted, recipe=recipe) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert "stopped after step 3 and saved" in capsys.readouterr().out
    assert contents(halted)["step"] == 3

    assert train("--resume", path=halted, recipe=recipe) == 0
    assert contents(halted) == contents(straight)


def test__ctrl_c_while_saving__leaves_a_whole_checkpoint(train, tmp_path, monkeypatch):
    save = torch.save

    def interrupted(state, file):
        signal.raise_signal(signal.SIGINT)
        save(state, file)

    monkeypatch.setattr(torch, "save", interrupted)
    assert train("--save-every", "2") == 130
    assert contents(tmp_path / "run.pt")["step"] == 2
    assert [path.name for path in tmp_path.glob("*run.pt*")] == ["run.pt"]


def test__ctrl_c_from_outside__exits_with_130_and_nothing_lost(words, tiny, tmp_path):
    path = tmp_path / "run.pt"
    command = [sys.executable, "-m", "scaledtensor", "train", "--text", str(words)]
    command += ["--recipe", "fp32", "--checkpoint", str(path), "--steps", "1000000"]
    command += ["--save-every", "1", "--threads", "1", *tiny]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not path.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert f"stopped after step {contents(path)['step']} and saved" in out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--width", "32"), "--width is 16 there and 32 here. To resume, give the options"),
        (("--lr", "0.5"), "--lr is 0.001 there and 0.5 here"),
        (("--recipe", "bf16"), "--recipe is 'fp32' there and 'bf16' here"),
    ],
)
def test__checkpoint_of_another_training__is_refused_with_both_sides(
    more, message, train, tmp_path, capsys
):
    train()
    before = (tmp_path / "run.pt").read_bytes()
    assert train("--resume", *more) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "run.pt").read_bytes() == before


def test__checkpoint_of_another_text__is_refused(train, words, capsys):
    train()
    words.write_text(words.read_text() + "?")
    assert train("--resume") == 2
    error = capsys.readouterr().err
    assert "vocabulary is" in error
    assert "text_sha256 is" in error


def test__checkpoint_with_other_tensors__is_refused(train, tmp_path, capsys):
    train()
    path = tmp_path / "run.pt"
    state = torch.load(path, weights_only=True)
    state["model"]["head.weight"] = state["model"]["head.weight"].half()
    torch.save(state, path)
    assert train("--resume") == 2
    assert "another model: head.weight is ('Tensor'" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["truncated", "one bit", "pickle", "empty", "text"])
def test__damaged_file__is_refused(where, train, tmp_path, capsys):
    path = tmp_path / "run.pt"
    train()
    raw = bytearray(path.read_bytes())
    if where == "truncated":
        raw = raw[: len(raw) // 2]
    elif where == "one bit":  # The byte is in a tensor's data; torch.load alone would not notice.
        with zipfile.ZipFile(path) as archive:
            largest = max(archive.infolist(), key=lambda member: member.file_size)
        raw[largest.header_offset + largest.file_size // 2] ^= 1
    elif where == "pickle":
        raw = raw.replace(b"collections", b"collectiins")
    else:
        raw = bytearray(b"" if where == "empty" else b"no checkpoint")
    path.write_bytes(raw)
    assert train("--resume") == 2
    assert "is damaged or no checkpoint at all" in capsys.readouterr().err


@pytest.mark.parametrize("state", [{}, [1, 2], {"kind": checkpoint.KIND, "version": 99}])
def test__other_torch_file__is_refused(state, train, tmp_path, capsys):
    torch.save(state, tmp_path / "run.pt")
    assert train("--resume") == 2
    error = capsys.readouterr().err
    assert "not one that" in error or "has checkpoint version 99" in error


FORGED = {
    "step": (-1, "'step' is -1"),
    "batches": (torch.zeros(3), "'batches' is no state"),
    "random": ("seed", "'random' is a str"),
    "model": ({"tokens.weight": 3}, "is a int, and no tensor"),
    "optimizer": ({"param_groups": 3, "state": {}}, "'param_groups' is a number 3"),
    "identity": (None, "'identity' is a NoneType"),
}


@pytest.mark.parametrize("field", FORGED)
@pytest.mark.parametrize("missing", [False, True])
def test__a_forged_field__is_refused_by_name(field, missing, train, tmp_path, capsys):
    train(steps=2)
    path = tmp_path / "run.pt"
    state = torch.load(path)
    value, message = FORGED[field]
    state[field] = value
    if missing:
        del state[field]
    torch.save(state, path)
    assert train("--resume") == 2
    error = capsys.readouterr().err
    assert (f"no field '{field}'" if missing else message) in error
    assert "Traceback" not in error


def test__a_negative_step_of_the_optimizer__is_refused(train, tmp_path, capsys):
    train(steps=2)
    path = tmp_path / "run.pt"
    state = torch.load(path)
    state["optimizer"]["state"][0]["step"] -= 5
    torch.save(state, path)
    assert train("--resume") == 2
    assert "state[0]['step'] is -3" in capsys.readouterr().err


def test__code_in_a_checkpoint__is_refused_without_torchs_advice(train, tmp_path, capsys):
    class Code:
        def __reduce__(self):
            return print, ("ran",)

    torch.save(Code(), tmp_path / "run.pt")
    assert train("--resume") == 2
    error = capsys.readouterr().err
    assert "it asks for print, which safe loading does not run" in error
    assert "weights_only" not in error


def test__a_second_training_of_the_same_name__is_refused(train, tmp_path, capsys):
    with files.locked(tmp_path / "run.pt"):
        assert train(steps=2) == 2
    error = capsys.readouterr().err
    assert f"is in use by process {os.getpid()}" in error
    assert not (tmp_path / "run.pt").exists()
    assert train(steps=2) == 0


def test__a_linked_checkpoint__stays_a_link(train, tmp_path):
    (tmp_path / "far").mkdir()
    link = tmp_path / "run.pt"
    link.symlink_to(tmp_path / "far" / "other.pt")
    assert train(steps=2) == 0
    assert link.is_symlink()
    assert (tmp_path / "far" / "other.pt").is_file()


def test__failed_save__keeps_the_previous_checkpoint(train, tmp_path, capsys, monkeypatch):
    train(steps=2)
    before = (tmp_path / "run.pt").read_bytes()

    def full(state, file):
        file.write(b"half a checkpoint")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    assert train("--resume") == 2
    assert "could not be saved: the disk is full" in capsys.readouterr().err
    assert (tmp_path / "run.pt").read_bytes() == before
    assert [path.name for path in tmp_path.glob("*run.pt*")] == ["run.pt"]


def test__folder_without_write_permission__is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(CheckpointError, match="is not writable"):
        checkpoint.check_writable(tmp_path / "run.pt")


def test__sample__begins_with_the_prompt(train, capsys):
    assert train("--prompt", "three") == 0
    assert "\nthree" in capsys.readouterr().out
    assert train_command.INTERRUPTED == 130
