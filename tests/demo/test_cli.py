import json
import os
import re
import subprocess
import sys

import pytest

import scaledtensor as sct
from scaledtensor.__main__ import main
from scaledtensor.apps import demo as demo_command
from scaledtensor.apps import training
from scaledtensor.apps.demo import ROWS

PNG = b"\x89PNG\r\n\x1a\n"


def demo(words, tiny, tmp_path, *more):
    out = tmp_path / "out.png"
    return main(
        ["demo", "--text", str(words), "--steps", "3", "--out", str(out), *tiny, *more]
    ), out


def test__demo__prints_the_table_and_writes_picture_and_figures(words, tiny, tmp_path, capsys):
    code, out = demo(words, tiny, tmp_path, "--all")
    printed = capsys.readouterr().out
    assert code == 0
    for row in ROWS.values():
        assert row.title in printed
    assert "Verdict: " in printed
    assert out.read_bytes().startswith(PNG)
    figures = json.loads(out.with_suffix(".json").read_text())
    assert list(figures["rows"]) == list(ROWS)
    assert all(len(row["losses"]) == 3 for row in figures["rows"].values())
    assert figures["rows"]["unit-small"]["identical_to"] == {"unit": True}


def test__demo__takes_some_rows_and_gives_no_verdict_on_others(words, tiny, tmp_path, capsys):
    code, out = demo(words, tiny, tmp_path, "--rows", "fp8", "fp32")
    printed = capsys.readouterr().out
    assert code == 0
    assert "Verdict: none; it needs the rows unit, unit-small too." in printed
    assert list(json.loads(out.with_suffix(".json").read_text())["rows"]) == ["fp32", "fp8"]


@pytest.mark.parametrize(("name", "more"), [("float32", ["--all runs it"]), ("bfloat16", [])])
def test__demo__leaves_out_what_is_slow_here_and_says_why(
    name, more, words, tiny, tmp_path, capsys
):
    with sct.products_in(name):
        code, out = demo(words, tiny, tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert code == 0
    assert len(lines) == len(more)
    assert all(word in line for line, word in zip(lines, more, strict=True))
    run = set(json.loads(out.with_suffix(".json").read_text())["rows"])
    assert run == set(ROWS) - ({"bf16"} if more else set())


def test__demo_without_matplotlib__says_what_to_install(words, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo_command, "find_spec", lambda name: None)
    code, out = demo(words, tiny, tmp_path, "--rows", "fp32")
    assert code == 0
    assert "pip install scaledtensor[demo]" in capsys.readouterr().out
    assert not out.exists()
    assert out.with_suffix(".json").exists()


def test__ctrl_c_in_the_demo__exits_with_130_and_no_traceback(
    words, tiny, tmp_path, capsys, monkeypatch
):
    def interrupted(trainer):
        raise KeyboardInterrupt

    monkeypatch.setattr("scaledtensor.apps.training.Trainer.step", interrupted)
    code, out = demo(words, tiny, tmp_path, "--rows", "fp32")
    assert code == 130
    assert capsys.readouterr().err.endswith("scaledtensor: interrupted\n")
    assert not out.exists()


def test__progress_without_tqdm__is_plain_lines(words, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "tqdm", None)
    demo(words, tiny, tmp_path, "--rows", "fp32")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [f"FP32: step {i}/3" for i in (1, 2, 3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--text", "nowhere.txt"], "nowhere.txt does not exist"),
        (["demo", "--text", "."], ". is a directory"),
        (["demo", "--width", "30"], "--width=30 is not divisible by --heads=4"),
        (["train", "--text", "{words}", "--checkpoint", "no/where.pt"], "no is not a directory"),
        (["train", "--text", "{words}", "--checkpoint", "."], ". is a directory"),
        (["train", "--text", "{words}", "--checkpoint", "{tmp}/a", "--recipe", "x"], "recipe 'x'"),
        (
            ["train", "--text", "{words}", "--checkpoint", "{tmp}/a", "--resume"],
            "nothing to resume",
        ),
        (
            ["train", "--text", "{words}", "--checkpoint", "{tmp}/a", "--prompt", "§"],
            "'§' does not",
        ),
    ],
)
def test__errors__are_one_line_and_exit_code_two(
    arguments, message, words, tmp_path, capsys, monkeypatch
):
    def no_traceback_wanted(*args, **kwargs):
        raise AssertionError("the command went on to train")

    monkeypatch.setattr("scaledtensor.apps.training.Trainer.step", no_traceback_wanted)
    assert main([a.format(words=words, tmp=tmp_path) for a in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("scaledtensor: ")
    assert message in line


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["demo", "--steps", "0"],
        ["demo", "--lr", "nan"],
        ["demo", "--out", "picture.bmp"],
        ["demo", "--out", "no/where.png"],
        ["demo", "--rows", "fp4"],
        ["demo", "--device", "abacus"],
        ["train", "--text", "a.txt"],
    ],
)
def test__bad_arguments__exit_with_two(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: scaledtensor" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["demo", "--help"], ["train", "--help"], ["generate", "--help"]]
)
def test__help__is_there(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    assert "scaledtensor" in capsys.readouterr().out


@pytest.mark.parametrize("under_torchrun", [False, True])
def test__a_process_of_torchrun__leaves_without_ending_the_interpreter(under_torchrun):
    """gloo's threads may still release tensors then, which would abort a finished job."""
    code = (
        "import atexit, sys; atexit.register(print, 'ended'); sys.argv[1:] = {argv}; "
        "from scaledtensor.__main__ import process; process()"
    )
    env = {k: v for k, v in os.environ.items() if k != "TORCHELASTIC_RUN_ID"}
    env |= {"TORCHELASTIC_RUN_ID": "1"} if under_torchrun else {}
    for argv, expected, said in ((["formats"], 0, "e4m3fn"), (["formats", "fp7"], 2, "")):
        made = [sys.executable, "-c", code.format(argv=argv)]
        done = subprocess.run(made, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == expected, done.stderr
        assert said in done.stdout
        assert done.stdout.endswith("ended\n") is not under_torchrun


def test__help_of_train__lists_every_recipe(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for name in (*sct.recipes.base.RECIPES, "fp32", "bf16", "fp8"):
        assert re.search(rf"[ :]{name}[ ,;]", printed), name


def test__a_reader_that_stops__ends_the_command_quietly():
    unread = f"{sys.executable} -m scaledtensor formats --markdown | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", unread], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")
