"""The numbers of compiled graphs: the loop of C++ gives the bits of the host's numbers."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scaledtensor as sct
from scaledtensor import native
from scaledtensor.native import numbers as loops
from scaledtensor.scales import formed
from scaledtensor.scales.forms import OPERATIONS

pytestmark = pytest.mark.skipif(native.library() is None, reason="there is no C++ compiler")

#: Operation -> its number of operands.
COUNTS = dict.fromkeys(
    ("neg", "abs", "sqrt", "exp", "rsqrt", "power", "nonzero", "finite", "same"), 1
) | dict.fromkeys(
    ("mul", "add", "sub", "div", "least", "most", "product", "quotient", "ratio", "after"), 2
)
EXTREME = [0.0, -0.0, 1.0, 2.0**-149, 2.0**-126, 2.0**-127, 2.0**127, 3e38, math.inf, math.nan]
floats = st.floats(width=32) | st.sampled_from(EXTREME + [-x for x in EXTREME])


def called(leaves, steps, wanted, apart=(), pairs=(), together=3):
    wanted = list(wanted)
    sizes = [len(wanted[i : i + together]) for i in range(0, len(wanted), together)]
    return torch.ops.scaledtensor.numbers(leaves, steps, wanted, sizes, list(apart), list(pairs))


def bits(results):
    """The bits of several tensors. All NaNs are the same number."""
    found = []
    for x in results:
        code = "d" if x.dtype is torch.float64 else "f"
        numbers = [math.nan if n != n else n for n in x.reshape(-1).tolist()]
        found.append((x.dtype, tuple(x.shape), struct.pack(f"{len(numbers)}{code}", *numbers)))
    return found


def by_loop_and_by_python(*call):
    served = loops.Program.run
    runs = []

    def run(self, leaves):
        runs.append(len(leaves))
        return served(self, leaves)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops.Program, "run", run)
        by_loop = bits(called(*call))
        assert len(runs) == 1
        with native.left_out():
            by_python = bits(called(*call))
        assert len(runs) == 1
    return by_loop, by_python


@st.composite
def programs(draw):
    """Steps over three float32 numbers, a float64 number and a tensor of two."""
    places = ["t0", "t1", "t2"]
    steps = []
    for _ in range(draw(st.integers(1, 24))):
        operation = draw(st.sampled_from([*COUNTS, "quadrature", "element", "doubled"]))
        if operation == "element":
            steps.append(f"element t4 {float(draw(st.integers(0, 1))).hex()}")
        elif operation == "doubled":  # the only float64 leaf, in the operations that take one
            steps.append(f"ratio d3 {draw(st.sampled_from(places))}")
        else:
            constant = draw(st.floats(2.0**-20, 2.0**20, width=32)).hex()
            count = COUNTS.get(operation) or draw(st.integers(1, 3))
            given = [draw(st.sampled_from([*places, constant])) for _ in range(count)]
            # `after` orders float32 numbers.
            given[0] = draw(st.sampled_from(places[:3] if operation == "after" else places))
            steps.append(" ".join((operation, *given)))
        places.append(f"s{len(steps) - 1}")
    return ";".join(steps), len(steps)


def test__every_operation_of_a_form__has_its_steps():
    assert {*COUNTS, "quadrature", "element"} == set(OPERATIONS)


@settings(max_examples=200)
@given(programs(), floats, floats, floats, st.floats(), floats, floats)
def test__the_loop__gives_the_bits_of_the_hosts_numbers(made, a, b, c, wide, first, second):
    steps, count = made
    leaves = [torch.tensor(x) for x in (a, b, c)]
    leaves += [torch.tensor(wide, dtype=torch.float64), torch.tensor([first, second])]
    both = list(range(count)) if count % 2 == 0 else list(range(count - 1))
    by_loop, by_python = by_loop_and_by_python(leaves, steps, range(count), range(count), both)
    assert by_loop == by_python


def test__results__are_tensors_of_their_own_in_the_order_of_the_call():
    leaves = [torch.tensor(2.0), torch.tensor([3.0, 5.0])]
    steps = "mul t0 t0;element t1 0x1p+0;product s0 s1;add s0 s1"
    found = called(leaves, steps, [0, 1, 3, 0], [2, 1], [0, 1, 3, 3], 3)
    assert [x.tolist() for x in found] == [[4, 5, 9], [4], 20, 5, [4, 5], [9, 9]]
    assert [x.dtype for x in found] == [torch.float32] * 2 + [torch.float64] + [torch.float32] * 3
    assert len({x.untyped_storage().data_ptr() for x in found}) == len(found)
    versions = [x._version for x in found[1:]]
    found[0].add_(1)
    assert [x._version for x in found[1:]] == versions


def test__a_default_dtype_and_device__change_nothing():
    leaves = [torch.tensor(2.0)]
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            (found,) = called(leaves, "mul t0 t0", [0])
    finally:
        torch.set_default_dtype(torch.float32)
    assert (found.item(), found.dtype) == (4.0, torch.float32)


def test__a_training__keeps_nothing_of_its_steps():
    """The RMS of parameters change in each step of AdamW, so results were never served from a
    cache, and it grew by a few hundred tensors in each step."""
    torch.manual_seed(0)
    model = sct.scale_model(
        torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)),
        "unit",
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    torch._dynamo.reset()
    compiled = torch.compile(model)
    x = torch.randn(8, 16)
    before = formed._program.cache_info().currsize
    sizes = []
    for _ in range(6):
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()
        sizes.append((formed._program.cache_info().currsize, formed._layout.cache_info().currsize))
    assert len(set(sizes[1:])) == 1
    assert sizes[-1][0] > before
