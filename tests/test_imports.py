"""`import scaledtensor` loads and changes little: each test runs it in a fresh process."""

import json
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
import torch

import scaledtensor as sct
from scaledtensor.apps import commands, precision
from scaledtensor.apps import demo as comparison
from scaledtensor.ops.products import dtype

HEAVY = [
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp"),
    *("torch.distributed.checkpoint", "torch.fx.experimental.symbolic_shapes", "sympy"),
    *("transformers", "matplotlib", "safetensors"),
]


def fresh(program: str, *arguments: object) -> object:
    """Return the last line that `program` prints in its own process, read as JSON."""
    made = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(made, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test__the_import__loads_nothing_heavy_and_changes_nothing_of_torch():
    program = """
import json, sys, warnings
import torch, numpy
from torch.optim.optimizer import _global_optimizer_pre_hooks, _global_optimizer_post_hooks

def names(module):
    return {(module.__name__, k): id(v) for k, v in vars(module).items() if not k.startswith("__")}

watched = [torch, torch.nn, torch.nn.functional, torch.nn.Module, torch.Tensor, torch.nn.Parameter,
           torch.optim.Optimizer, torch.serialization, torch.overrides, torch.autograd]
before = {k: v for m in watched for k, v in names(m).items()}
meta, filters = list(sys.meta_path), list(warnings.filters)
import scaledtensor as sct
after = {k: v for m in watched for k, v in names(m).items()}
assert list(sys.meta_path) == meta and list(warnings.filters) == filters
print(json.dumps({
    "loaded": [m for m in json.loads(sys.argv[1]) if m in sys.modules],
    "hooks": len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks),
    "modes": torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack(),
    "changed": [k for k in before | after if before.get(k) != after.get(k)],
    "rules": "scaledtensor.ops" in sys.modules,
    "operators": [torch.ops.scaledtensor.to_format.default.name(),
                  torch.ops.scaledtensor.saved_mul.default.name(),
                  hasattr(torch.ops.scaledtensor, "nothing")],
}))
"""
    assert fresh(program, json.dumps(HEAVY)) == {
        "loaded": [],
        "hooks": 0,
        "modes": 0,
        "changed": [],
        "rules": False,
        "operators": ["scaledtensor::to_format", "scaledtensor::saved_mul", False],
    }


def test__only_what_is_for_several_processes__loads_what_is():
    """torch itself does so at the first operator of any subclass of its tensors."""
    program = """
import json, sys
import scaledtensor as sct
for name in sct.__all__:
    if name not in ("checkpoint", "distributed", "exchange"):
        getattr(sct, name)
print(json.dumps([m for m in json.loads(sys.argv[1]) if m in sys.modules]))
"""
    assert fresh(program, json.dumps(HEAVY)) == []


def test__the_first_tensor__brings_the_rules_of_operators():
    """The tensor may be made in any way, and compiled before anything else ran. Each way runs in
    its own process, forked when only torch is loaded."""
    program = """
import json, os, sys
import torch

def constructor():
    return ScaledTensor(torch.ones(4, 4), 1.0, "fp32") + 1

def wrapped():
    return scaled(torch.ones(4, 4)) + 1

def compiled():
    sin = torch.compile(torch.sin, backend="eager", fullgraph=True)
    return sin(ScaledTensor(torch.ones(4, 4), 1.0, "fp32")) + 1

codes = []
for make in (constructor, wrapped, compiled):
    if os.fork() == 0:
        from scaledtensor.tensors.tensor import ScaledTensor
        from scaledtensor.tensors.wrap import scaled
        assert "scaledtensor.ops" not in sys.modules
        assert type(make()).__name__ == "ScaledTensor"
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
print(json.dumps(codes))
"""
    assert fresh(program) == [0, 0, 0]


@pytest.mark.parametrize(
    "order", ["scaledtensor, torch", "torch, scaledtensor"], ids=["before torch", "after torch"]
)
def test__files__load_after_the_bare_import(order, tmp_path):
    """`torch.load` reads it unchanged, as it allows classes that it knows by name."""
    recipe = sct.recipes.NVFP4()
    frozen = torch.nn.Linear(32, 32).requires_grad_(False)
    kept = {
        "parameter": torch.nn.Parameter(sct.scaled(torch.randn(8, 8), recipe="unit")),
        "blocks": sct.scaled(torch.randn(4, 64), "e4m3fn", granularity=sct.PerBlock((1, 32))),
        "frozen": sct.scale_model(frozen, recipe).state_dict(),
    }
    optimizer = sct.optim.AdamW([kept["parameter"]], state_format="e4m3fn")
    kept["parameter"].square().sum().backward()
    optimizer.step()
    kept["states"] = optimizer.state_dict()["state"]
    torch.save(kept, tmp_path / "file.pt")
    program = f"""
import json, sys
import {order}
kept = torch.load(sys.argv[1])
print(json.dumps([type(kept[k]).__name__ for k in ("parameter", "blocks")]))
"""
    assert fresh(program, tmp_path / "file.pt") == ["ScaledTensor", "CodedTensor"]


def test__a_pickled_model__brings_its_modules():
    model = sct.unit_scale(sct.scale_model(torch.nn.Linear(4, 4), "delayed", lambda *_: False))
    program = """
import json, pickle, sys
model = pickle.loads(bytes.fromhex(sys.argv[1]))
import torch
print(json.dumps(list(model(torch.ones(2, 4)).shape)))
"""
    assert fresh(program, pickle.dumps(model).hex()) == [2, 4]


def test__names__are_there_in_every_spelling():
    program = """
import json
import scaledtensor as sct
assert set(sct.__all__) <= set(dir(sct))
import scaledtensor.inspect.report, scaledtensor.models.rebalance, scaledtensor.unit_scaling
from scaledtensor.models.rebalance import statistics
from scaledtensor.unit_scaling.plan import Plan
from scaledtensor import rebalance, report, unit_scale
assert sct.report is report and callable(report) and callable(rebalance) and callable(unit_scale)
assert sct.statistics is statistics
assert sct.nn.Linear and sct.scales.powers.settle and sct.compat
for name in sct.__all__:
    assert getattr(sct, name) is vars(sct)[name]
try:
    sct.scaled_tensor
except AttributeError as error:
    print(json.dumps([str(error), hasattr(sct, "__wrapped__")]))
"""
    said = "module 'scaledtensor' has no attribute 'scaled_tensor'"
    assert fresh(program) == [said, False]


def test__what_a_module_lacks__is_told_as_it_is(monkeypatch):
    monkeypatch.delitem(vars(sct), "distributed", raising=False)
    monkeypatch.delitem(sys.modules, "scaledtensor.distributed", raising=False)
    monkeypatch.setitem(sys.modules, "scaledtensor.distributed.gather", None)
    with pytest.raises(ModuleNotFoundError, match=r"scaledtensor\.distributed\.gather"):
        sct.distributed  # noqa: B018


# --- the command line ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["formats", "--help"], 0),
        (["trian"], 2),
        (["demo", "--stepz", "3"], 2),
        (["train", "--text", "a.txt"], 2),
    ],
)
@pytest.mark.parametrize("spelling", ["module", "script"])
def test__the_command_line__answers_before_torch_is_loaded(arguments, code, spelling, tmp_path):
    script = tmp_path / "scaledtensor"  # pip makes this of the entry point.
    script.write_text("from scaledtensor.__main__ import process\nprocess()\n")
    program = ["-m", "scaledtensor"] if spelling == "module" else [str(script)]
    # The last line of `-X importtime` that names torch itself exists if torch was imported.
    made = [sys.executable, "-X", "importtime", *program, *arguments]
    done = subprocess.run(made, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "usage: scaledtensor" in done.stdout + done.stderr
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"scaledtensor", "argparse"} <= loaded
    assert not loaded & {"torch", "numpy", "ml_dtypes"}


