"""The class of converted linear layers, and configs of their products: torchao's
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
    """Always False: no product has an FP8 result."""
    pad_inner_dim: bool = False


@dataclass(frozen=True)
class LinearMMConfig:
    """How the three products of a layer run."""

    output: ScaledMMConfig = ScaledMMConfig(use_fast_accum=True)
    grad_input: ScaledMMConfig = ScaledMMConfig()
    grad_weight: ScaledMMConfig = ScaledMMConfig()


class Float8Linear(nn.Linear):
    """An `nn.Linear` after `convert_to_float8_training`: the same module, with its hooks, buffers
    and forward, and with this class. The recipe of its parameters determines its products.

    Attributes:
        config: the `Float8LinearConfig` of the conversion.
        linear_mm_config: the parts of `config` that concern products.
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
        """Convert one layer in place with `convert_to_float8_training`.

        Raises:
            ModelError: the class of `mod` is not `nn.Linear`.
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
