"""In-place and out= forms return the same object, with the same aliases and the value of the
functional form."""

import pytest
import torch
from assertions import assert_holds, dequantized
from hypothesis import given
from hypothesis import strategies as st
from tensors import gaussian

import scaledtensor as sct

IN_PLACE = {
    "add_": lambda x, y: x.add_(y, alpha=-0.5),
    "sub_": lambda x, y: x.sub_(y),
    "mul_": lambda x, y: x.mul_(y),
    "mul_scalar_": lambda x, y: x.mul_(0.9),
    "div_": lambda x, y: x.div_(3),
    "neg_": lambda x, y: x.neg_(),
    "abs_": lambda x, y: x.abs_(),
    "sqrt_": lambda x, y: x.square_().sqrt_(),
    "relu_": lambda x, y: x.relu_(),
    "clamp_": lambda x, y: x.clamp_(-1, 1),
    "lerp_": lambda x, y: x.lerp_(y, 0.1),
    "addcmul_": lambda x, y: x.addcmul_(y, y, value=0.01),
    "addcdiv_": lambda x, y: x.addcdiv_(y, y.abs() + 1, value=-0.1),
    "exp_": lambda x, y: x.exp_(),
    "tanh_": lambda x, y: x.tanh_(),
    "zero_": lambda x, y: x.zero_(),
    "fill_": lambda x, y: x.fill_(0.3),
    "masked_fill_": lambda x, y: x.masked_fill_(torch.eye(4, 6).bool(), 0.5),
    "copy_": lambda x, y: x.copy_(y),
    "iadd": lambda x, y: x.__iadd__(y),
}
in_place = pytest.mark.parametrize("name", IN_PLACE)


@pytest.mark.parametrize("power", [-30, 0, 30])
@in_place
def test__in_place__returns_the_same_object_with_the_value_of_torch(name, power):
    x, y = sct.scaled(gaussian(4, 6, power=power)), sct.scaled(gaussian(4, 6, seed=1, power=power))
    view, before = x.t(), (x.qdata, x.scale, x.rms)
    plain = [dequantized(x), dequantized(y)]
    assert IN_PLACE[name](x, y) is x
    assert all(now is then for now, then in zip((x.qdata, x.scale, x.rms), before, strict=True))
    want = IN_PLACE[name](*plain)
    assert_holds(x, want, 2.0**-18)
    assert_holds(view, want.t(), 2.0**-18)


@in_place
def test__in_place_through_a_view__reaches_the_base(name):
    base, y = sct.scaled(gaussian(8, 6)), sct.scaled(gaussian(4, 6, seed=1, power=3))
    plain = dequantized(base)
    IN_PLACE[name](base[2:6], y)
    IN_PLACE[name](plain[2:6], dequantized(y))
    assert_holds(base, plain, 2.0**-18)


def test__slices_written__keep_what_is_around_them():
    x = sct.scaled(gaussian(8, 6))
    plain = dequantized(x)
    for target in (x, plain):
        target[1] = 7.0
        target[:, 2] *= 2.0**20
        target[3, 4] = 0.0
    assert_holds(x, plain, 2.0**-18)


OUT = {
    "add": lambda x, y, **o: torch.add(x, y, **o),
    "mul": lambda x, y, **o: torch.mul(x, y, **o),
    "exp": lambda x, y, **o: torch.exp(x, **o),
    "cat": lambda x, y, **o: torch.cat((x, y), **o),
    "sum": lambda x, y, **o: torch.sum(x, 0, **o),
    "where": lambda x, y, **o: torch.where(torch.eye(4, 6).bool(), x, y, **o),
}


@pytest.mark.parametrize("name", OUT)
def test__out__is_written_and_returned(name):
    x, y = sct.scaled(gaussian(4, 6)), sct.scaled(gaussian(4, 6, seed=1))
    want = OUT[name](dequantized(x), dequantized(y))
    out = sct.scaled(torch.zeros(want.shape))
    assert OUT[name](x, y, out=out) is out
    assert_holds(out, want, 2.0**-18)


