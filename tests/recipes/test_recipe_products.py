"""Every recipe's three products equal the same casts written out in float64."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from assertions import dequantized
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import scaledtensor as sct
from scaledtensor.errors import RecipeWarning, UnsupportedError
from scaledtensor.formats import E4M3FN, FORMATS, PerBlock, TwoLevelScale, decode
from scaledtensor.ops.products import by_gemm
from scaledtensor.ops.products.quantize import mixed
from scaledtensor.recipes import (
    MXFP4,
    MXFP6,
    MXFP8,
    NVFP4,
    Amax,
    Blockwise,
    Cast,
    Constant,
    Current,
    Fixed,
    Gemm,
    Gemms,
    LeastError,
    Microscale,
    MinMSE,
    PerGemm,
    Recipe,
    TwoLevel,
    Unit,
)

MIXED = PerGemm(
    casts=Gemms(
        Gemm(Cast("e4m3fn"), Cast("e2m3fn", Microscale(), (1, 32))),
        Gemm(Cast("e5m2", Amax()), Cast("e4m3fn", Amax(), (1, 0))),
        Gemm(None, None),
    )
)
#: Deterministic recipes. Recipes with stochastic rounding have tests of their own below.
RECIPES: dict[str, Recipe] = {
    "unit": Unit(),
    "unit in FP6": Unit("e2m3fn", "e3m2fn"),
    "current": Current(),
    "current, powers of two": Current(power_of_two=True, gradient="e5m2", gradient_margin=3),
    "current by row": Current(granularity="row"),
    "current by row, int8": Current("int8", "e4m3fn", granularity="row"),
    "current but wgrad": Current(keep=("wgrad",)),
    "constant": Constant(input_exponent=1, weight_exponent=-3, gradient_exponent=-2),
    "least error": MinMSE(),
    "blockwise": Blockwise(block=16),
    "blockwise, powers of two": Blockwise(block=16, power_of_two=True, gradient="e5m2"),
    "mxfp8": MXFP8(),
    "mxfp8 floor": MXFP8(mode="floor"),
    "mxfp6": MXFP6(),
    "mxfp4": MXFP4(gradient_rounding="nearest_even"),
    "nvfp4": NVFP4(gradient_rounding="nearest_even"),
    "six casts": MIXED,
}
BY_PRODUCT = [name for name, r in RECIPES.items() if r.gemms.once is None]
# Results are bfloat16, rounded at most twice, relative to the largest of a row.
TOLERANCE = 2.0**-7


# --- the casts written out, a block at a time ------------------------------------------------


def nearest(x: np.ndarray, cast: Cast) -> np.ndarray:
    """Search the format's values nearest to `x`: ties go to even codes, and values saturate."""
    values = cast.format.values().double().numpy()
    codes = np.flatnonzero(np.isfinite(values))
    order = codes[np.argsort(values[codes], kind="stable")]
    table, even = values[order], order % 2 == 0
    above = np.clip(np.searchsorted(table, x), 0, len(table) - 1)
    below = np.clip(above - 1, 0, len(table) - 1)
    up, down = table[above] - x, x - table[below]
    take_up = (up < down) | ((up == down) & even[above])
    return np.where(take_up, table[above], table[below])


def cast_block(x: np.ndarray, cast: Cast, tensor: float) -> np.ndarray:
    """Return `x` as the format holds it under one scale; `tensor` is NVFP4's second level."""
    amax, top = float(np.abs(x).max(initial=0.0)), cast.format.max
    if cast.format.bits > 8:
        return x
    match cast.scale:
        case _ if amax == 0:
            return x
        case Amax(power_of_two, margin):
            scale = 2.0 ** np.ceil(np.log2(amax / top)) if power_of_two else amax / top
            scale *= 2.0**margin
        case Microscale(mode):
            exponent = np.ceil(np.log2(amax / top))
            if mode == "floor":
                exponent = np.floor(np.log2(amax)) - np.floor(np.log2(top))
            scale = 2.0**exponent
        case TwoLevel():
            block = np.array(max(amax / (tensor * top), 2.0**-9))
            scale = float(nearest(block, Cast(E4M3FN))) * tensor
        case Fixed(exponent):
            scale = 2.0**exponent
        case LeastError(below):
            first = 2.0 ** np.ceil(np.log2(amax / top))
            tried = [first * 2.0**-k for k in range(below + 1)]
            errors = [np.square(nearest(x / s, cast) * s - x).sum() for s in tried]
            scale = tried[int(np.argmin(errors))]
        case _:
            scale = 1.0
    return nearest(x / scale, cast) * scale


