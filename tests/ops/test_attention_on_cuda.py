"""The rules of CUDA's attention kernels agree with the CPU's rules, on kernels that a CPU has."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.func import vjp

import scaledtensor as sct
from scaledtensor.ops.registry import RULES
from scaledtensor.ops.results import wrap
from scaledtensor.ops.rules import attention

aten = torch.ops.aten
SCALE = 0.2


def attend(q, k, v, causal, mask=None):
    logits = (q @ k.mT) * SCALE
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -math.inf)
    if mask is not None:
        logits = logits + mask
    return torch.softmax(logits, -1) @ v


def flash(q, k, v, dropout, causal, debug=False, *, scale):
    assert q.dtype is k.dtype is v.dtype is torch.bfloat16
    assert scale == SCALE
    out = attend(q.float(), k.float(), v.float(), causal).to(q.dtype)
    return out, torch.zeros(1), None, None, 8, 8, torch.zeros(2), torch.zeros(()), torch.zeros(0)


def flash_backward(g, q, k, v, out, lse, cq, ck, mq, mk, dropout, causal, s, o, *, scale):
    assert {x.dtype for x in (g, q, k, v, out)} == {torch.bfloat16}
    _, back = vjp(lambda *x: attend(*x, causal), q.float(), k.float(), v.float())
    return tuple(x.to(q.dtype) for x in back(g.float()))


def efficient(q, k, v, mask, compute, dropout, causal, *, scale):
    assert mask is None or mask.dtype is q.dtype
    out = attend(q.float(), k.float(), v.float(), causal, mask).to(q.dtype)
    return out, torch.zeros(1), torch.zeros(()), torch.zeros(())


def efficient_backward(g, q, k, v, mask, out, lse, s, o, dropout, asked, causal, *, scale):
    held = torch.zeros(()) if mask is None else mask.float()
    wide = (q.float(), k.float(), v.float(), held)
    _, back = vjp(lambda a, b, c, m: attend(a, b, c, causal, m), *wide)
    return tuple(x.to(q.dtype) for x in back(g.float()))


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Replace CUDA's kernels by kernels of a CPU, on bfloat16 elements as on a device."""
    taken = {
        "_scaled_dot_product_flash_attention_backward": flash_backward,
        "_scaled_dot_product_efficient_attention": efficient,
        "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    }
    monkeypatch.setattr(attention, "_flash", SimpleNamespace(default=flash))
    monkeypatch.setattr(
        attention,
        "aten",
        SimpleNamespace(**{name: SimpleNamespace(default=f) for name, f in taken.items()}),
    )
    folded = attention._folded

    def half(*operands):
        a, b, c, held = folded(*operands)
        return a, b, c, [x.bfloat16() for x in held]

    monkeypatch.setattr(attention, "_folded", half)


def operands(seed=0):
    torch.manual_seed(seed)
    tensors = [torch.randn(2, 3, 8, 16) * 2.0**k for k in (1, -2, 5, -20)]
    return [sct.scaled(x, "bf16", dtype=torch.float32) for x in tensors]


def made(results, given):
    return [wrap(r, list(given)) for r in results]


def close(ours, want):
    """Values and expected RMS are equal."""
    assert ours.scale == want.scale
    assert ours.rms == want.rms
    a, b = ours.dequantize(), want.dequantize()
    assert float((a - b).norm()) <= 2.0**-6 * float(b.norm())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test__value_and_gradients__are_those_of_the_cpu_kernel(kernel, causal):
    q, k, v, g = operands()
    cpu = aten._scaled_dot_product_flash_attention_for_cpu
    of_cpu = RULES[cpu.default].function
    back_of_cpu = RULES[aten._scaled_dot_product_flash_attention_for_cpu_backward.default].function
    with pytest.MonkeyPatch.context() as patch:  # Real kernels are used.
        patch.undo()
        patch.setattr(attention, "aten", aten)
        patch.setattr(attention, "_folded", _folded_on_a_cpu)
        raw, lse = of_cpu(q, k, v, 0.0, causal, scale=SCALE)
        (want,) = made([raw], (q, k, v))
        gradients = made(back_of_cpu(g, q, k, v, want, lse, 0.0, causal, scale=SCALE), (q, k, v))
    name = f"_scaled_dot_product_{kernel}_attention"
    forward, backward = (RULES[getattr(aten, n).default] for n in (name, f"{name}_backward"))
    if kernel == "flash":
        raw, *rest = forward.function(q, k, v, 0.0, causal, scale=SCALE)
        (out,) = made([raw], (q, k, v))
        lse, cq, ck, mq, mk, seed, offset, _ = rest
        state = (lse, cq, ck, mq, mk, 0.0, causal, seed, offset)
        found = backward.function(g, q, k, v, out, *state, scale=SCALE)
    else:
        raw, *rest = forward.function(q, k, v, None, True, 0.0, causal, scale=SCALE)
        (out,) = made([raw], (q, k, v))
        asked = (True, True, True, False)
        *found, none = backward.function(
            g, q, k, v, None, out, *rest, 0.0, asked, causal, scale=SCALE
        )
        assert none is None
    close(out, want)
    for ours, theirs in zip(made(found, (q, k, v)), gradients, strict=True):
        close(ours, theirs)


_folded_on_a_cpu = attention._folded


def test__a_mask__has_its_gradient_at_the_scale_of_the_logits():
    q, k, v, g = operands(1)
    mask = torch.randn(2, 3, 8, 8)
    name = "_scaled_dot_product_efficient_attention"
    forward, backward = (RULES[getattr(aten, n).default] for n in (name, f"{name}_backward"))
    raw, *rest = forward.function(q, k, v, mask, True, scale=SCALE)
    (out,) = made([raw], (q, k, v))
    asked = (True, True, True, True)
    *_, told = backward.function(g, q, k, v, mask, out, *rest, 0.0, asked, scale=SCALE)
    (ours,) = made([told], (q, k, v))
    plain = [x.dequantize() for x in (q, k, v)]
    _, back = vjp(lambda m: attend(*plain, False, m), mask)
    (want,) = back(g.dequantize())
    assert float((ours.dequantize() - want).norm()) <= 2.0**-5 * float(want.norm())


def test__flash__is_not_for_what_its_kernel_does_not_take():
    q, k, v, _ = operands()
    assert attention._for_flash(q, k, v) is None  # on a CPU
    held = attention._is_half
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_is_half", lambda x: True)
        took = attention._for_flash(q, k, v, None, 0.1, True, 0.5)
        assert took == {"dropout_p": 0.1, "is_causal": True, "scale": 0.5}
        assert attention._for_flash(q, k, v, torch.zeros(8, 8)) is None
        assert attention._for_flash(q[..., :4, :], k, v, None, 0.0, True) is None
        assert attention._for_flash(q[..., :12], k[..., :12], v[..., :12]) is None
    assert not held(q)
