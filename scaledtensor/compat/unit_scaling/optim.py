"""`unit_scaling.optim`: see `scaledtensor.optim`, which has Muon and SOAP rules too."""

from scaledtensor.optim import (
    SGD,
    Adam,
    AdamW,
    lr_scale_for_depth,
    lr_scale_func_adam,
    lr_scale_func_sgd,
    scaled_parameters,
)

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "lr_scale_for_depth",
    "lr_scale_func_adam",
    "lr_scale_func_sgd",
    "scaled_parameters",
]