def cast_by_hand(x: np.ndarray, cast: Cast | None, carried: float, dim: int) -> np.ndarray:
    """Return a matrix as an operand of a product that sums over `dim`; `carried` is its own
    scale."""
    if cast is None:
        return x
    across, along = cast.block
    rows, columns = (across, along) if dim == -1 else (along, across)
    rows, columns = rows or x.shape[0], columns or x.shape[1]
    fixed = isinstance(cast.scale, Fixed)
    q = x if fixed else x / carried
    tensor = np.float32(np.abs(q).max() / (448 * cast.format.max))
    if float(tensor) * 448 * cast.format.max < np.abs(q).max():
        tensor = np.nextafter(tensor, np.float32(np.inf))
    out = np.empty_like(q)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            here = np.s_[i : i + rows, j : j + columns]
            out[here] = cast_block(q[here], cast, float(tensor))
    return out if fixed else out * carried


def mixing(n: int) -> np.ndarray:
    """Return the transform of NVFP4's wgrad over `n` rows, as a matrix."""
    return mixed(torch.eye(n), -1).double().numpy()[:, : -(-n // 16) * 16]


def three_products(
    recipe: Recipe, x: Tensor, w: Tensor, dy: Tensor, scales: tuple[float, float, float]
) -> list[np.ndarray]:
    a, b, g = (t.double().numpy() for t in (x, w.t(), dy))
    sa, sb, sg = scales
    fwd, dgrad, wgrad = recipe.gemms.forward, recipe.gemms.dgrad, recipe.gemms.wgrad
    y = cast_by_hand(a, fwd.left, sa, -1) @ cast_by_hand(b, fwd.right, sb, -2)
    da = cast_by_hand(g, dgrad.left, sg, -1) @ cast_by_hand(b, dgrad.right, sb, -1).T
    h = mixing(a.shape[0]).T if wgrad.hadamard else np.eye(a.shape[0])
    left, right = cast_by_hand(h @ a, wgrad.left, sa, -2), cast_by_hand(h @ g, wgrad.right, sg, -2)
    return [y, da, (left.T @ right).T]


def problem(rows: int, inner: int, columns: int, seed: int = 0) -> list[Tensor]:
    """Return x, w and dy in bfloat16, with an outlier each."""
    rng = torch.Generator().manual_seed(seed)
    shapes = ((rows, inner), (columns, inner), (rows, columns))
    made = [
        torch.randn(s, generator=rng) * 2.0**e for s, e in zip(shapes, (1, -3, -6), strict=True)
    ]
    for t in made:
        t[0, 0] *= 20
    return [t.bfloat16().float() for t in made]


def layer(recipe: Recipe, x: Tensor, w: Tensor) -> tuple[nn.Linear, Tensor]:
    made = nn.Linear(w.shape[1], w.shape[0], bias=False)
    made.weight.data.copy_(w)
    sct.scale_model(made, recipe)
    return made, sct.scaled(x, "bf16", dtype=torch.float32, recipe=recipe).requires_grad_()


def run(recipe: Recipe, x: Tensor, w: Tensor, dy: Tensor, compiled: str = "") -> list[Tensor]:
    """Return y, dx and dw of a linear layer."""
    made, input = layer(recipe, x, w)
    call = made
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(made, fullgraph=True, backend=compiled)
    y = call(input)
    y.backward(sct.scaled(dy, "bf16", dtype=torch.float32, recipe=recipe))
    return [y.detach(), input.grad, made.weight.grad]


def carried(*tensors: Tensor) -> tuple[float, ...]:
    return tuple(float(sct.scaled(t).scale) for t in tensors)


def assert_near(found: Tensor, want: np.ndarray) -> None:
    error = np.abs(dequantized(found).double().numpy() - want)
    bound = TOLERANCE * np.abs(want).max()
    assert error.max() <= bound, f"{error.max()} > {bound}"


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(32, 64, 48), (20, 33, 65), (1, 7, 3)], ids=str)
def test__three_products__are_those_of_the_casts_written_out(name, shape):
    recipe = RECIPES[name]
    x, w, dy = problem(*shape)
    found = run(recipe, x, w, dy)
    for got, want in zip(found, three_products(recipe, x, w, dy, carried(x, w, dy)), strict=True):
        assert_near(got, want)


