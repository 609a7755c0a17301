"""PyTorch's own samples of its operators, run on ScaledTensors."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import scaledtensor as sct
from scaledtensor.errors import UnsupportedError


def name_of(info: Any) -> str:
    return info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")


OPS = {name_of(info): info for info in op_db}

SPARSE = (UnsupportedError, "sparse")

#: Maps an operator that the library refuses to its error and a part of its message.
OUT_OF_SCOPE: dict[str, tuple[type[Exception], str]] = {
    **dict.fromkeys(("sparse.sampled_addmm", "sparse.mm.reduce"), SPARSE),
}

#: Operators without a value to compare, or without one here.
NO_VALUE = {
    **dict.fromkeys(
        ("empty_like", "new_empty", "new_empty_strided"), "fresh memory holds no value"
    ),
    **dict.fromkeys((n for n in OPS if n.startswith("jiterator")), "compiled for CUDA only"),
    **dict.fromkeys(("cfloat", "cdouble", "chalf"), "complex numbers"),
    "linalg.eig": "an eigenvector has any phase",
    "as_strided.partial_views": "its samples read memory outside the tensor",
}
NO_VALUE = {name: why for name, why in NO_VALUE.items() if name not in OUT_OF_SCOPE}

#: These fail or differ if they are compiled alone, for reasons of their own.
NOT_COMPILED = dict.fromkeys(
    (f"nn.functional.linear_cross_entropy.{way}" for way in ("chunked", "chunked_none")),
    "Dynamo enters the function past __torch_function__, and meets a kernel without a rule",
)

SAMPLES = 4
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4, "equal_nan": True}


def in_scope() -> list[str]:
    """Return operators with a sample that has a float32 tensor in it, less the operators in the
    lists above."""
    found = []
    for name, info in OPS.items():
        if name in OUT_OF_SCOPE or name in NO_VALUE:
            continue
        try:
            next(samples(info))
        except NotApplicableError:
            continue
        found.append(name)
    return found


@dataclass
class Sample:
    """One call with scaled and plain arguments of the same values."""

    call: Callable[..., Any]
    scaled: tuple[Any, Any]
    plain: tuple[Any, Any]

    def run(self, arguments: tuple[Any, Any]) -> Any:
        torch.manual_seed(1)
        args, kwargs = arguments
        return self.call(*args, **kwargs)


class NotApplicableError(Exception):
    """There is nothing to compare, and the message says why."""


def samples(info: Any) -> Iterator[Sample]:
    """Return the first few samples with a float32 tensor among the arguments.

    Raises:
        NotApplicableError: the operator has no such sample.
    """
    if torch.float32 not in info.supported_dtypes("cpu"):
        raise NotApplicableError("takes no float32")
    torch.manual_seed(0)
    drawn = info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)
    found = False
    for s in itertools.islice(drawn, SAMPLES):
        given = ((s.input, *s.args), s.kwargs)
        scaled = tree_map(_scaled, given)
        if any(isinstance(t, sct.ScaledTensor) for t in tree_leaves(scaled)):
            found = True
            yield Sample(info.op, scaled, tree_map(_plain, scaled))
    if not found:
        raise NotApplicableError("takes no float tensor")


def _scaled(x: Any) -> Any:
    if isinstance(x, Tensor) and x.dtype == torch.float32 and x.layout == torch.strided:
        return sct.scaled(x.detach()).requires_grad_(x.requires_grad)
    return x


def _plain(x: Any) -> Any:
    if isinstance(x, sct.ScaledTensor):
        return x.detach().dequantize().requires_grad_(x.requires_grad)
    return x.detach().clone() if isinstance(x, Tensor) else x


def forward(sample: Sample) -> None:
    """Check the result, in inference mode too."""
    with torch.no_grad():
        want = sample.run(sample.plain)
        assert_same(sample.run(sample.scaled), want)
    with torch.inference_mode():
        assert_same(sample.run(sample.scaled), want)


def backward(sample: Sample, run: Callable[[Any], Any] | None = None) -> None:
    """Check the gradients for a Gaussian gradient of every differentiable result."""
    run = run or sample.run
    outs, plain_outs = (
        _differentiable(f(a)) for f, a in ((run, sample.scaled), (sample.run, sample.plain))
    )
    inputs, plain_inputs = (_differentiable(a) for a in (sample.scaled, sample.plain))
    if not plain_outs:
        return
    assert len(outs) == len(plain_outs)
    seeds = [sct.scaled(torch.randn(o.shape)) for o in plain_outs]
    given = [
        s if isinstance(o, sct.ScaledTensor) else s.dequantize().to(o.dtype)
        for s, o in zip(seeds, outs, strict=True)
    ]
    got = torch.autograd.grad(outs, inputs, given, allow_unused=True)
    want = torch.autograd.grad(
        plain_outs,
        plain_inputs,
        [s.dequantize().to(o.dtype) for s, o in zip(seeds, plain_outs, strict=True)],
        allow_unused=True,
    )
    for x, y in zip(got, want, strict=True):
        if y is not None and (x is not None or y.abs().max() > 0):
            assert_same(x, y)


def backward_of_plain(sample: Sample) -> None:
    """Check the gradients of a plain operator before scaled ones: only its incoming gradient is a
    ScaledTensor."""
    outs, inputs = _differentiable(sample.run(sample.plain)), _differentiable(sample.plain)
    outs = [o for o in outs if o.dtype == torch.float32]
    if not outs:
        return
    seeds = [sct.scaled(torch.randn(o.shape)) for o in outs]
    want = torch.autograd.grad(
        outs, inputs, [s.dequantize() for s in seeds], allow_unused=True, retain_graph=True
    )
    got = torch.autograd.grad(outs, inputs, seeds, allow_unused=True)
    for x, y in zip(got, want, strict=True):
        if y is not None:
            assert_same(x, y)


def compiled(sample: Sample, differentiable: bool) -> bool:
    """Check forward and backward in one graph. Return False if torch cannot do that to `call`."""

    def build() -> Callable[[Any], Any]:
        torch.compiler.reset()
        run = torch.compile(
            lambda args, kwargs: sample.call(*args, **kwargs), fullgraph=True, backend="aot_eager"
        )

        def seeded(arguments: tuple[Any, Any]) -> Any:
            torch.manual_seed(1)
            return run(*arguments)

        return seeded

    try:
        build()(sample.plain)
    except Exception:  # Dynamo may refuse it for any reason.
        return False
    assert_same(build()(sample.scaled), sample.run(sample.plain))
    if differentiable:
        backward(sample, build())
    return True


def _differentiable(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.requires_grad]


def assert_same(got: Any, want: Any) -> None:
    """Compare values with torch's. Compare all other results by type and shape."""
    for x, y in zip(tree_leaves(got), tree_leaves(want), strict=True):
        if not isinstance(y, Tensor):
            assert type(x) is type(y)
            continue
        x = x.detach().dequantize() if isinstance(x, sct.ScaledTensor) else x.detach()
        assert x.shape == y.shape
        if y.dtype.is_floating_point:
            torch.testing.assert_close(x.double(), y.detach().double(), **TOLERANCE)
        else:
            assert torch.equal(x, y)
