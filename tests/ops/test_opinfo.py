"""Every operator with samples in PyTorch has the right values and gradients, in all modes.

An operator passes, or is out of scope by name with a reason, or has nothing to compare.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

pytest.importorskip("expecttest")  # torch's samples need it.

from opinfo import (
    NO_VALUE,
    NOT_COMPILED,
    OPS,
    OUT_OF_SCOPE,
    NotApplicableError,
    backward,
    backward_of_plain,
    compiled,
    forward,
    samples,
)

settings.load_profile("scaledtensor")  # torch's samples load their own file.

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"
OURS = [name for name in OPS if name not in OUT_OF_SCOPE and name not in NO_VALUE]
every_op = pytest.mark.parametrize("name", OURS)


def drawn(name: str) -> list:
    try:
        return list(samples(OPS[name]))
    except NotApplicableError as reason:
        pytest.skip(f"{name} {reason}")


@every_op
def test__value_and_gradients__are_those_of_the_plain_operator(name):
    """One test makes all checks, because drawing the samples takes longer than many operators."""
    for sample in drawn(name):
        forward(sample)
        if OPS[name].supports_autograd:
            backward(sample)
            backward_of_plain(sample)


@pytest.mark.parametrize("name", OUT_OF_SCOPE)
def test__out_of_scope__raises(name):
    error, words = OUT_OF_SCOPE[name]

    def run() -> None:
        for sample in samples(OPS[name]):
            forward(sample)
            backward(sample)

    with pytest.raises(error, match=words):
        run()


@pytest.mark.parametrize("name", NO_VALUE)
def test__no_value__is_said_of_operators_that_exist(name):
    assert name in OPS
    assert NO_VALUE[name]


@pytest.mark.slow
@every_op
def test__compiled__is_as_plain(name):
    """Checks the first sample that torch itself compiles in one graph."""
    if name in NOT_COMPILED:
        pytest.skip(NOT_COMPILED[name])
    for sample in drawn(name)[:1]:
        if not compiled(sample, OPS[name].supports_autograd):
            pytest.skip("torch does not compile the plain operator in one graph")


@pytest.mark.skipif(
    f"torch {torch.__version__.partition('+')[0]})" not in PAGE.read_text(),
    reason="the page counts the samples of the version of torch that it names",
)
def test__the_page_of_operators__is_what_the_registry_says():
    written = subprocess.run(
        [sys.executable, PAGE.with_name("write_ops.py")], capture_output=True, text=True, check=True
    ).stdout
    (passed,) = re.findall(r"(\d+) of PyTorch's operator samples pass", written)
    assert int(passed) >= 300
    assert PAGE.read_text() == written, "python docs/write_ops.py > docs/ops.md"