def test__the_recipes_differ() -> None:
    """Recipes differ from each other, which the comparison above would not notice."""
    x, w, dy = problem(32, 64, 48)
    plain = [(x @ w.t()).numpy(), (dy @ w).numpy(), (dy.t() @ x).numpy()]
    seen = set()
    for recipe in RECIPES.values():
        found = [dequantized(t).numpy() for t in run(recipe, x, w, dy)]
        errors = [f - p for f, p in zip(found, plain, strict=True)]
        seen.add(tuple(round(float(np.square(e).sum() ** 0.5), 7) for e in errors))
    assert len(seen) == len(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test__compiled__is_eager(name):
    x, w, dy = problem(20, 33, 65)
    eager, compiled = run(RECIPES[name], x, w, dy), run(RECIPES[name], x, w, dy, "aot_eager")
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(dequantized(a), dequantized(b))
        assert torch.equal(a.scale, b.scale)


@pytest.mark.parametrize(
    "recipe",
    [
        Unit(gradient_rounding="stochastic"),
        Current(),
        Current(granularity="row"),
        *(pytest.param(r, marks=pytest.mark.slow) for r in (Blockwise(block=16), MXFP8(), NVFP4())),
    ],
    ids=str,
)
def test__few_graphs__serve_every_number_of_rows(recipe):
    """There is one graph. Blocks along the rows may ask whether they fill the last one."""
    torch._dynamo.reset()
    _, w, _ = problem(1, 33, 65)
    made, _ = layer(recipe, torch.ones(1, 33), w)
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(made, fullgraph=True, backend=counter, dynamic=True)

    def both(rows: int) -> list[tuple[Tensor, Tensor]]:
        x, _, dy = problem(rows, 33, 65)
        found = []
        for f in (made, call):
            made.zero_grad()
            torch.manual_seed(rows)  # The gradients are rounded stochastically.
            input = sct.scaled(x, "bf16", recipe=recipe).requires_grad_()
            y = f(input)
            y.backward(sct.scaled(dy, "bf16", recipe=recipe))
            found.append((y.detach(), input.grad, made.weight.grad))
        return list(zip(*found, strict=True))

    for rows in (40, 56, 72, 88):
        for a, b in both(rows):
            assert torch.equal(dequantized(a), dequantized(b))
            assert torch.equal(a.scale, b.scale)
    assert counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test__inductor__is_eager_up_to_rounding(name):
    x, w, dy = problem(32, 64, 48)
    for a, b in zip(
        run(RECIPES[name], x, w, dy), run(RECIPES[name], x, w, dy, "inductor"), strict=True
    ):
        assert_near(b, dequantized(a).double().numpy())


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "constant"])
def test__the_size_of_the_loss__changes_no_code(name):
    x, w, dy = problem(20, 33, 65)
    one, tiny = (run(RECIPES[name], x, w, dy * f) for f in (1.0, 2.0**-18))
    for a, b, factor in zip(one, tiny, (1.0, 2.0**-18, 2.0**-18), strict=True):
        assert torch.equal(a.qdata, b.qdata)
        assert torch.equal(a.scale * factor, b.scale)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(RECIPES)),
    st.tuples(*[st.integers(1, 70)] * 3),
    st.integers(0, 5),
)
def test__any_shape__has_finite_products_of_the_right_shape(name, shape, seed):
    x, w, dy = problem(*shape, seed)
    y, dx, dw = run(RECIPES[name], x, w, dy)
    assert (y.shape, dx.shape, dw.shape) == (dy.shape, x.shape, w.shape)
    assert all(dequantized(t).isfinite().all() for t in (y, dx, dw))


# --- every spelling --------------------------------------------------------------------------

