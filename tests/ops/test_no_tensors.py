"""Eager rules calculate with numbers of the host.

An operator on a 0-dim tensor takes as long as one on the elements of a small layer, and on a device
it launches a kernel. So no rule reads `x.scale` or `x.rms`, which makes a tensor.
"""

import sys
from pathlib import Path

import pytest
import torch
from all_cases import CASES
from test_invariants import draw, run

import scaledtensor.ops
from scaledtensor.scales.singles import Asked

#: Case -> why its rule reads a tensor.
READ = {
    "cumprod": "its fallback is a mean of n powers",
    "det": "a power of the scale is clamped to the range of scales",
    "slogdet": "it adds the logarithm of the scale to a float32 statistic",
}
RULES = str(Path(scaledtensor.ops.__file__).parent)


@pytest.fixture
def readers(monkeypatch):
    """Return the places of `scaledtensor.ops` that read a scale or an RMS as a tensor."""
    found = []
    read = Asked.__get__

    def watched(self, x, owner):
        frame = sys._getframe(1)
        if x is not None and frame.f_code.co_filename.startswith(RULES):
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return read(self, x, owner)

    monkeypatch.setattr(Asked, "__get__", watched)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test__rules__read_no_tensors_of_scales(case, readers):
    run(case, draw(case, case.shapes[0], 0, torch.float32), 0)
    assert bool(readers) is (case.name in READ), readers
