"""A compiled layer norm on a CPU is torch's kernel, with the bits of eager code."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scaledtensor as sct

WIDTH = 48

#: Older versions of torch do not say that they compile while AOTAutograd traces. A compiled norm is
#: then torch's own parts.
pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="torch before 2.13"
)


def parameters(kind: str) -> tuple[Tensor | None, Tensor | None]:
    torch.manual_seed(1)
    weight, bias = torch.rand(WIDTH) + 0.5, torch.randn(WIDTH)
    if kind == "scaled":
        return sct.scaled(weight * 2.0**9), sct.scaled(bias, "bf16")
    return {
        "plain": (weight, bias),
        "bfloat16": (sct.scaled(weight, "bf16"), sct.scaled(bias, "bf16")),
        "8 bits": (sct.scaled(weight, "e4m3fn"), sct.scaled(bias, "e5m2")),
        "one plain": (sct.scaled(weight), bias),
        "no bias": (sct.scaled(weight), None),
        "none": (None, None),
    }[kind]


KINDS = ["scaled", "plain", "bfloat16", "8 bits", "one plain", "no bias", "none"]


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.layer_norm(x, (WIDTH,), weight, bias, 1e-5)


@pytest.mark.parametrize("format", ["bf16", "fp32", "e4m3fn"])
@pytest.mark.parametrize("kind", KINDS)
def test__the_result__has_the_bits_and_the_scale_of_eager_code(kind: str, format: str) -> None:
    x = sct.scaled(torch.randn(2, 7, WIDTH) * 3 + 40, format)
    given = x, *parameters(kind)
    eager = norm(*given)
    torch._dynamo.reset()
    compiled = torch.compile(norm, fullgraph=True)(*given)
    assert torch.equal(compiled.dequantize(), eager.dequantize())
    assert float(compiled.scale) == float(eager.scale)


@pytest.mark.parametrize("kind", ["scaled", "plain", "none"])
def test__the_gradients__are_those_of_eager_code(kind: str) -> None:
    data = torch.randn(6, WIDTH)
    target = torch.randn(6, WIDTH)

    def gradients(function) -> list[Tensor]:
        x = sct.scaled(data, "bf16").requires_grad_()
        own = [None if p is None else p.clone().requires_grad_() for p in parameters(kind)]
        (function(x, *own) * target).sum().backward()
        return [t.grad for t in (x, *own) if t is not None]

    torch._dynamo.reset()
    eager, compiled = gradients(norm), gradients(torch.compile(norm, fullgraph=True))
    for a, b in zip(eager, compiled, strict=True):
        # Eager code rounds the gradient of each operator to bfloat16, and compiled code does not.
        assert (value(b) - value(a)).norm() <= 2**-7 * value(a).norm()
        if isinstance(a, sct.ScaledTensor):
            assert float(a.scale) == float(b.scale)


def value(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, sct.ScaledTensor) else x


def test__sizes_that_change__are_one_graph() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(norm, backend=counter, fullgraph=True, dynamic=True)
    for rows in (3, 5, 8):
        given = sct.scaled(torch.randn(rows, WIDTH), "bf16"), *parameters("scaled")
        assert torch.equal(compiled(*given).dequantize(), norm(*given).dequantize())
    assert counter.frame_count == 1


def test__an_exported_program__calls_torchs_own_operator() -> None:
    model = sct.scale_model(nn.LayerNorm(WIDTH).eval())
    program = torch.export.export(model, (torch.randn(4, WIDTH),))
    called = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert "aten.native_layer_norm.default" in called or "aten.layer_norm.default" in called
    assert not any("scaledtensor.layer_norm" in name for name in called)
