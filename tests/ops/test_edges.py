"""Masks, infinities, zeros, NaNs, empty and 0-dim tensors."""

import math

import pytest
import torch
import torch.nn.functional as F
from all_cases import CASES
from assertions import TOLERANCE, assert_holds, dequantized
from tensors import gaussian

import scaledtensor as sct
from scaledtensor.scales.powers import is_power_of_two

FILLS = [float("-inf"), torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -1e9, -1e4]
SINGULAR_AT_0 = {
    *("div", "addcdiv", "log", "log2", "reciprocal", "rsqrt", "rsqrt_elements"),
    *("pow_half", "sqrt", "std", "norm", "layer_norm_eps_0", "prod"),
    *("qr_q", "qr_r", "polar_u", "polar_h", "slogdet"),
}
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@every_case
def test__zero_tensors__give_zeros_and_never_nan(case):
    if case.name in SINGULAR_AT_0:
        pytest.skip("NaN or infinite at zero for plain tensors too")
    inputs = [
        sct.scaled(torch.zeros(s)).requires_grad_(case.differentiable) for s in case.shapes[0]
    ]
    out = case.run(*inputs)
    assert_holds(
        out, case.run(*map(dequantized, inputs)), TOLERANCE[torch.float32] * case.tolerance
    )
    if case.differentiable:
        ones = torch.ones_like(out)
        for g in torch.autograd.grad(out, inputs, ones):
            assert dequantized(g).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [-40, 0, 40])
@pytest.mark.parametrize("fill", FILLS)
def test__masked_logits__get_no_weight_and_no_gradient(fill, shift, dtype):
    x = sct.scaled((gaussian(8, 16) * 2.0**shift).to(dtype)).requires_grad_()
    mask = torch.ones(8, 16, dtype=torch.bool).triu(1)
    y = F.softmax(x.masked_fill(mask, fill), -1)
    plain = dequantized(x).requires_grad_()
    reference = F.softmax(plain.masked_fill(mask, fill), -1)
    tolerance = 4 * TOLERANCE[dtype]
    assert_holds(y, reference, tolerance)
    hidden = mask & (reference == 0)  # A mild fill hides no logit that is lower still.
    assert hidden.any()
    assert (dequantized(y)[hidden] == 0).all()
    grad = torch.autograd.grad(y, x, sct.scaled(gaussian(8, 16, seed=1).to(dtype)))[0]
    assert dequantized(grad).isfinite().all()
    assert (dequantized(grad)[hidden] == 0).all()


@pytest.mark.parametrize("fill", FILLS)
def test__additive_mask__is_no_part_of_the_range(fill):
    x = sct.scaled(gaussian(8, 16))
    mask = torch.zeros(8, 16).masked_fill(torch.ones(8, 16, dtype=torch.bool).triu(1), fill)
    for y in (x + mask, torch.where(mask == 0, x, mask)):
        assert 0.5 < float(y.scale) < 4
        assert_holds(F.softmax(y, -1), F.softmax(dequantized(x) + mask, -1), 2.0**-16)


def test__a_side_of_where_that_is_not_a_number__expects_nothing():
    """torch's RAdam takes such a root, guarded by its condition."""
    x = sct.scaled(gaussian(64))
    root = x * torch.tensor(-2.0).sqrt()
    for y in (
        torch.where(torch.tensor(True), x, root),
        torch.where(torch.tensor(False), root, x),
    ):
        assert_holds(y, dequantized(x), 0)
        assert float(y.scale) == 1


@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
def test__one_special_element__stays_one_and_moves_no_scale(special):
    plain = gaussian(64)
    plain[3] = special
    x = sct.scaled(plain)
    assert float(x.scale) == 1
    for f in (
        torch.neg,
        torch.abs,
        F.relu,
        lambda v: v + v,
        lambda v: v * 3,
        lambda v: v.cumsum(0),
    ):
        y = f(x)
        assert torch.equal(dequantized(y).isnan(), f(plain).isnan())
        assert_holds(y, f(plain.double()), 2.0**-16)


