"""Recipes with a scale for each block of elements: DeepSeek-V3, OCP MX and NVFP4. Blocks lie along
the summed dimension, so each product casts its operands separately."""

from dataclasses import dataclass
from typing import ClassVar

from scaledtensor.errors import RecipeError
from scaledtensor.formats import BF16, E2M1FN, E2M3FN, E3M2FN, E4M3FN, E5M2, FP32, Format
from scaledtensor.formats.blocks import MODES
from scaledtensor.recipes.base import Recipe, register
from scaledtensor.recipes.casts import (
    HADAMARD,
    Amax,
    Cast,
    Microscale,
    TwoLevel,
    check_bool,
    check_exponent,
)

__all__ = ["MXFP4", "MXFP6", "MXFP8", "NVFP4", "Blockwise"]


@dataclass(frozen=True)
class _Blocks(Recipe):
    """The base of all recipes with blocks."""

    padding: bool = True
    """Whether the last block of a dimension may be shorter; zeros fill it. False refuses weights
    with a dimension that is not a multiple of the block, which hardware does not take."""

    def __post_init__(self) -> None:
        check_bool(self, "padding")
        super().__post_init__()

    def check_shape(self, shape: tuple[int, ...], name: str) -> None:
        along = {
            n
            for gemm in (self.gemms.forward, self.gemms.dgrad)
            if gemm.right is not None
            for n in gemm.right.block
        }
        ragged = [n for n in shape for size in along if size and n % size]
        if not self.padding and len(shape) > 1 and ragged:
            raise RecipeError(
                f"{name} is of shape {shape}, and {ragged[0]} is no multiple of the blocks of "
                f"{type(self).__name__}: allow padding=True, or leave it out by overrides or "
                "filter_fn"
            )


@register
@dataclass(frozen=True)
class Blockwise(_Blocks):
    """Inputs and gradients have a scale for each `block` elements that are summed, weights for each
    square of `block` by `block`.

    scale = amax of the block / max(format), a float32, or a power of two. DeepSeek-V3 (arXiv
    2412.19437), section 3.3.2, has blocks of 128, E4M3 for all operands, and powers of two for the
    inputs of some layers.
    """

    name: ClassVar[str] = "blockwise"

    forward: Format = E4M3FN
    gradient: Format = E4M3FN
    activation: Format = BF16
    master: Format = FP32
    block: int = 128
    """Number of summed elements that share a scale."""
    power_of_two: bool = False
    """Whether a scale is the least power of two that is not below amax / max(format)."""

    def __post_init__(self) -> None:
        check_exponent(self, "block", range(1, 1 << 16))
        super().__post_init__()

    def cast(self, role: str, gemm: str) -> Cast:
        across = self.block if role == "weight" else 1
        block = (across, self.block)
        return Cast(self.of_role(role), Amax(self.power_of_two), block, self.rounding_of(role))


@dataclass(frozen=True)
class _Microscaled(_Blocks):
    """The base of the MX recipes."""

    forward: Format = E4M3FN
    gradient: Format = E4M3FN
    activation: Format = BF16
    master: Format = FP32
    mode: str = "rceil"
    """How scales round to a power of two; see `formats.quantize_blocks`. "floor" is the mode of the
    specification. "rceil", under which nothing saturates, has the smallest errors."""
    block: int = 32
    """Number of summed elements that share a scale."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise RecipeError(
                f"{type(self).__name__}.mode is one of {', '.join(map(repr, MODES))}; got "
                f"{self.mode!r}"
            )
        check_exponent(self, "block", range(1, 1 << 16))
        super().__post_init__()
        for role in ("forward", "weight", "gradient"):
            fmt = getattr(self, role)
            if fmt is not None and fmt not in self.elements():
                raise RecipeError(
                    f"{type(self).__name__}.{role} is one of "
                    f"{', '.join(f.name for f in self.elements())}; got {fmt.name}"
                )

    @classmethod
    def elements(cls) -> tuple[Format, ...]:
        raise NotImplementedError

    def cast(self, role: str, gemm: str) -> Cast:
        block = (1, self.block)
        return Cast(self.of_role(role), Microscale(self.mode), block, self.rounding_of(role))


@register
@dataclass(frozen=True)
class MXFP8(_Microscaled):
    """E4M3FN (gradients may be E5M2) in blocks of 32 summed elements, with a power of two as scale.

    scale = 2^(floor(log2(amax)) - emax + carry), where `mode` decides the carry, 0 or 1
    (`formats.quantize_blocks`). OCP Microscaling Formats 1.0; Rouhani et al., arXiv 2310.10537.
    """

    name: ClassVar[str] = "mxfp8"

    @classmethod
    def elements(cls) -> tuple[Format, ...]:
        return E4M3FN, E5M2


@register
@dataclass(frozen=True)
class MXFP6(_Microscaled):
    """Same as `MXFP8`, in E2M3FN. Gradients are in E3M2FN, which has more range."""

    name: ClassVar[str] = "mxfp6"

    forward: Format = E2M3FN
    gradient: Format = E3M2FN

    @classmethod
    def elements(cls) -> tuple[Format, ...]:
        return E2M3FN, E3M2FN


@register
@dataclass(frozen=True)
class MXFP4(_Microscaled):
    """Same as `MXFP8`, in E2M1FN. Gradients are rounded stochastically."""

    name: ClassVar[str] = "mxfp4"

    forward: Format = E2M1FN
    gradient: Format = E2M1FN
    gradient_rounding: str = "stochastic"

    @classmethod
    def elements(cls) -> tuple[Format, ...]:
        return (E2M1FN,)


@register
@dataclass(frozen=True)
class NVFP4(_Blocks):
    """E2M1FN in blocks of 16 summed elements (weights: 16x16), under scales of two levels.

    scale = E4M3(amax of the block / (6 t)) t, with t = amax of the tensor / (6 448). Gradients are
    rounded stochastically. A random Hadamard transform of 16 elements first mixes the operands of
    wgrad. NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149).
    """

    name: ClassVar[str] = "nvfp4"

    forward: Format = E2M1FN
    gradient: Format = E2M1FN
    activation: Format = BF16
    master: Format = FP32
    gradient_rounding: str = "stochastic"
    random_hadamard: bool = True
    """Whether a random Hadamard transform mixes the operands of wgrad."""
    square_weights: bool = True
    """Whether 16x16 elements of a weight share a scale, so that the forward product and dgrad read
    the same values."""

    def __post_init__(self) -> None:
        check_bool(self, "random_hadamard")
        check_bool(self, "square_weights")
        super().__post_init__()

    @property
    def hadamard(self) -> tuple[str, ...]:
        return ("wgrad",) if self.random_hadamard else ()

    def cast(self, role: str, gemm: str) -> Cast:
        across = HADAMARD if role == "weight" and self.square_weights else 1
        return Cast(self.of_role(role), TwoLevel(), (across, HADAMARD), self.rounding_of(role))
