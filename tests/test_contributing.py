"""The steps of CONTRIBUTING.md add an operator, a product, a format, a recipe, a state format and a
backend."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from assertions import assert_holds, assert_in_range

import scaledtensor as sct
from scaledtensor.ops import RULES, registry

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
#: Code with the place to which it belongs: `# <file>`, or `# <file>, in <name>`.
STEP = re.compile(r"# (scaledtensor/\S+\.py)(?:, ((?:in|before) \w+))?\n")

#: The line of a file after which the code of a step comes.
LINES = {
    "in _products": "    table: dict[Any, Product] = {\n",
    "before FORMATS": "# IEEE 754-2019, binary16 and binary32 (table 3.5).\n",
    "in STATES": "STATES: Mapping[str, Float32State] = {\n",
}

#: The last sentences of two sections: names that are listed elsewhere in the same folder.
LISTED = [
    ("scaledtensor/formats/format.py", "            FP32,\n", "            E4M2FN,\n"),
    (
        "scaledtensor/backends/__init__.py",
        "from scaledtensor.backends.cuda import CUDA\n",
        "from scaledtensor.backends.xpu import XPU\n",
    ),
    ("scaledtensor/backends/__init__.py", "for backend in (CPU, CUDA, ", "XPU, "),
]

#: Uses every addition. It runs in the copy of the package.
PROGRAM = """
import torch
from torch import nn
import scaledtensor as sct
from scaledtensor.backends import backend_of
from scaledtensor.ops.products.dtype import choice
from scaledtensor.ops.products.table import PRODUCTS

# A product: a recipe casts its operands, and simulate_format rounds them.
class VecDot(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))

    def forward(self, x):
        return torch.linalg.vecdot(x, self.weight)

assert PRODUCTS[torch.linalg.vecdot].name == "vecdot"
torch.manual_seed(0)
x = torch.randn(8, 16)
for change in (sct.simulate_format, lambda m, *formats: sct.scale_model(m, "headroom")):
    module = VecDot()
    exact = module(x)
    rounded = change(module, "e4m3fn", "e5m2")(x)
    rounded = rounded.dequantize() if isinstance(rounded, sct.ScaledTensor) else rounded
    assert 0 < float((rounded.float() - exact).norm() / exact.norm()) < 0.1

# A format.
e4m2 = sct.formats.get("e4m2fn")
assert (e4m2.bits, e4m2.max) == (7, 384.0)
assert float(sct.formats.fake_quantize(torch.tensor(1.1), "e4m2fn")) == 1.0

# A recipe, with that format too.
layer = sct.scale_model(nn.Linear(16, 16), sct.recipes.get("headroom"))
layer(torch.randn(4, 16)).sum().backward()
assert layer.weight.recipe.name == "headroom"
sct.scale_model(nn.Linear(16, 16), sct.recipes.Current(forward="e4m2fn"))(torch.randn(4, 16))

# A state format.
p = nn.Parameter(torch.randn(256))
optimizer = sct.optim.AdamW([p], state_format="e3m4")
p.grad = torch.randn(256)
optimizer.step()
assert optimizer.state[p]["exp_avg"].format.name == "e3m4"

# A backend.
xpu = torch.device("xpu")
assert backend_of(xpu).name == "xpu" and not backend_of(xpu).host
assert choice(xpu) == (torch.bfloat16, "XMX units multiply bfloat16")
assert backend_of(torch.device("mps")).name == "other"
sct.hardware()
print("done")
"""


def test__the_first_block__adds_an_operator() -> None:
    x = sct.scaled(torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 8)
    before = dict(RULES)
    try:
        scope: dict[str, Any] = {}
        exec(BLOCKS[0], scope)
        y = scope["squareplus"](x)
        plain = scope["squareplus"](x.dequantize())
    finally:
        RULES.clear()
        RULES.update(before)
        registry._handlers.clear()
    assert_holds(y, plain, 2.0**-17)
    assert_in_range([y])


def insert(file: Path, line: str, code: str) -> None:
    """Write `code` after the one place of `file` that has the text `line`."""
    text = file.read_text() if file.exists() else ""
    if not line:
        file.write_text(f"{text}\n\n{code}" if text else code)
        return
    assert text.count(line) == 1, (file, line)
    file.write_text(text.replace(line, line + code))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a folder with a copy of the package to which every step is applied."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "scaledtensor", tmp_path / "scaledtensor", ignore=ignored)
    files = set()
    for block in BLOCKS[1:]:
        step = STEP.match(block)
        assert step is not None, f"the block names no file: {block}"
        path, place = step.groups()
        files.add(path)
        code = block[step.end() :]
        insert(tmp_path / path, LINES[place] if place else "", code)
    assert len(files) == 5
    for path, line, code in LISTED:
        insert(tmp_path / path, line, code)
    return tmp_path


def test__the_other_blocks__add_to_a_copy_of_the_package(copy: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], cwd=copy, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "done\n"
