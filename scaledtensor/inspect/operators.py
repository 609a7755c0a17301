"""Records the operators that run in each module, for `report`: a row for each, with its costs.

There are two recorders, since their subjects differ. This one is told of ATen operators, below
autograd, forward and backward. It adds up FLOPs, bytes and the losses of casts, and keeps no
tensor. `scaledtensor.inspect.recorder` is told of functions of torch, above autograd. It makes a
graph of the tensors of one call, with the numbers of each. The two share the rest: the module that
runs (`places.Places`), what a backward pass belongs to and how it starts (`places.Origins`,
`passes`), and the numbers of a tensor (`metrics.measure`).

The guard of `Unit` and `statistics` read single tensors, in any step. They share the definitions of
these numbers (`scaledtensor.scales.measure`) and record no calls.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from scaledtensor.formats import E4M3FN
from scaledtensor.inspect.metrics import is_readable, measure
from scaledtensor.inspect.rows import Ran, Row
from scaledtensor.ops.algebra import elements
from scaledtensor.ops.registry import is_missing, rule_of
from scaledtensor.recipes.casts import parsed_gemms
from scaledtensor.tensors import verbs
from scaledtensor.tensors.coded import CodedTensor
from scaledtensor.tensors.tensor import ScaledTensor, is_parameter

__all__ = ["OperatorRecorder"]

#: Operators that cast an operand of products under a scale that fills the format.
FILLING = {verbs.quantize, verbs.quantize_under}
#: All operators that cast an operand of products.
CASTS = {verbs.to_format, *FILLING}


class OperatorRecorder:
    """Adds up the operators of one run of a model, by module, operator, pass and operand."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Any, ...], Row] = {}

    @property
    def rows(self) -> list[Row]:
        """The rows, in the order in which their operators first ran."""
        return list(self._rows.values())

    def operator(
        self, op: Any, args: tuple[Any, ...], result: Any, module: str, backward: bool
    ) -> None:
        """Take in an operator that has run in a module, on ScaledTensors or on plain tensors."""
        rule = rule_of(op)
        operands = list(_floats(args))
        scaled = any(isinstance(x, ScaledTensor) for x in operands)
        if scaled and rule is None and not is_missing(op):
            return  # a composite: its parts came before it
        results = list(_floats(result))
        if not scaled and not operands and not results:
            return
        family = rule.family if scaled and rule is not None else ""
        ran: Ran = _ran(op, args, operands) if family else "fallback" if scaled else "plain"
        cast_to = results[0] if op in CASTS and results and _is_narrow(results[0]) else None
        operand = "" if cast_to is None else _role(args[0], backward)
        key = (module, str(op), backward, ran, operand)
        row = self._rows.setdefault(key, Row(*key[:4], rule=family, operand=operand))
        row.hits += 1
        count = _flops(op, args, result)
        row.flops += count
        if not count and not _is_view(op):
            moved, narrow = _traffic([*operands, *results])
            row.bytes += moved
            row.narrow_bytes += narrow
        if isinstance(cast_to, ScaledTensor):
            _take_cast(row, args[0], cast_to)
        if op not in FILLING:  # the scale of such a cast fills the format, and keeps no RMS
            for x in results:
                if isinstance(x, ScaledTensor) and x.rms and is_readable(x):
                    _take_range(row, x)


# --- how an operator ran ---------------------------------------------------------------------


def _ran(op: Any, args: tuple[Any, ...], operands: list[Tensor]) -> Ran:
    """Return "recipe" if the recipe cast all operands of an operator with a rule, else "rule"."""
    if op in (verbs.product, verbs.product_gradient):  # which cast for themselves
        gemm = args[6] if op is verbs.product_gradient else "forward"
        how = getattr(parsed_gemms(args[-1]), gemm)
        return "rule" if how.left is None or how.right is None else "recipe"
    return "recipe" if operands and all(map(_is_cast, operands)) else "rule"


def _is_cast(x: Tensor) -> bool:
    """Whether a tensor is in a format that its recipe casts operands of products to."""
    if _is_narrow(x):
        return True
    if not isinstance(x, ScaledTensor) or x.recipe is None or x.recipe.gemms.once is None:
        return False
    return any(cast.format == x.format for cast in x.recipe.gemms.once)


def _role(x: Any, backward: bool) -> str:
    if is_parameter(x):
        return "weight"
    return "gradient" if backward else "input"


# --- the numbers of its tensors --------------------------------------------------------------


def _take_cast(row: Row, before: Tensor, after: ScaledTensor) -> None:
    """Add the losses of a cast to 8 bits, and the losses that other casts would have had."""
    fmt, own = after.format, float(before.scale) if isinstance(before, ScaledTensor) else 1.0
    now = measure(before, fmt, float(after.scale))
    if not now.numel:
        return
    filling = now.abs_max * float(after.scale) / fmt.max
    by_amax = measure(before, fmt, filling) if filling else now
    carried = measure(before, fmt, own)
    narrow = measure(before, E4M3FN, own)
    row.format = fmt.name
    row.add_cast(
        now.numel,
        now.abs_max / fmt.max,
        saturated=now.saturated,
        underflowed=now.underflowed,
        amax_underflowed=by_amax.underflowed,
        carried_saturated=carried.saturated,
        carried_underflowed=carried.underflowed,
        e4m3fn_saturated=narrow.saturated,
        e4m3fn_underflowed=narrow.underflowed,
    )


def _take_range(row: Row, x: ScaledTensor) -> None:
    plain = x.widened()
    rms = measure(elements(plain).detach(), plain.format).rms
    if rms:
        row.add_range(rms)


# --- its costs: FLOPs of products, bytes of all other operators ------------------------------

aten = torch.ops.aten
_Formula = Callable[[tuple[Any, ...], Any], int]


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


#: (arguments, result) -> FLOPs, for products that torch's registry does not have, by name.
_FORMULAS: dict[str, _Formula] = {
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


def _flops(op: Any, args: tuple[Any, ...], result: Any) -> int:
    """2 for each multiplication of a product; 0 for any other operator."""
    own = _FORMULAS.get(op._schema.name)
    if own is not None:
        return own(args, result)
    known = flop_registry.get(op.overloadpacket)
    return 0 if known is None else int(known(*args, out_val=result))


#: Operators that return their argument. They act on its gradient, or on its scale and RMS.
_IDENTITIES = {
    *(verbs.gradient_to_format, verbs.gradient_quantize, verbs.gradient_delayed),
    *(verbs.drop, verbs.expect, verbs.fit),
}


def _is_view(op: Any) -> bool:
    """Whether the results have the memory of the arguments."""
    if op in _IDENTITIES:
        return True
    results = op._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in results)


def _floats(values: Any) -> Iterator[Tensor]:
    """The tensors of floats in a nest of values."""
    return (x for x in tree_iter(values) if isinstance(x, Tensor) and x.dtype.is_floating_point)


def _is_narrow(x: Tensor) -> bool:
    """Whether the elements have 8 bits or fewer, as the operands that a recipe casts."""
    return _bits(x) <= 8


def _traffic(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """(bytes of the elements, bytes of the elements that have 8 bits or fewer)."""
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
