"""What an operator costs: floating-point operations of products, bytes of everything else."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from scaledtensor import verbs
from scaledtensor.coded import CodedTensor
from scaledtensor.tensor import ScaledTensor

__all__ = ["floats", "flops", "is_narrow", "is_view", "traffic"]

aten = torch.ops.aten

Formula = Callable[[tuple[Any, ...], Any], int]


def _attention_backward(args: tuple[Any, ...], result: Any) -> int:
    return int(flop_registry[aten._scaled_dot_product_flash_attention_backward](*args[:4]))


def _attention(args: tuple[Any, ...], result: Any) -> int:
    return int(flop_registry[aten._scaled_dot_product_flash_attention](*args[:3]))


def _matvec(args: tuple[Any, ...], result: Any) -> int:
    return 2 * int(args[0].numel())


def _grouped(args: tuple[Any, ...], result: Any) -> int:
    a, b = args[:2]
    return 2 * int(a.numel()) * int(b.shape[-1])


def _gradient(args: tuple[Any, ...], result: Any) -> int:
    gradient, gemm = args[0], args[6]
    return 2 * int(result.numel()) * int(gradient.shape[-1 if gemm == "dgrad" else -2])


#: Formulas of what torch's registry has not, by the name of the operator.
_FORMULAS: dict[str, Formula] = {
    "aten::mv": _matvec,
    "aten::dot": _matvec,
    "aten::vdot": _matvec,
    "aten::addmv": lambda args, result: 2 * int(args[1].numel()),
    "aten::addr": lambda args, result: 2 * int(result.numel()),
    "aten::addbmm": lambda args, result: 2 * int(args[1].numel()) * int(args[2].shape[-1]),
    "aten::_grouped_mm": _grouped,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "scaledtensor::saved_scaled_dot_product_flash_attention_for_cpu": _attention,
    verbs.product._schema.name: lambda args, result: (
        2 * int(result.numel()) * int(args[0].shape[-1])
    ),
    verbs.product_gradient._schema.name: _gradient,
}


def flops(op: Any, args: tuple[Any, ...], result: Any) -> int:
    """Of a product, 2 for each of its multiplications; of anything else, 0."""
    own = _FORMULAS.get(op._schema.name)
    if own is not None:
        return own(args, result)
    known = flop_registry.get(op.overloadpacket)
    return 0 if known is None else int(known(*args, out_val=result))


#: They give back what they are given, for the sake of its gradient or of what is known of it.
_IDENTITIES = {
    *(verbs.gradient_to_format, verbs.gradient_quantize, verbs.gradient_delayed),
    *(verbs.drop, verbs.expect),
}


def is_view(op: Any) -> bool:
    """Whether the results are the arguments' own memory, seen in another way."""
    if op in _IDENTITIES:
        return True
    results = op._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in results)


def floats(values: Any) -> Iterator[Tensor]:
    """The tensors of floats in a nest of values."""
    return (x for x in tree_iter(values) if isinstance(x, Tensor) and x.dtype.is_floating_point)


def is_narrow(x: Tensor) -> bool:
    """Whether the elements have 8 bits or fewer, as what a recipe casts for products."""
    return _bits(x) <= 8


def traffic(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """(bytes of their elements, the part of those in elements of 8 bits or fewer)."""
    total = narrow = 0
    for x in tensors:
        bits = _bits(x)
        size = math.ceil(x.numel() * bits / 8)
        total += size
        narrow += size if bits <= 8 else 0
    return total, narrow


def _bits(x: Tensor) -> int:
    if isinstance(x, CodedTensor):
        return x.format.bits
    held = x.qdata if isinstance(x, ScaledTensor) else x
    return 8 * held.dtype.itemsize
