"""Products go to the FP8 units of a CUDA device, on a stand-in for them.

The stand-in asks torch whether a CUDA device would take the shapes, strides and dtypes (the
operator's own checks, on tensors without data), and computes the product in float64. If torch has
the operator for a CPU too, it runs as well.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from assertions import dequantized
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

import scaledtensor as sct
from scaledtensor import _torch, backends
from scaledtensor.backends.cuda import FP8Units
from scaledtensor.errors import RecipeError, RecipeWarning
from scaledtensor.formats import E8M0FNU, decode
from scaledtensor.ops.products import dtype
from scaledtensor.recipes import (
    MXFP8,
    NVFP4,
    Amax,
    Blockwise,
    Cast,
    Constant,
    Current,
    Delayed,
    Gemm,
    Gemms,
    MinMSE,
    PerGemm,
    Recipe,
    Unit,
)

REAL_SCALED_MM = _torch.scaled_mm
HOPPER, BLACKWELL, ADA, AMPERE = (9, 0), (10, 0), (8, 9), (8, 0)

#: Capabilities of FP8 units, each of some device.
TAKEN: dict[str, tuple[Recipe, tuple[int, int]]] = {
    "unit": (Unit(), ADA),
    "unit in E4M3": (Unit(gradient="e4m3fn"), HOPPER),
    "current": (Current(), BLACKWELL),
    "delayed": (Delayed(), HOPPER),
    "least error": (MinMSE(), HOPPER),
    "constant": (Constant(input_exponent=0, weight_exponent=-5, gradient_exponent=-9), HOPPER),
    "by row": (Current(granularity="row"), ADA),
    "by row, E5M2": (Current(granularity="row", gradient="e5m2"), HOPPER),
    "blocks": (Blockwise(), HOPPER),
    "blocks, powers of two": (Blockwise(power_of_two=True, gradient="e5m2"), HOPPER),
    "mx": (MXFP8(), BLACKWELL),
    "mx, E5M2": (MXFP8(gradient="e5m2"), BLACKWELL),
    "one scale, cast for each": (
        PerGemm(
            casts=Gemms(
                Gemm(Cast("e4m3fn", Amax()), Cast("e4m3fn")),
                Gemm(Cast("e5m2"), Cast("e4m3fn", Amax())),
                Gemm(Cast("e4m3fn", Amax(), (1, 0)), Cast("e5m2", Amax(), (1, 0))),
            )
        ),
        HOPPER,
    ),
}


class Units:
    """The FP8 units of a CUDA device, for tensors of the CPU."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability
        self.calls: list[dict[str, object]] = []

    def scaled_mm(self, a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, fast: bool) -> Tensor:
        self.calls.append({"dtypes": (a.dtype, b.dtype), "scales": of_a.dtype, "fast": fast})
        if type(a) is Tensor:  # A trace does not need it, and cannot make tensors of its own.
            check_by_torch(a, b, of_a, of_b)
        return (spread(a, of_a) @ spread(b.mT, of_b, right=True).mT).bfloat16()

    def scaled_grouped_mm(
        self, a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, offs: Tensor, fast: bool
    ) -> Tensor:
        self.calls.append({"dtypes": (a.dtype, b.dtype), "fast": fast})
        with FakeTensorMode() as mode, torch.no_grad():
            fakes = [on_cuda(mode, x) for x in (a, b, of_a, of_b, offs)]
            torch._scaled_grouped_mm(*fakes[:4], offs=fakes[4], out_dtype=torch.bfloat16)
        left, right = a.double() * of_a[:, None], b.double() * of_b[:, None, :]
        rows = torch.arange(a.shape[0])
        group = torch.searchsorted(offs.long(), rows, right=True)
        return torch.einsum("mk,mkn->mn", left, right[group]).bfloat16()


def on_cuda(mode: FakeTensorMode, x: Tensor) -> Tensor:
    bare = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return FakeTensor(mode, bare, torch.device("cuda:0"))


