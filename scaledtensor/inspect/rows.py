"""What is known of one operator in one module: a row of a report."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from scaledtensor.tensors import verbs
from scaledtensor.tensors.coded import CodedTensor
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = [
    "HELD",
    "LIMITS",
    "PROBLEMS",
    "Folded",
    "Ran",
    "Row",
    "floats",
    "flops",
    "fold",
    "is_narrow",
    "is_view",
    "traffic",
]


# What an operator costs: floating-point operations of products, bytes of everything else.
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


#: Where RMS(qdata) is held by the rules.
HELD = (0.5, 2.0)


#: Shares of the elements of a cast above which the loss is a problem. What underflows are the
#: smallest elements, whose squares hardly count.
LIMITS = {"saturated": 1e-4, "underflowed": 1e-2}


#: What can be wrong with a row, worst first.
PROBLEMS = {
    "saturated": "elements beyond the largest value of the format",
    "underflowed": "elements that are not zero and that the format rounds to zero",
    "fallback": "an operator without a rule, which runs in float32",
    "drifted": "an operand of products that is cast with an RMS(qdata) outside [1/2, 2]",
    "excluded": "a product with a weight that is left plain",
    "uncast": "a product whose operands the recipe casts elsewhere, and not here",
}


Ran = Literal["recipe", "rule", "fallback", "plain"]


"""How an operator ran: on operands that the recipe cast; by a rule on 16- or 32-bit elements; in
float32 for want of a rule; on plain tensors alone."""


@dataclass
class Row:
    """One operator in one module, forward or backward. Fields are built-in types only."""

    module: str
    op: str
    backward: bool
    ran: Ran
    rule: str = ""
    """The family that the rule is in (a module of scaledtensor.ops); empty where there is none."""
    operand: str = ""
    """Of a cast, what was cast: "input", "weight" or "gradient"."""
    format: str = ""
    """Of a cast to 8 bits or fewer, the name of the format."""
    hits: int = 0
    flops: int = 0
    """Multiplications and additions of products, as torch's FlopCounterMode counts them."""
    bytes: int = 0
    """Bytes of floats that operators other than products and views read and wrote."""
    narrow_bytes: int = 0
    """The part of `bytes` in elements of 8 bits or fewer."""
    low: float | None = None
    """The least RMS(qdata) of a result; None where no result was scaled, or all were zero."""
    high: float | None = None
    elements: int = 0
    """Elements that were cast to 8 bits, for the shares below."""
    saturated: float = 0.0
    """Share of the elements cast to 8 bits that were beyond the largest value."""
    underflowed: float = 0.0
    """Share of them that were not zero and became zero."""
    reach: float = 0.0
    """The largest magnitude that was cast over the largest value of the format."""
    amax_underflowed: float = 0.0
    """The share that would underflow if the tensor's amax were the largest value of the format;
    nothing saturates then."""
    carried_saturated: float = 0.0
    """The share that would saturate under the scale that the rules carry."""
    carried_underflowed: float = 0.0
    e4m3fn_saturated: float = 0.0
    """The share that would saturate as E4M3FN under the scale that the rules carry."""
    e4m3fn_underflowed: float = 0.0
    problem: str = ""
    """What is wrong with it, of `PROBLEMS`, separated by commas; empty where nothing is."""

    @property
    def in_range(self) -> bool:
        if self.low is None or self.high is None:
            return True
        return self.low >= HELD[0] and self.high <= HELD[1]

    @property
    def problems(self) -> list[str]:
        return self.problem.split(", ") if self.problem else []

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON has them."""
        return asdict(self)

    def add_range(self, rms: float) -> None:
        """Take in the RMS(qdata) of a result."""
        self.low = rms if self.low is None else min(self.low, rms)
        self.high = rms if self.high is None else max(self.high, rms)

    def add_cast(self, count: int, reach: float, **shares: float) -> None:
        """Take in a cast of `count` elements, by the shares of them that are fields here."""
        n = self.elements + count
        for name, share in shares.items():
            total = getattr(self, name) * self.elements + share * count
            setattr(self, name, total / max(n, 1))
        self.elements, self.reach = n, max(self.reach, reach)

    def judge(self, is_excluded: bool) -> None:
        """Fill in `problem`. `is_excluded` says that the module's own weight is plain."""
        self.problem = ", ".join(self._found(is_excluded))

    def _found(self, is_excluded: bool) -> Iterator[str]:
        # An amax scale is rounded: its largest element may stand an ulp beyond the format.
        if self.saturated > LIMITS["saturated"] and self.reach > 1.01:
            yield "saturated"
        if self.underflowed > LIMITS["underflowed"]:
            yield "underflowed"
        if self.ran == "fallback":
            yield "fallback"
        # Between products it loses nothing: BF16 has the exponents of FP32.
        if self.operand and not self.in_range:
            yield "drifted"
        if self.flops and self.ran in ("rule", "plain"):
            if is_excluded:
                yield "excluded"
            elif self.ran == "rule" and self.rule in ("matmul", "convolution"):
                yield "uncast"


