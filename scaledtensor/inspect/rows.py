"""What is known of one operator in one module: a row of a report."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["HELD", "LIMITS", "PROBLEMS", "Ran", "Row"]

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