def test__whole_tensor_of_another_order__takes_a_scale_that_fits():
    """Its views see the write, because all of their elements were replaced too. A part has its
    base's scale."""
    x = sct.scaled(gaussian(4, 6, power=-60).square())
    view, plain = x.t(), dequantized(x)
    x.rsqrt_()
    assert_holds(x, plain.rsqrt(), 2.0**-18)
    assert_holds(view, plain.rsqrt().t(), 2.0**-18)
    assert float(x.qdata.square().mean()) < 2.0**20
    base = sct.scaled(gaussian(4, 6))
    base[0].mul_(2.0**-30)
    assert float(base.scale) == 1


@pytest.mark.parametrize("p", [1, 1.0])
def test__a_power_of_one__is_a_tensor_of_its_own(p):
    x = sct.scaled(torch.randn(4))
    before = x.dequantize()
    x.pow(p).mul_(3.0)
    assert torch.equal(x.dequantize(), before)


WRITES = {
    "copy_": lambda x, y: x.copy_(y),
    "all": lambda x, y: x.__setitem__(slice(None), y),
    "a row": lambda x, y: x[1].copy_(y[1]),
    "an expanded row": lambda x, y: x.copy_(y[:1].expand(4, 6)),
}


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "e4m3fn"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test__a_negated_view__is_written_with_its_sign(write, fmt):
    """`imag` of a conjugate is a view whose kernel negates each element that it reads."""
    source = torch.complex(torch.zeros(4, 6), gaussian(4, 6).bfloat16().float()).conj().imag
    assert source.is_neg()
    plain, x = torch.ones(4, 6), sct.scaled(torch.ones(4, 6), fmt)
    write(plain, source)
    write(x, source)
    torch.testing.assert_close(x.dequantize(), plain, rtol=2**-4, atol=2**-9)


def loss_of_normalised(h, in_place):
    """Normalised rows, which then enter a product without a weight."""
    norm = h.detach().norm(dim=-1, keepdim=True)
    h = h.div_(norm) if in_place else h / norm
    return torch.softmax(h @ h.t() * 8, -1) @ h


