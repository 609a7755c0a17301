"""The class of converted linear layers, and what their products are told: torchao's
`float8.float8_linear`."""

from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from scaledtensor.compat.torchao.float8.config import Float8GemmConfig, Float8LinearConfig
from scaledtensor.errors import ModelError

__all__ = ["Float8Linear", "LinearMMConfig", "ScaledMMConfig"]


@dataclass(frozen=True)
class ScaledMMConfig:
    """How one product of a layer runs."""

    emulate: bool = False
    use_fast_accum: bool = False
    fp8_output: bool = False
    """False: no product has an FP8 result."""
    pad_inner_dim: bool = False


@dataclass(frozen=True)
class LinearMMConfig:
    """How the three products of a layer run."""

    output: ScaledMMConfig = ScaledMMConfig(use_fast_accum=True)
    grad_input: ScaledMMConfig = ScaledMMConfig()
    grad_weight: ScaledMMConfig = ScaledMMConfig()


class Float8Linear(nn.Linear):
    """What `convert_to_float8_training` makes of an `nn.Linear`: the same module with its hooks,
    buffers and forward, of this class. Its products are those of its parameters' recipe.

    Attributes:
        config: the `Float8LinearConfig` that it was converted with.
        linear_mm_config: the same, by product.
    """

    config: Float8LinearConfig

    @property
    def linear_mm_config(self) -> LinearMMConfig:
        def of(gemm: Float8GemmConfig) -> ScaledMMConfig:
            return ScaledMMConfig(
                self.config.emulate, gemm.use_fast_accum, False, self.config.pad_inner_dim
            )

        return LinearMMConfig(
            of(self.config.gemm_config_output),
            of(self.config.gemm_config_grad_input),
            of(self.config.gemm_config_grad_weight),
        )

    @classmethod
    def from_float(cls, mod: nn.Linear, config: Float8LinearConfig | None = None) -> Self:
        """`convert_to_float8_training` of one layer, which it converts in place.

        Raises:
            ModelError: `mod` is no `nn.Linear`, or one of a class with a forward of its own.
        """
        from scaledtensor.compat.torchao.float8.float8_linear_utils import (
            convert_to_float8_training,
        )

        if type(mod) is not nn.Linear:
            raise ModelError(
                f"Float8Linear.from_float takes an nn.Linear; got {type(mod).__name__}. "
                "convert_to_float8_training converts a module with linear layers in it"
            )
        made: Any = convert_to_float8_training(mod, config=config)
        return made  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, cast_configs={self.config.short_str()}"