def test__one_key__is_attended_to_whole():
    q, k, v = (sct.scaled(gaussian(2, 2, n, 8, seed=n)).requires_grad_() for n in (3, 1, 1))
    out = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(dequantized(out), dequantized(v).expand(2, 2, 3, 8))
    for g in torch.autograd.grad(out, (q, k), sct.scaled(gaussian(2, 2, 3, 8))):
        assert dequantized(g).abs().max() < 1e-5


@pytest.mark.parametrize("p", [0.0, 0.25])
def test__dropout__keeps_range_and_expectation(p):
    torch.manual_seed(0)
    x = sct.scaled(gaussian(2**16)).requires_grad_()
    y = F.dropout(x, p)
    kept = dequantized(y) != 0
    assert_holds(y, torch.where(kept, dequantized(x) / (1 - p), 0), 2.0**-20)
    g = torch.autograd.grad(y, x, sct.scaled(gaussian(2**16, seed=1)))[0]
    assert_holds(g, torch.where(kept, gaussian(2**16, seed=1).double() / (1 - p), 0), 2.0**-20)
    assert abs(float(kept.double().mean()) - 1 + p) < 0.01


EMPTY = {
    "add": lambda x: x + x,
    "mul": lambda x: x * 0.3,
    "relu": F.relu,
    "gelu": F.gelu,
    "softmax": lambda x: F.softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "matmul": lambda x: x @ x.mT,
    "linear": lambda x: F.linear(x, x.new_ones(3, 4)),
    "cat": lambda x: torch.cat((x, x)),
    "sum": lambda x: x.sum(0),
    "mean_last": lambda x: x.mean(-1),
    "view": lambda x: x.view(-1, 2),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "cumsum": lambda x: x.cumsum(0),
    "sdpa": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3),
}


@pytest.mark.parametrize("name", EMPTY)
def test__empty_batch__gives_what_torch_gives(name):
    x = sct.scaled(torch.zeros(0, 4)).requires_grad_()
    y = EMPTY[name](x)
    assert_holds(y, EMPTY[name](torch.zeros(0, 4)), 0)
    assert torch.autograd.grad(y, x, torch.zeros_like(y))[0].shape == (0, 4)


def test__scalars__stay_0_dim():
    x, y = sct.scaled(torch.tensor(3.0)), sct.scaled(torch.tensor(-0.375))
    for f in (torch.add, torch.mul, torch.div, torch.maximum):
        assert_holds(f(x, y), f(torch.tensor(3.0), torch.tensor(-0.375)), 2.0**-20)
    assert float(x * y) == -1.125
    assert x.item() == 3


#: Two scales of 2^75 have no float32 product, though the values are ordinary numbers.
FAR_APART = {
    "mul": (lambda x, y: x * y, (75, 75)),
    "div": (lambda x, y: x / y, (75, -75)),
    "addcmul": (lambda x, y: torch.addcmul(x, x, y), (75, 75)),
    "addcdiv": (lambda x, y: torch.addcdiv(x, x, y), (75, -75)),
    "mm": (torch.mm, (75, 75)),
    "addmm": (lambda x, y: torch.addmm(x, x, y), (75, 75)),
    "outer": (lambda x, y: torch.outer(x[0], y[0]), (75, 75)),
    "prelu_gradient": (lambda x, y: F.prelu(-x.abs(), y[0]), (75, 75)),
    "conv2d": (lambda x, y: F.conv2d(x[None, None], y[None, None, :3, :3]), (75, 75)),
}


