"""The step of Adam in C++ gives the numbers of the rule's Python code, and its elements."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import gaussian

import scaledtensor as sct
from scaledtensor import native
from scaledtensor.native import adam as loop
from scaledtensor.ops.rules import optimizer
from scaledtensor.scales.singles import amounts_of

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.status())


def tensors(count, fmt="fp32", scales=(1.0, 1.0, 1.0, 1.0), zero=()):
    """A gradient, a parameter and two moments. The moments of `zero` are known to be zero."""
    made = []
    for seed, scale in enumerate(scales):
        x = gaussian(count, seed=seed)
        x = x.square() if seed == 3 else x
        x = torch.zeros_like(x) if seed in zero else x
        made.append(sct.scaled(x * scale, fmt if seed == 0 else "fp32"))
    return made


def stepped(held, options):
    """Make a step of one parameter. Returns whether C++ made it, and all that it wrote."""
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        step = loop.step
        patch.setattr(loop, "step", lambda *given: runs.append(given) or step(*given))
        amounts = [amounts_of(x) for x in held]
        free = options.get("free", [2, 2, 2])
        entry = optimizer._Stepped(tuple(held), amounts, free, options["step"])
        options = {"coupled": 0.0, **options}
        names = ("lr", "beta1", "beta2", "weight_decay", "eps", "coupled")
        optimizer._adam_together([entry], *(options[name] for name in names))
    return len(runs), [(x.qdata, x.scale.item(), x.rms.item(), x.nonnegative) for x in held]


powers = st.integers(-60, 60).map(lambda k: 2.0**k)
OPTIONS = st.fixed_dictionaries(
    {
        "step": st.integers(1, 100_000).map(float),
        "lr": st.floats(1e-7, 1.0),
        "beta1": st.sampled_from([0.0, 0.3, 0.9, 0.99]),
        "beta2": st.sampled_from([0.0, 0.5, 0.95, 0.999]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.1]),
        "eps": st.sampled_from([0.0, 1e-8, 1e-3]),
        "coupled": st.sampled_from([0.0, 1.0]),
        "free": st.lists(st.integers(0, 2), min_size=3, max_size=3),
    }
)


@settings(max_examples=200)
@given(
    OPTIONS,
    st.tuples(powers, powers, powers, powers),
    st.sampled_from(["fp32", "bf16"]),
    st.sampled_from([(), (2, 3), (0,), (1,), (0, 2, 3)]),
    st.sampled_from([1, 77]),
)
def test__the_loop__is_the_python_code(options, scales, fmt, zero, count):
    """Scales, RMS and elements have the same bits."""
    ours, theirs = tensors(count, fmt, scales, zero), tensors(count, fmt, scales, zero)
    runs, made = stepped(ours, options)
    assert runs == 1
    with native.left_out():
        runs, want = stepped(theirs, options)
    assert runs == 0
    for (q, *numbers), (other, *others) in zip(made, want, strict=True):
        assert repr(numbers) == repr(others)  # one NaN is not equal to another
        torch.testing.assert_close(q, other, rtol=0.0, atol=0.0, equal_nan=True)


def test__many_elements__have_the_same_bits():
    """Threads and pieces change nothing."""
    options = {
        "step": 3.0,
        "lr": 1e-2,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.1,
        "eps": 1e-6,
    }
    ours, theirs = tensors(700_001), tensors(700_001)
    _, made = stepped(ours, options)
    with native.left_out():
        _, want = stepped(theirs, options)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(made, want, strict=True))


@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
@pytest.mark.parametrize("beta1", [0.9, 0.3], ids=["from the start", "from the end"])
@pytest.mark.parametrize("count", [1, 77, 70_000])
def test__the_loop__is_the_step_of_operators(fmt, beta1, count):
    _, p, first, second = held = tensors(count, fmt)
    values = [x.dequantize() for x in held]
    stepped(
        held,
        {"step": 3.0, "lr": 1e-2, "beta1": beta1, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-6},
    )
    gradient, q, m, v = (x.float() for x in values)
    m.lerp_(gradient, 1 - beta1)
    v.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
    near = {"rtol": 2.0**-22, "atol": 1e-8}
    torch.testing.assert_close(first.dequantize(), m, **near)
    torch.testing.assert_close(second.dequantize(), v, **near)
    root = (v.double() / (1 - 0.99**3)).sqrt() + 1e-6
    step = m.double() / (1 - beta1**3) / root * 1e-2
    want = (q.double() * (1 - 1e-2 * 0.1) - step).float()
    torch.testing.assert_close(p.dequantize(), want, rtol=0.0, atol=2.0**-21)


def test__several_parameters__share_a_call_and_each_has_its_step():
    torch.manual_seed(0)
    runs = []
    shapes = [(6, 8), (5,), (70, 1000)]
    plain = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    scaled = [torch.nn.Parameter(sct.scaled(p.detach(), "fp32")) for p in plain]
    optimizers = [torch.optim.AdamW(ps, lr=0.05, fused=True) for ps in (plain, scaled)]
    step = loop.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loop, "step", lambda given, options: runs.append(len(given)) or step(given, options)
        )
        for stepping in range(4):
            for n, (p, s) in enumerate(zip(plain, scaled, strict=True)):
                g = torch.randn_like(p) if n or stepping % 2 else None  # the first has fewer steps
                p.grad, s.grad = g, None if g is None else sct.scaled(g, "fp32")
            for chosen in optimizers:
                chosen.step()
    assert runs == [2, 3, 2, 3]
    for p, s in zip(plain, scaled, strict=True):
        torch.testing.assert_close(s.detach().dequantize(), p.detach(), rtol=2e-5, atol=1e-6)


def test__it_serves__what_it_reads():
    gradient, *held = [gaussian(8, 8, seed=s) for s in range(4)]
    assert loop.serves(gradient, *held)
    assert loop.serves(gradient.bfloat16(), *held)
    assert not loop.serves(gradient.double(), *held)
    assert not loop.serves(gradient.t(), *held)
    assert not loop.serves(gradient.to("meta"), *held)
    assert not loop.serves(gradient, held[0].t(), *held[1:])


def test__it_runs__only_with_a_library():
    held = tensors(77)
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    before = [x.clone() for x in held]
    with native.left_out():
        runs, made = stepped(held, {"step": 1.0, **options})
    assert runs == 0
    assert not any(torch.equal(q, x.qdata) for (q, *_), x in zip(made[1:], before[1:], strict=True))