def test__help__takes_less_than_a_second():
    made = [sys.executable, "-m", "scaledtensor", "--help"]
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(made, capture_output=True, check=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 1


def test__another_program__is_no_command_line(tmp_path):
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "__init__.py").write_text("import scaledtensor\n")
    (tmp_path / "tool" / "__main__.py").write_text(
        "import sys; print('scaledtensor.tensors.tensor' in sys.modules)\n"
    )
    made = [sys.executable, "-m", "tool", "scaledtensor"]
    path = [str(tmp_path), *sys.path]
    env = {"PYTHONPATH": ":".join(filter(None, path))}
    done = subprocess.run(made, capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "True\n"


def test__names_that_the_parsers_repeat__are_those_of_the_commands():
    assert tuple(comparison.ROWS) == commands.ROWS
    assert tuple(sct.formats.FORMATS) == commands.FORMATS
    assert precision.PLAIN_NAMES == commands.WITHOUT_SCALES
    assert tuple(sorted(sct.recipes.base.RECIPES)) == commands.RECIPES
    assert get_args(dtype.Name) == commands.PRODUCTS


def test__the_parsers__import_nothing_but_the_standard_library():
    light = ("__future__", "argparse", "math", "importlib", "pathlib", "typing")
    for line in Path(commands.__file__).read_text().splitlines():
        if line.startswith(("import ", "from ")):
            assert line.split()[1].startswith(light), line
