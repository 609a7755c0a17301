"""Linear layers and the embedding."""

from typing import Any

from torch import Tensor, nn

import scaledtensor.functional as U
from scaledtensor.functional.products import check_options
from scaledtensor.functional.scaling import Constraint
from scaledtensor.mup import MupType
from scaledtensor.nn.common import described, tag_own

__all__ = ["Embedding", "Linear", "LinearReadout"]


class Linear(nn.Linear):
    """`functional.linear` with a weight of unit variance, (..., in_features) to
    (..., out_features).

    Args:
        in_features: as of `torch.nn.Linear`, as those below.
        out_features: size of the last dimension of the output.
        bias: whether to add one; it starts at zero. The default is False.
        device: of the parameters.
        dtype: of the parameters.
        constraint: see `functional.linear`.
        weight_mup_type: the weight's tag.

    Raises:
        MupError: `weight_mup_type` is none of the four.
    """

    constraint: Constraint

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = "to_output_scale",
        weight_mup_type: MupType = "weight",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.constraint = constraint
        tag_own(self, weight_mup_type)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return U.linear(input, self.weight, self.bias, self.constraint)

    def extra_repr(self) -> str:
        return described(self, super().extra_repr(), "constraint")


class LinearReadout(Linear):
    """`functional.linear_readout`: the last layer of a model, whose output is 1 / sqrt(in_features)
    at initialisation. As `Linear`, tagged "output", and by default without a constraint."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = None,
        weight_mup_type: MupType = "output",
    ) -> None:
        super().__init__(
            in_features, out_features, bias, device, dtype, constraint, weight_mup_type
        )

    def forward(self, input: Tensor) -> Tensor:
        return U.linear_readout(input, self.weight, self.bias, self.constraint)


class Embedding(nn.Embedding):
    """`functional.embedding` with rows of unit variance. The arguments of `torch.nn.Embedding`.

    Raises:
        OptionError: `max_norm` or `scale_grad_by_freq`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: Any = None,
        constraint: Constraint = None,
    ) -> None:
        check_options(max_norm, scale_grad_by_freq)
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            _weight,
            _freeze,
            device,
            dtype,
        )
        self.constraint = constraint
        tag_own(self)

    def forward(self, input: Tensor) -> Tensor:
        return U.embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
            self.constraint,
        )

    def extra_repr(self) -> str:
        return described(self, super().extra_repr(), "constraint")