def check_by_torch(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> None:
    """Run both operators' own checks for a CUDA device; the second says more about layouts."""
    kinds, swizzle = F.ScalingType, F.SwizzleType.NO_SWIZZLE
    of_columns = of_b
    if of_a.numel() == of_b.numel() == 1:
        left = right = kinds.TensorWise
    elif of_a.dtype == torch.float8_e8m0fnu:
        left = right = kinds.BlockWise1x32
        swizzle = F.SwizzleType.SWIZZLE_32_4_4
    elif of_a.shape[1] == of_b.shape[0] == 1 and a.shape[1] > 128:
        left = right = kinds.RowWise
    else:
        left, right = kinds.BlockWise1x128, kinds.BlockWise1x128
        if of_b.shape[1] < b.shape[1]:
            right = kinds.BlockWise128x128
        else:
            of_columns = of_b.t()
    with FakeTensorMode() as mode, torch.no_grad():
        x, y, s, t, u = (on_cuda(mode, z) for z in (a, b, of_a, of_b, of_columns))
        torch._scaled_mm(x, y, s, t, out_dtype=torch.bfloat16)
        F.scaled_mm(x, y, s, left, u, right, swizzle, swizzle)


def spread(codes: Tensor, scale: Tensor, right: bool = False) -> Tensor:
    """Return codes times the scales of their rows, in float64."""
    if scale.numel() == 1:
        return codes.double() * scale.double()
    if scale.dtype == torch.float8_e8m0fnu:
        numbers = untiled(scale, codes.shape[0], codes.shape[1] // 32).double()
    else:
        numbers = (scale.mT if right else scale).double()
    rows, columns = (n // m for n, m in zip(codes.shape, numbers.shape, strict=True))
    return codes.double() * numbers.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def untiled(scale: Tensor, height: int, width: int) -> Tensor:
    """Return scales from the order of tensor cores, by the formula of their position."""
    row, column = torch.arange(height)[:, None], torch.arange(width)[None]
    tile = (row // 128) * -(-width // 4) + column // 4
    place = 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
    return decode(scale.flatten()[place], E8M0FNU)


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], Units]:
    """Give tensors of the CPU the FP8 units of a device."""

    def give(capability: tuple[int, int]) -> Units:
        made = Units(capability)
        cpu = replace(backends.CPU, units=lambda device: FP8Units(capability))
        monkeypatch.setattr(backends, "CPU", cpu)
        monkeypatch.setattr(_torch, "scaled_mm", made.scaled_mm)
        monkeypatch.setattr(_torch, "scaled_grouped_mm", made.scaled_grouped_mm)
        monkeypatch.setattr(dtype, "_told", set())
        return made

    return give


def layer_and_data(
    recipe: Recipe, m: int = 128, k: int = 512, n: int = 512
) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = sct.scale_model(nn.Linear(k, n, bias=False), recipe)
    x = sct.scaled(torch.randn(m, k), recipe=recipe).requires_grad_()
    dy = sct.scaled((torch.randn(m, n) * 2.0**-9).bfloat16(), dtype=torch.float32, recipe=recipe)
    return layer, x, dy


def step(run: Callable[..., Tensor], layer: nn.Linear, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Return y, dx and dw."""
    layer.zero_grad()
    x.grad = None
    y = run(x)
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad]


def assert_same_product(got: Tensor, want: Tensor) -> None:
    """Both are roundings of one sum, under the same scale."""
    assert torch.equal(got.scale, want.scale)
    assert torch.equal(got.rms, want.rms)
    size = dequantized(want).square().mean().sqrt().item()
    torch.testing.assert_close(
        dequantized(got), dequantized(want), rtol=2.0**-7, atol=size * 2.0**-12
    )


@pytest.mark.parametrize("name", TAKEN)
def test_the_units_get_the_products_that_were_emulated(name, units):
    recipe, capability = TAKEN[name]
    layer, x, dy = layer_and_data(recipe)
    wanted = step(layer, layer, x, dy)
    layer, x, dy = layer_and_data(recipe)
    seen = units(capability)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = step(layer, layer, x, dy)
    assert len(seen.calls) == 3
    for a, b in zip(got, wanted, strict=True):
        assert_same_product(a, b)


@pytest.mark.parametrize("name", ["unit", "by row", "blocks", "mx"])
def test_compiled_code_calls_the_units_too(name, units):
    recipe, capability = TAKEN[name]
    layer, x, dy = layer_and_data(recipe)
    wanted = step(layer, layer, x, dy)
    seen = units(capability)
    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    got = step(run, layer, x, dy)
    assert len(seen.calls) >= 3
    assert {c["fast"] for c in seen.calls} == {True, False}
    for a, b in zip(got, wanted, strict=True):
        assert_same_product(a, b)


def limits_onednn_too_much():
    """Whether ONEDNN_MAX_CPU_ISA takes FP8 products from a CPU that has them: after a bfloat16
    product, torch asks oneDNN for one that oneDNN then refuses."""
    if "ONEDNN_MAX_CPU_ISA" not in os.environ:
        return False
    x, one = torch.ones(512, 512), torch.ones(())
    x[:128].bfloat16() @ x.bfloat16()
    codes = x.to(torch.float8_e4m3fn)
    try:
        REAL_SCALED_MM(codes[:128], codes.t(), one / 2, one, False)
    except RuntimeError as error:
        return "primitive descriptor" in str(error)
    return False


#: With scales by row, torch does not ask oneDNN.
BY_ONEDNN = pytest.mark.skipif(
    limits_onednn_too_much(), reason="oneDNN has no FP8 in ONEDNN_MAX_CPU_ISA"
)


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=BY_ONEDNN) for name in ("unit", "current")), "by row"]
)
def test_torchs_operator_of_the_cpu_agrees(name, units, monkeypatch):
    """The device has one scale per tensor, and scales by row."""
    recipe, capability = TAKEN[name]
    layer, x, dy = layer_and_data(recipe)
    wanted = step(layer, layer, x, dy)
    units(capability)
    monkeypatch.setattr(_torch, "scaled_mm", REAL_SCALED_MM)
    for a, b in zip(step(layer, layer, x, dy), wanted, strict=True):
        assert_same_product(a, b)


def test_the_operands_are_read_in_whatever_layout(units):
    """The input is transposed, the weight is not, or the input has more dimensions."""
    recipe = Unit(gradient="e4m3fn")
    torch.manual_seed(0)
    x, w = torch.randn(64, 4, 32), torch.randn(32, 48)

    def products() -> list[Tensor]:
        a, b = (sct.scaled(z, recipe=recipe).requires_grad_() for z in (x, w))
        y = a @ b
        z = a[:, 0].t() @ y[:, 1]
        (y.square().mean() + z.square().mean()).backward()
        return [y.detach(), z.detach(), a.grad, b.grad]

    wanted = products()
    seen = units(HOPPER)
    got = products()
    assert len(seen.calls) == 6
    for a, b in zip(got, wanted, strict=True):
        assert_same_product(a, b)


@pytest.mark.parametrize(
    ("choice", "fast"),
    [
        ((), [False, False, False]),
        (("forward",), [True, False, False]),
        (("forward", "dgrad", "wgrad"), [True, True, True]),
    ],
)
@pytest.mark.parametrize(
    "make", [Unit, lambda **kw: Current(granularity="row", **kw)], ids=["once", "for each"]
)
def test_fast_accumulation_is_that_of_the_recipe(make, choice, fast, units):
    recipe = make(fast_accumulation=choice)
    assert Recipe.from_json(recipe.to_json()) == recipe
    layer, x, dy = layer_and_data(recipe)
    seen = units(HOPPER)
    step(layer, layer, x, dy)
    assert [c["fast"] for c in seen.calls] == fast


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", [Unit, lambda: Current(granularity="row")])
def test_a_checkpoint_adds_up_as_the_first_pass_did(make, reentrant, units):
    layer, x, _ = layer_and_data(make())
    seen = units(HOPPER)
    y = checkpoint(layer, x, use_reentrant=reentrant)
    sct.drop(y).dequantize().square().mean().backward()
    # The casts run forward, again for the checkpoint, and then in dgrad and wgrad.
    assert [c["fast"] for c in seen.calls][-3:] == [True, False, False]
    assert all(c["fast"] for c in seen.calls[:-2])


def test_where_each_product_casts_each_has_a_choice(units):
    layer, x, dy = layer_and_data(Current(granularity="row", fast_accumulation=["wgrad"]))
    seen = units(HOPPER)
    step(layer, layer, x, dy)
    assert [c["fast"] for c in seen.calls] == [False, False, True]


def test_recipes_say_what_may_be_fast():
    with pytest.raises(
        RecipeError, match=r"fast_accumulation is a tuple of .*'forward'.*got 'dgrad'"
    ):
        Unit(fast_accumulation="dgrad")
    with pytest.raises(RecipeError, match="fast_accumulation, not by Gemm"):
        PerGemm(casts=Gemms(forward=Gemm(fast=True)))


@pytest.mark.parametrize(
    ("recipe", "capability", "shape", "reason"),
    [
        (Unit(), AMPERE, {}, "compute capability of 8.9"),
        (Unit(), HOPPER, {"m": 24}, "24 x 512 x 512 are not all multiples of 16"),
        (Unit("e4m3fnuz", "e4m3fnuz"), HOPPER, {}, "no FP8 unit multiplies torch.float8_e4m3fnuz"),
        (Current("e5m2", granularity="row", emulate=True), HOPPER, {}, "e5m2 by torch.float8_e5m2"),
        (Blockwise(), BLACKWELL, {}, "compute capability of 9.0 to 9"),
        (Blockwise(), HOPPER, {"k": 640}, r"\(128, 128\) do not fill a matrix of 640 x 512"),
        (Blockwise(block=64), HOPPER, {}, "no FP8 unit multiplies e4m3fn amax 1x64"),
        (MXFP8(), HOPPER, {}, "compute capability of 10.0 to 10"),
        (NVFP4(), BLACKWELL, {}, "no FP8 unit multiplies e2m1fn two_level 1x16"),
    ],
)
def test_what_is_emulated_on_such_a_device_says_so_once(recipe, capability, shape, reason, units):
    layer, x, dy = layer_and_data(recipe, **shape)
    torch.manual_seed(1)  # The gradients are rounded stochastically.
    wanted = step(layer, layer, x, dy)
    seen = units(capability)
    torch.manual_seed(1)
    with pytest.warns(RecipeWarning, match=reason):
        got = step(layer, layer, x, dy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(layer, layer, x, dy)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        if len(seen.calls) == 0:
            assert torch.equal(dequantized(a), dequantized(b))


def test_a_cpu_says_nothing():
    layer, x, dy = layer_and_data(NVFP4())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(layer, layer, x, dy)


def test_products_in_higher_precision_are_none_of_the_units(units):
    layer, x, dy = layer_and_data(Current(granularity="row", keep=("wgrad",)))
    seen = units(HOPPER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(layer, layer, x, dy)
    assert len(seen.calls) == 2


def test_experts_are_one_grouped_product(units):
    """The rows of each expert are multiplied. wgrad has its groups along the summed dimension and
    runs in bfloat16."""
    recipe = Unit(gradient="e4m3fn")
    torch.manual_seed(0)
    rows, experts = torch.randn(96, 64), torch.randn(3, 64, 32)
    offs = torch.tensor([16, 16, 96], dtype=torch.int32)

    def products() -> list[Tensor]:
        a, b = (sct.scaled(z, recipe=recipe).requires_grad_() for z in (rows, experts))
        y = F.grouped_mm(a, b, offs=offs)
        y.square().mean().backward()
        return [y.detach(), a.grad, b.grad]

    wanted = products()
    seen = units(HOPPER)
    with pytest.warns(RecipeWarning, match="not groups along what is summed"):
        got = products()
    assert [c["fast"] for c in seen.calls] == [True, False]
    for a, b in zip(got, wanted, strict=True):
        assert_same_product(a, b)
    units(BLACKWELL)
    with pytest.warns(RecipeWarning, match="FP8 units are of compute capability 9.0"):
        products()
