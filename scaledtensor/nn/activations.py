"""Activation functions, softmax and dropout as modules. They take the settings of their functions.

`inplace=True` raises UnsupportedError.
"""

from torch import Tensor, nn

import scaledtensor.functional as U
from scaledtensor.functional.scaling import Constraint
from scaledtensor.nn.common import described, refuse_inplace

__all__ = [
    "GELU",
    "Dropout",
    "LeakyReLU",
    "LogSoftmax",
    "ReLU",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Tanh",
]


class GELU(nn.GELU):
    """`functional.gelu`."""

    def __init__(
        self,
        mult: float = 1.0,
        constraint: Constraint = "to_output_scale",
        approximate: str = "none",
    ) -> None:
        super().__init__(approximate)
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        return U.gelu(input, self.mult, self.constraint, self.approximate)

    def extra_repr(self) -> str:
        return described(self, super().extra_repr(), "mult", "constraint")


class SiLU(nn.SiLU):
    """`functional.silu`."""

    def __init__(
        self,
        mult: float = 1.0,
        constraint: Constraint = "to_output_scale",
        inplace: bool = False,
    ) -> None:
        super().__init__()
        refuse_inplace(self, inplace)
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        return U.silu(input, self.mult, self.constraint)

    def extra_repr(self) -> str:
        return described(self, super().extra_repr(), "mult", "constraint")


class ReLU(nn.ReLU):
    """`functional.relu`."""

    def __init__(self, inplace: bool = False, constraint: Constraint = "to_output_scale") -> None:
        super().__init__()
        refuse_inplace(self, inplace)
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        return U.relu(input, constraint=self.constraint)

    def extra_repr(self) -> str:
        return described(self, super().extra_repr(), "constraint")


class LeakyReLU(nn.LeakyReLU):
    """`functional.leaky_relu`."""

    def __init__(
        self,
        negative_slope: float = 0.01,
        inplace: bool = False,
        constraint: Constraint = "to_output_scale",
    ) -> None:
        super().__init__(negative_slope)
        refuse_inplace(self, inplace)
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        return U.leaky_relu(input, self.negative_slope, constraint=self.constraint)

    def extra_repr(self) -> str:
        return described(self, super().extra_repr(), "constraint")


class Tanh(nn.Tanh):
    """`functional.tanh`."""

    def __init__(self, mult: float = 1.0, constraint: Constraint = "to_output_scale") -> None:
        super().__init__()
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        return U.tanh(input, self.mult, self.constraint)

    def extra_repr(self) -> str:
        return described(self, super().extra_repr(), "mult", "constraint")


class Sigmoid(nn.Sigmoid):
    """`functional.sigmoid`."""

    def __init__(self, mult: float = 1.0, constraint: Constraint = "to_output_scale") -> None:
        super().__init__()
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        return U.sigmoid(input, self.mult, self.constraint)

    def extra_repr(self) -> str:
        return described(self, super().extra_repr(), "mult", "constraint")


class Softmax(nn.Softmax):
    """`functional.softmax` over `dim`."""

    dim: int

    def __init__(
        self, dim: int, mult: float = 1.0, constraint: Constraint = "to_output_scale"
    ) -> None:
        super().__init__(dim)
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        return U.softmax(input, self.dim, mult=self.mult, constraint=self.constraint)

    def extra_repr(self) -> str:
        return described(self, super().extra_repr(), "mult", "constraint")


class LogSoftmax(nn.LogSoftmax):
    """`functional.log_softmax` over `dim`."""

    dim: int

    def __init__(
        self, dim: int, mult: float = 1.0, constraint: Constraint = "to_output_scale"
    ) -> None:
        super().__init__(dim)
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        return U.log_softmax(input, self.dim, mult=self.mult, constraint=self.constraint)

    def extra_repr(self) -> str:
        return described(self, super().extra_repr(), "mult", "constraint")


class Dropout(nn.Dropout):
    """`functional.dropout`, in evaluation the identity."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__(p)
        refuse_inplace(self, inplace)

    def forward(self, input: Tensor) -> Tensor:
        return U.dropout(input, self.p, self.training)