# Repeated layers with the same rows, told once.
Part = str | tuple[int, ...]


"""A component of a module's name: a name, or the numbers of layers that are told as one."""


_SUMS = ("hits", "flops", "bytes", "narrow_bytes", "elements")


_MOST = (
    *("saturated", "underflowed", "reach", "amax_underflowed"),
    *("carried_saturated", "carried_underflowed", "e4m3fn_saturated", "e4m3fn_underflowed"),
)


@dataclass
class Folded:
    """Rows of layers that repeat, as one."""

    path: tuple[Part, ...]
    rows: list[Row]

    @property
    def module(self) -> str:
        """`blocks.0..11.mlp`, `blocks.{0,2,5}.mlp`, or the name itself where nothing is folded."""
        return ".".join(map(_spelled, self.path))

    @property
    def row(self) -> Row:
        """Sums of counts, the range of the RMS, and the largest of each share."""
        first = self.rows[0]
        found = {name: sum(getattr(r, name) for r in self.rows) for name in _SUMS}
        most = {name: max(getattr(r, name) for r in self.rows) for name in _MOST}
        lows = [r.low for r in self.rows if r.low is not None]
        highs = [r.high for r in self.rows if r.high is not None]
        ends = {"low": min(lows, default=None), "high": max(highs, default=None)}
        return replace(first, module=self.module, **found, **most, **ends)  # type: ignore[arg-type]


def fold(rows: Iterable[Row]) -> list[Folded]:
    """Rows in their order, those of numbered layers together where such layers have the same ones:
    the same operators by the same rules, as often, and with the same problems."""
    folded = [Folded(_path(r.module), [r]) for r in rows]
    depth = max((len(f.path) for f in folded), default=0)
    for i in reversed(range(depth)):  # experts in a layer, then the layers
        folded = _folded_at(folded, i)
    return folded


def _folded_at(folded: list[Folded], i: int) -> list[Folded]:
    """Layers that are told apart by component `i` of their names."""
    layers: dict[tuple[tuple[Part, ...], Part], list[Folded]] = defaultdict(list)
    for f in folded:
        if len(f.path) > i and isinstance(f.path[i], tuple):
            layers[f.path[:i], f.path[i]].append(f)
    alike: dict[object, list[list[Folded]]] = defaultdict(list)
    for (outside, _), own in layers.items():
        alike[outside, frozenset((f.path[i + 1 :], _signature(f)) for f in own)].append(own)
    merged: dict[int, Folded] = {}
    gone: set[int] = set()
    for groups in alike.values():
        twins = [{(f.path[i + 1 :], _signature(f)): f for f in own} for own in groups]
        for key, f in twins[0].items():
            same = [of[key] for of in twins]
            numbers = tuple(sorted(n for t in same for n in t.path[i]))
            path = (*f.path[:i], numbers, *f.path[i + 1 :])
            merged[id(f)] = Folded(path, [r for t in same for r in t.rows])  # type: ignore[arg-type]
            gone |= {id(t) for t in same[1:]}
    return [merged.get(id(f), f) for f in folded if id(f) not in gone]


def _signature(f: Folded) -> tuple[object, ...]:
    r = f.rows[0]
    return r.op, r.backward, r.ran, r.rule, r.operand, r.format, r.hits, r.problem


def _path(module: str) -> tuple[Part, ...]:
    if not module:
        return ()
    return tuple((int(p),) if p.isdecimal() else p for p in module.split("."))


def _spelled(part: Part) -> str:
    if isinstance(part, str):
        return part
    if len(part) == 1:
        return str(part[0])
    first, last = part[0], part[-1]
    if len(part) == last - first + 1:
        return f"{first}..{last}"
    return "{" + ",".join(map(str, part)) + "}"