SPELLINGS = {
    "F.linear": (F.linear, (4, 32), (5, 32), (5,)),
    "F.linear of batches": (F.linear, (2, 3, 32), (5, 32)),
    "@": (lambda a, b: a @ b, (2, 4, 32), (32, 5)),
    "@ of batches": (lambda a, b: a @ b, (3, 1, 4, 32), (2, 32, 5)),
    "torch.mm": (torch.mm, (4, 32), (32, 5)),
    "torch.bmm": (torch.bmm, (2, 4, 32), (2, 32, 5)),
    "torch.mv": (torch.mv, (4, 32), (32,)),
    "torch.inner": (torch.inner, (4, 32), (5, 32)),
    "vector @": (torch.matmul, (32,), (32, 5)),
    "einsum": (lambda a, b: torch.einsum("bij,jk->bik", a, b), (2, 4, 32), (32, 5)),
    "einsum of batches": (
        lambda a, b: torch.einsum("b h i d, b h j d -> b i h j", a, b),
        (2, 3, 4, 32),
        (2, 3, 5, 32),
    ),
    "einsum, implicit": (lambda a, b: torch.einsum("ik,kj", a, b), (4, 32), (32, 5)),
    "einsum, a label of one": (lambda a, b: torch.einsum("mik,kj->ij", a, b), (3, 4, 32), (32, 5)),
    "tensordot": (torch.tensordot, (4, 3, 8), (3, 8, 5)),
    "tensordot of dimensions": (
        lambda a, b: torch.tensordot(a, b, ([0, 2], [1, 0])),
        (3, 4, 8),
        (8, 3, 5),
    ),
    "torch.addmm": (torch.addmm, (5,), (4, 32), (32, 5)),
    "torch.baddbmm": (torch.baddbmm, (2, 4, 5), (2, 4, 32), (2, 32, 5)),
    "torch.addbmm": (torch.addbmm, (4, 5), (2, 4, 32), (2, 32, 5)),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", ["current by row", "mxfp8", "nvfp4"])
def test__every_spelling__casts_each_product(spelling, name, monkeypatch):
    call, *shapes = SPELLINGS[spelling]
    recipe, rng = RECIPES[name], torch.Generator().manual_seed(0)
    plain = [torch.randn(s, generator=rng).requires_grad_() for s in shapes]
    inputs = [sct.scaled(x.detach(), recipe=recipe).requires_grad_() for x in plain]
    sides, real = [], by_gemm.factors
    monkeypatch.setattr(by_gemm, "factors", lambda *args: sides.append(1) or real(*args))
    out, want = call(*inputs), call(*plain)
    out.square().sum().backward()
    want.square().sum().backward()
    assert len(sides) == 6  # These are two sides of three products.
    worst = 0.4 if name == "nvfp4" else 0.1
    for a, b in ((out, want), *((x.grad, p.grad) for x, p in zip(inputs, plain, strict=True))):
        assert a.shape == b.shape
        error = (dequantized(a) - b).norm() / b.norm()
        assert 1e-4 < error < worst


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bij,jk,kl->bil", [(2, 4, 8), (8, 8), (8, 3)]),
        ("...ij,jk->...ik", [(2, 4, 8), (8, 3)]),
        ("bij,bjk->bik", [(2, 4, 8), (1, 8, 3)]),
    ],
)
def test__an_einsum_that_is_no_single_product__stays_uncast(equation, shapes):
    inputs = [sct.scaled(torch.randn(s), recipe=MXFP8(rebalance=len(equation))) for s in shapes]
    with pytest.warns(RecipeWarning, match="einsum stays in bf16"):
        y = torch.einsum(equation, *inputs)
    want = torch.einsum(equation, *(dequantized(x) for x in inputs))
    assert ((dequantized(y) - want).norm() / want.norm()) < 0.01


def test__what_is_no_matrix_product__says_so_once_and_stays_uncast():
    recipe = MXFP8(rebalance=7)
    x, w = (sct.scaled(torch.randn(s), recipe=recipe) for s in ((1, 4, 8), (4, 4, 3)))
    with pytest.warns(RecipeWarning, match="conv1d stays in bf16"):
        y = F.conv1d(x, w)
    want = F.conv1d(dequantized(x), dequantized(w))
    assert ((dequantized(y) - want).norm() / want.norm()) < 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        F.conv1d(x, w)


# --- what autograd keeps ---------------------------------------------------------------------


def kept_bytes(recipe: Recipe, rows: int, frozen: bool = False) -> int:
    made, x = layer(recipe, torch.randn(rows, 64), torch.randn(48, 64))
    made.weight.requires_grad_(not frozen)
    own = {made.weight.qdata.untyped_storage().data_ptr()}
    seen: dict[int, int] = {}

    def count(t: Tensor) -> Tensor:
        parts = [getattr(t, n) for n in t.INNER] if isinstance(t, sct.ScaledTensor) else [t]
        for part in parts:
            storage = part.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        made(x)
    return sum(seen.values())


@pytest.mark.parametrize(
    ("name", "bits"), [("mxfp8", 8.25), ("mxfp4", 4.25), ("nvfp4", 4.5), ("current by row", 8)]
)
def test__the_input__is_kept_in_codes(name, bits):
    small, large = (kept_bytes(RECIPES[name], rows) for rows in (256, 1280))
    assert (large - small) * 8 / (1024 * 64) == pytest.approx(bits, abs=0.01)


