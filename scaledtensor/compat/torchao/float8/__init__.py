"""The names of `torchao.float8` for training; see `scaledtensor.compat.torchao`.

`FP8Granularity`, a type for inference, is not here.
"""

from scaledtensor.compat.torchao.float8.config import (
    CastConfig,
    DelayedScalingConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
    ScalingType,
    e4m3_dtype,
    e5m2_dtype,
)
from scaledtensor.compat.torchao.float8.float8_linear import (
    Float8Linear,
    LinearMMConfig,
    ScaledMMConfig,
)
from scaledtensor.compat.torchao.float8.float8_linear_utils import (
    _auto_filter_for_recipe,
    convert_to_float8_training,
    linear_requires_sync,
    sync_float8_amax_and_scale_history,
)
from scaledtensor.compat.torchao.float8.fsdp_utils import precompute_float8_dynamic_scale_for_fsdp

__all__ = [
    "CastConfig",
    "DelayedScalingConfig",
    "Float8GemmConfig",
    "Float8Linear",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "LinearMMConfig",
    "ScaledMMConfig",
    "ScalingGranularity",
    "ScalingType",
    "_auto_filter_for_recipe",
    "convert_to_float8_training",
    "e4m3_dtype",
    "e5m2_dtype",
    "linear_requires_sync",
    "precompute_float8_dynamic_scale_for_fsdp",
    "sync_float8_amax_and_scale_history",
]
