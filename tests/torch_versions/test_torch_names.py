"""Every torch version that the package allows has the names of torch that it uses.

Files beside this one describe the versions other than the running one. `make torch-names` writes
them.
"""

import ast
import re
import tomllib

import names
import pytest
import torch

from scaledtensor import ops

ROOT = names.PACKAGE.parent
RUNNING = torch.__version__.partition("+")[0]
VERSIONS = sorted(names.recorded())
pytestmark = pytest.mark.skipif(
    RUNNING not in (*VERSIONS, names.PINNED), reason=f"torch {RUNNING} was not recorded"
)


def test__every_name_in_use__is_in_the_torch_that_runs():
    assert [name for name in sorted(names.used()) if not names.has(name)] == []


@pytest.mark.parametrize("version", VERSIONS)
def test__every_name_in_use__is_in_every_other_version(version):
    assert names.lacking(version, names.used()) == []


def test__a_rule_without_an_operator__is_for_one_of_another_version():
    """A misspelt operator exists in no version."""
    there = set(names.operators())  # This imports the modules that define them.
    told = names.recorded()
    elsewhere = {name for about in told.values() for name in about["adds operators"].split()}
    if RUNNING in told:
        elsewhere |= set(told[RUNNING]["lacks operators"].split())
    absent = set(ops.absent())
    assert not absent & there
    assert absent - elsewhere == set()


@pytest.mark.parametrize("version", VERSIONS)
def test__few_rules__have_no_operator_in_another_version(version):
    every = {str(op) for op in ops.RULES} | set(ops.absent())
    lost = every & set(names.recorded()[version]["lacks operators"].split())
    assert len(lost) <= 3, lost


def test__the_oldest_version_allowed__is_recorded():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (least,) = re.findall(r"'torch>=2\.(\d+)'", str(project["dependencies"]))
    minors = sorted(int(v.split(".")[1]) for v in {*VERSIONS, names.PINNED})
    assert minors[0] == int(least)


def test__these_checks__can_fail():
    code = (
        "import torch.nn.functional as F\nfrom torch import Tensor as T, nn\nimport torch._C\n"
        "from scaledtensor.ops.operators import aten\nfrom torch._inductor import config as c\n"
        "here = torch._C._dynamo\n"
        "def f(x, nn): return F.gelu(x)._version, nn.Linear, here.eval_frame, aten._any.default\n"
        "class Layer(nn.Module): _mine = T.neg(T.abs(1)._mine)\n"
    )
    file = names.Reader(ast.parse(code))
    assert set(file.names(file.defined)) >= {
        "torch.nn.functional.gelu",
        "torch.Tensor._version",
        "torch.Tensor.neg",
        "torch.Tensor.abs",
        "torch.nn.Module",
        "torch._C._dynamo.eval_frame",
        "torch._inductor.config",
    }
    assert not {"torch.nn.Linear", "torch.Tensor._mine"} & set(file.names(file.defined))
    assert not names.has("torch.nothing")
    assert not names.has("torch.nn.nothing.at_all")
    assert names.has("torch.nn.Module._buffers")
    younger = ["torch.nn.functional.linear_cross_entropy", "torch.nn.functional.linear"]
    assert names.lacking("2.11.0", younger) == younger[:1]
    assert "aten.cholesky.default" in names.recorded()["2.15.0"]["lacks operators"].split()
