"""Linear layers and the embedding."""

from typing import Any

from torch import Tensor, nn

import scaledtensor.functional as U
from scaledtensor.functional.products import check_options
from scaledtensor.functional.scaling import Constraint
from scaledtensor.mup import MupType
from scaledtensor.nn.common import Scaled, Weighted, tag_own

__all__ = ["Embedding", "Linear", "LinearReadout"]


class Linear(Weighted, nn.Linear):
    """`functional.linear` with a weight of unit variance, (..., in_features) to
    (..., out_features).

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: whether to add a bias, which starts at zero. The default is False.
        device: device of the parameters.
        dtype: dtype of the parameters.
        constraint: see `functional.linear`.
        weight_mup_type: the weight's tag.

    Raises:
        MupError: `weight_mup_type` is not one of the four types.
    """

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

    def forward(self, input: Tensor) -> Tensor:
        return U.linear(input, self.weight, self.bias, self.constraint)


class LinearReadout(Linear):
    """`functional.linear_readout`: the last layer of a model. Its output is 1 / sqrt(in_features)
    at initialisation. Otherwise same as `Linear`, with the tag "output", and without a constraint
    by default."""

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


class Embedding(Scaled, nn.Embedding):
    """`functional.embedding` with rows of unit variance. Takes the arguments of
    `torch.nn.Embedding`.

    Raises:
        OptionError: `max_norm` or `scale_grad_by_freq` is set.
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