@pytest.mark.parametrize("how", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", FAR_APART)
def test__scales_whose_product_is_no_float32__give_values_that_are(name, how):
    function, powers = FAR_APART[name]
    inputs = [
        sct.ScaledTensor(
            gaussian(8, 8, seed=i) * 2.0 ** math.copysign(62, -power), 2.0**power, "fp32"
        )
        for i, power in enumerate(powers)
    ]
    plain = [dequantized(x).double().requires_grad_() for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    run = function if how == "eager" else torch.compile(function, backend=how, fullgraph=True)
    y, expected = run(*inputs), function(*plain)
    # The expected RMS is no float32 number either, so the scale is the nearest possible one.
    assert_near(y, expected, 2.0**-16)
    assert is_power_of_two(y.scale)
    if "div" in name:  # The gradient divides twice, by elements far from 1.
        return
    given = gaussian(*y.shape, seed=9)
    gradients = torch.autograd.grad(y, inputs, sct.scaled(given))
    reference = torch.autograd.grad(expected, plain, given.double())
    for g, true in zip(gradients, reference, strict=True):
        assert_near(g, true, 2.0**-14)


def assert_near(x, reference, tolerance):
    error = (dequantized(x).double() - reference).abs().amax()
    assert error <= tolerance * reference.abs().amax()


#: Function of torch -> the shapes of a sum and of its two factors.
SUMS = {
    torch.addmm: ((4, 5), (4, 8), (8, 5)),
    torch.baddbmm: ((2, 4, 5), (2, 4, 8), (2, 8, 5)),
    torch.addbmm: ((4, 5), (2, 4, 8), (2, 8, 5)),
    torch.addmv: ((4,), (4, 8), (8,)),
    torch.addr: ((4, 5), (4,), (5,)),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("alpha", [1, 0.75])
@pytest.mark.parametrize("function", SUMS, ids=lambda f: f.__name__)
def test__a_beta_of_0__leaves_the_summand_unread(function, alpha, compiled):
    """timm's Muon sums into `torch.empty`, which may hold any bits."""
    shape, *factors = SUMS[function]
    a, b = (sct.scaled(gaussian(*s, seed=i)) for i, s in enumerate(factors))
    plain = [dequantized(x).double() for x in (a, b)]
    want = function(torch.zeros(shape).double(), *plain, beta=0, alpha=alpha)

    def run(*args):
        return function(*args, beta=0, alpha=alpha)

    if compiled:
        torch.compiler.reset()
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    for unread in (math.nan, math.inf):
        for c in (torch.full(shape, unread), sct.scaled(torch.ones(shape)) * unread):
            assert_near(run(c, a, b), want, 2.0**-16)
    if not compiled:
        place = sct.scaled(torch.full(shape, math.nan))
        function(place, a, b, beta=0, alpha=alpha, out=place)
        assert_near(place, want, 2.0**-16)
        with pytest.raises(RuntimeError):
            run(torch.zeros(7, 7), a, b)


BOUNDED = {
    "clamp": lambda x, m: x.clamp(min=m),
    "clamp_": lambda x, m: x.clone().clamp_(min=m, max=-m),
    "hardtanh": lambda x, m: F.hardtanh(x, m, 1.0),
    "threshold": lambda x, m: F.threshold(x, m, 0.0),
    "hardshrink": lambda x, m: F.hardshrink(x, -m),
    "entropy": lambda x, m: torch.distributions.Categorical(logits=x).entropy(),
}


@pytest.mark.parametrize("function", BOUNDED.values(), ids=BOUNDED)
def test__the_limits_of_float32__bound_bfloat16_elements(function):
    """The dtype of such a tensor is float32, so its limits come from torch.finfo(x.dtype)."""
    x = gaussian(4, 6).bfloat16().float()
    scaled = sct.scaled(x, "bf16")
    assert scaled.dtype == torch.float32
    least = torch.finfo(scaled.dtype).min
    made = dequantized(function(scaled, least)).float()
    torch.testing.assert_close(made, function(x, least), rtol=2**-7, atol=2**-7)


def test__a_mask_of_the_least_float32__is_made_for_bfloat16_elements():
    x = sct.scaled(gaussian(4, 6), "bf16")
    least = torch.finfo(x.dtype).min
    for mask in (torch.full_like(x, least), x.new_full((4, 6), least)):
        assert (dequantized(mask) < -1e30).all()
        kept = torch.where(torch.eye(4, 6).bool(), x, mask).softmax(-1)
        torch.testing.assert_close(dequantized(kept).float(), torch.eye(4, 6), rtol=0, atol=1e-6)