@pytest.mark.parametrize("factor", [2.0**-14, 2.0**-10, 1.0, 2.0**10])
def test__products_of_a_tensor_that_was_normalised_in_place__are_those_of_the_plain_one(factor):
    """A product casts elements under their scale, so a scale that stays behind saturates them."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        linear.weight *= factor
    x = torch.randn(32, 64)
    plain = loss_of_normalised(linear(x), False)
    scaled = sct.scale_model(linear)
    for in_place in (False, True):
        found = loss_of_normalised(scaled(x), in_place).dequantize()
        assert (found - plain).norm() <= 0.08 * plain.norm()


ONE = torch.tensor([1.0, 1.0])
#: Additions of `h` to a plain tensor of two elements.
SUMS = {
    "add_": lambda t, h: t.add_(h),
    "+=": lambda t, h: t.__iadd__(h.float()),
    "addcmul_": lambda t, h: t.addcmul_(h, h),
    "index_add_": lambda t, h: t.index_add_(0, torch.arange(2), h),
    "scatter_add_": lambda t, h: t.scatter_add_(0, torch.arange(2), h),
    "out": lambda t, h: torch.add(t, h, out=t),
    "addmm_": lambda t, h: t[None].addmm_(h[None, :1], h[None]),
}


@pytest.mark.parametrize("name", SUMS)
def test__a_plain_sum__keeps_the_digits_of_its_dtype(name):
    """A running sum of BF16 terms would stop at 256."""
    total, term = torch.zeros(2), sct.scaled(ONE, "bf16")
    for _ in range(600):
        SUMS[name](total, term)
    assert type(total) is torch.Tensor
    assert total.tolist() == [600, 600]


def test__a_plain_sum_in_float64__keeps_the_digits_of_float64():
    total = torch.full((2,), 2.0**40, dtype=torch.float64)
    total += sct.scaled(ONE, "bf16")
    assert total.tolist() == [2.0**40 + 1] * 2


ROWS = {
    "index_put_": lambda t, h: t.__setitem__(torch.tensor([0]), h[None]),
    "mask": lambda t, h: t.__setitem__(torch.tensor([True, False]), h[None]),
    "index_copy_": lambda t, h: t.index_copy_(0, torch.tensor([0]), h[None]),
    "scatter_": lambda t, h: t.scatter_(0, torch.tensor([[0, 0]]), h[None]),
    "masked_scatter_": lambda t, h: t.masked_scatter_(torch.tensor([[True], [False]]), h),
    "slice": lambda t, h: t.__setitem__(0, h),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test__a_plain_tensor_that_is_written_in_part__keeps_its_other_elements(name, compiled):
    table = torch.tensor([[70001.0, 0.0], [70003.0, 3.0]])

    def write(t, h):
        ROWS[name](t, h)

    (torch.compile(write, fullgraph=True) if compiled else write)(table, sct.scaled(ONE, "bf16"))
    assert table.tolist() == [[1.0, 1.0], [70003.0, 3.0]]


#: An update of an optimizer -> the functional form.
UPDATES = {
    "add_": (lambda x, y, z: x.add_(y, alpha=-0.3), lambda x, y, z: x.add(y, alpha=-0.3)),
    "add_number_": (lambda x, y, z: x.add_(1e-3), lambda x, y, z: x + 1e-3),
    "sub_": (lambda x, y, z: x.sub_(y), lambda x, y, z: x - y),
    "mul_": (lambda x, y, z: x.mul_(-0.9), lambda x, y, z: x * -0.9),
    "div_": (lambda x, y, z: x.div_(3), lambda x, y, z: x / 3),
    "lerp_": (lambda x, y, z: x.lerp_(y, 0.1), lambda x, y, z: x.lerp(y, 0.1)),
    "addcmul_": (lambda x, y, z: x.addcmul_(y, z, value=0.7), None),
    "square": (
        lambda x, y, z: x.addcmul_(y, y, value=0.01),
        lambda x, y, z: x.addcmul(y, y, value=0.01),
    ),
    "addcdiv_": (lambda x, y, z: x.addcdiv_(y, z, value=-0.1), None),
}
updates = pytest.mark.parametrize("name", UPDATES)


@updates
@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
@given(st.integers(-30, 30), st.integers(-2, 2), st.integers(-2, 2))
def test__an_update__has_the_bits_of_torch_on_the_elements_themselves(name, fmt, at, first, second):
    """Scales are powers of two, which round nothing."""
    at = 0 if name == "add_number_" else at
    of_y = at // 2 if name == "square" else at
    powers = (at, of_y + first, second)
    x, y, z = (sct.scaled(gaussian(4, 6, seed=i, power=n), fmt) for i, n in enumerate(powers))
    plain = [t.dequantize() for t in (x, y, z)]
    if fmt == "bf16":
        plain = [t.bfloat16() for t in plain]
    update, functional = UPDATES[name]
    wanted = functional(x, y, z).rms if functional else None
    update(x, y, z)
    assert torch.equal(x.dequantize(), update(*plain).float())
    if functional:
        assert x.rms == wanted


@updates
def test__an_update_that_keeps_the_scale__makes_no_other_elements(name):
    x, y, z = (sct.scaled(gaussian(64, 64, seed=i)) for i in range(3))
    scale = x.scale.clone()
    with torch.autograd.profiler.profile(profile_memory=True) as seen:
        UPDATES[name][0](x, y, z)
    assert x.scale == scale
    assert max(event.cpu_memory_usage for event in seen.function_events) < x.nbytes


@updates
@pytest.mark.parametrize("start", [0.0, 2.0**-40], ids=["zero", "tiny"])
def test__an_update_of_another_order__takes_a_scale_that_fits(name, start):
    x = sct.scaled(gaussian(4, 6) * start)
    y, z = (sct.scaled(gaussian(4, 6, seed=i, power=9)) for i in (1, 2))
    plain = [t.dequantize() for t in (x, y, z)]
    UPDATES[name][0](x, y, z)
    want = UPDATES[name][0](*plain)
    assert_holds(x, want, 2.0**-18)
    if want.any():
        assert 2.0**-24 < float(x.qdata.square().mean().sqrt()) < 2.0**24


@updates
def test__an_update_of_a_tensor_by_itself__reads_it_before(name):
    x = sct.scaled(gaussian(4, 6, power=3))
    plain = x.dequantize()
    UPDATES[name][0](x, x, x)
    assert_holds(x, UPDATES[name][0](plain, plain.clone(), plain.clone()), 2.0**-18)


@updates
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test__an_update_after_the_forward_pass__is_seen_by_the_backward_pass(name, compiled):
    """autograd refuses the saved copy of elements that changed."""
    x = sct.scaled(gaussian(4, 6)).requires_grad_()
    y, z = (sct.scaled(gaussian(4, 6, seed=i)) for i in (1, 2))
    square = torch.compile(lambda t: (t * t).sum()) if compiled else lambda t: (t * t).sum()
    loss = square(x)
    with torch.no_grad():
        UPDATES[name][0](x, y, z)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


#: An update by a plain operand.
BY_PLAIN = ["add_", "sub_", "lerp_", "addcmul_", "addcdiv_"]


@pytest.mark.parametrize("name", BY_PLAIN)
@pytest.mark.parametrize("power", [-9, 0, 9])
def test__an_update_by_a_plain_tensor__is_calculated_on_the_elements_too(name, power):
    """This holds if the host reads `y` without a wait. Elsewhere the value is the one of a rule."""
    x = sct.scaled(gaussian(64, 64, power=power))
    y, z = (gaussian(64, 64, seed=i) for i in (1, 2))
    plain, scale = x.dequantize(), x.scale.clone()
    with torch.autograd.profiler.profile(profile_memory=True) as seen:
        UPDATES[name][0](x, y, z)
    want = UPDATES[name][0](plain, y, z)
    assert_holds(x, want, 2.0**-22)
    assert x.scale == scale
    if x.is_cpu:
        assert torch.equal(x.dequantize(), want)
        assert max(event.cpu_memory_usage for event in seen.function_events) < x.nbytes


@pytest.mark.parametrize("fill", [-torch.inf, torch.finfo(torch.float32).min, -1e9])
def test__a_mask_that_is_added__moves_no_scale(fill):
    x, mask = sct.scaled(gaussian(4, 6)), torch.zeros(4, 6)
    mask[:, 4:] = fill
    want, rms = x.dequantize() + mask, x.rms.clone()
    for masked in (x + mask, x.add_(mask)):
        assert torch.equal(masked.dequantize()[:, :4], want[:, :4])
        assert masked.dequantize()[:, 4:].max() <= -1e8
        assert masked.rms == rms


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "normalise",
    [
        lambda x: x.mul_(1000.0),
        lambda x: x.div_(255).sub_(0.5).div_(0.25),
        lambda x: x.add_(1000.0),
    ],
)
def test__an_input_that_is_normalised_in_place__fits_the_format_of_the_next_cast(
    normalise, compiled
):
    weight = sct.scaled(gaussian(64, 64, seed=3), recipe="unit")
    product = torch.compile(lambda x: x @ weight) if compiled else lambda x: x @ weight
    plain = gaussian(64, 64, power=7).abs()
    x = sct.scaled(plain, recipe="unit")
    want = normalise(plain) @ weight.dequantize()
    found = product(normalise(x)).dequantize()
    assert (found - want).norm() < 0.06 * want.norm()


def test__foreach_forms__take_a_tensor_of_factors():
    x, y, z = ([sct.scaled(gaussian(4, 6, seed=i + n)) for n in range(2)] for i in range(3))
    plain = [[t.dequantize() for t in tensors] for tensors in (x, y, z)]
    factors = torch.tensor([0.5, -2.0], device="cpu")  # as torch demands for tensors of CUDA too
    for name in ("_foreach_addcmul_", "_foreach_addcdiv_"):
        getattr(torch, name)(x, y, z, factors)
        getattr(torch, name)(*plain, factors)
    for found, want in zip(x, plain[0], strict=True):
        assert_holds(found, want, 2.0**-18)
