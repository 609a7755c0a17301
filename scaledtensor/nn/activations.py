"""Activation functions, softmax and dropout as modules, with the settings of their functions.

`inplace=True` raises UnsupportedError.
"""

from torch import Tensor, nn

import scaledtensor.functional as U
from scaledtensor.functional.scaling import Constraint
from scaledtensor.nn.common import Scaled, refuse_inplace

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


class GELU(Scaled, nn.GELU):
    """`functional.gelu`."""

    _settings = ("mult", "constraint")

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


class SiLU(Scaled, nn.SiLU):
    """`functional.silu`."""

    _settings = ("mult", "constraint")

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


class ReLU(Scaled, nn.ReLU):
    """`functional.relu`."""

    def __init__(self, inplace: bool = False, constraint: Constraint = "to_output_scale") -> None:
        super().__init__()
        refuse_inplace(self, inplace)
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        return U.relu(input, constraint=self.constraint)


class LeakyReLU(Scaled, nn.LeakyReLU):
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


class Tanh(Scaled, nn.Tanh):
    """`functional.tanh`."""

    _settings = ("mult", "constraint")

    def __init__(self, mult: float = 1.0, constraint: Constraint = "to_output_scale") -> None:
        super().__init__()
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        return U.tanh(input, self.mult, self.constraint)


class Sigmoid(Scaled, nn.Sigmoid):
    """`functional.sigmoid`."""

    _settings = ("mult", "constraint")

    def __init__(self, mult: float = 1.0, constraint: Constraint = "to_output_scale") -> None:
        super().__init__()
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        return U.sigmoid(input, self.mult, self.constraint)


class Softmax(Scaled, nn.Softmax):
    """`functional.softmax` over `dim`."""

    _settings = ("mult", "constraint")

    dim: int

    def __init__(
        self, dim: int, mult: float = 1.0, constraint: Constraint = "to_output_scale"
    ) -> None:
        super().__init__(dim)
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        return U.softmax(input, self.dim, mult=self.mult, constraint=self.constraint)


class LogSoftmax(Scaled, nn.LogSoftmax):
    """`functional.log_softmax` over `dim`."""

    _settings = ("mult", "constraint")

    dim: int

    def __init__(
        self, dim: int, mult: float = 1.0, constraint: Constraint = "to_output_scale"
    ) -> None:
        super().__init__(dim)
        self.mult = mult
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        return U.log_softmax(input, self.dim, mult=self.mult, constraint=self.constraint)


class Dropout(nn.Dropout):
    """`functional.dropout`. In evaluation it is the identity."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__(p)
        refuse_inplace(self, inplace)

    def forward(self, input: Tensor) -> Tensor:
        return U.dropout(input, self.p, self.training)