def test__of_a_frozen_weight__no_input_is_kept_and_no_wgrad_run():
    assert kept_bytes(MXFP8(), 512, frozen=True) < 512
    made, x = layer(MXFP8(), torch.randn(8, 64), torch.randn(48, 64))
    made.weight.requires_grad_(False)
    made(x).sum().backward()
    assert made.weight.grad is None
    assert x.grad is not None


def test__without_gradients__nothing_is_kept():
    made, x = layer(MXFP8(), *problem(8, 64, 48)[:2])
    want = dequantized(made(x))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(dequantized(made(x)), want)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test__checkpointed__has_the_same_gradients(name, reentrant):
    made, x = layer(RECIPES[name], *problem(16, 64, 48)[:2])
    made(x).square().sum().backward()
    want, made.weight.grad = made.weight.grad, None
    checkpoint(made, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(dequantized(made.weight.grad), dequantized(want))


def test__second_derivatives__are_refused_by_name():
    made, x = layer(MXFP8(), *problem(16, 64, 48)[:2])
    (first,) = torch.autograd.grad(made(x).square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        first.square().sum().backward()


# --- what does not fit -----------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_PRODUCT)
def test__an_infinity__spoils_no_other_row(name):
    x, w, _ = problem(20, 64, 48)
    clean = dequantized(layer(RECIPES[name], x, w)[0](layer(RECIPES[name], x, w)[1]))
    x[3, 5] = float("inf")
    made, input = layer(RECIPES[name], x, w)
    y = dequantized(made(input))
    others = [i for i in range(20) if i != 3]
    assert y[others].isfinite().all()
    if name != "nvfp4":  # The tensor shares a scale, and the infinity counts in no amax.
        assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("name", RECIPES)
def test__zeros__stay_zeros(name):
    x, w, dy = (torch.zeros_like(t) for t in problem(20, 33, 65))
    assert all(dequantized(t).eq(0).all() for t in run(RECIPES[name], x, w, dy))


# --- rounding stochastically -----------------------------------------------------------------


STOCHASTIC = [MXFP4(), NVFP4(), Current(gradient_rounding="stochastic")]


@pytest.mark.parametrize("recipe", STOCHASTIC, ids=str)
def test__stochastic_gradients__are_right_on_average(recipe):
    x, w, dy = problem(16, 32, 32)
    torch.manual_seed(0)
    runs = [[dequantized(t) for t in run(recipe, x, w, dy)] for _ in range(64)]
    assert all(torch.equal(r[0], runs[0][0]) for r in runs)  # The forward product is the same.
    assert not torch.equal(runs[0][1], runs[1][1])
    # The weight is rounded to nearest, so its error is the same every time.
    weight = cast_by_hand(w.t().double().numpy(), recipe.gemms.dgrad.right, *carried(w), -1)
    want = dy.double() @ torch.from_numpy(weight.T)
    mean = torch.stack([r[1] for r in runs]).double().mean(0)
    assert (mean - want).norm() < 0.3 * (runs[0][1] - want).norm()


def test__mixing__is_orthogonal_and_shares_out_an_outlier():
    h = mixing(32)
    assert np.allclose(h @ h.T, np.eye(32), atol=1e-6)
    outlier = np.zeros(32)
    outlier[5] = 16.0
    assert np.abs(outlier @ h).max() == pytest.approx(4.0, rel=1e-5)


def test__blocks_of_the_casts__are_those_of_the_formats():
    """The spelled-out casts above and `quantize_blocks` agree, so not both are wrong in the same
    way."""
    x = problem(20, 33, 65)[0]
    codes, scale = sct.formats.quantize_blocks(x, FORMATS["e4m3fn"], PerBlock((1, 32)), "e8m0")
    want = cast_by_hand(x.double().numpy(), Cast("e4m3fn", Microscale(), (1, 32)), 1.0, -1)
    found = sct.formats.dequantize_blocks(codes, scale, FORMATS["e4m3fn"], PerBlock((1, 32)))
    assert np.array_equal(found.double().numpy(), want)
    codes, levels = sct.formats.quantize_blocks(x, FORMATS["e2m1fn"], PerBlock((1, 16)), "nvfp4")
    assert isinstance(levels, TwoLevelScale)
    assert decode(codes, FORMATS["e2m1fn"]).abs().max() == 6
