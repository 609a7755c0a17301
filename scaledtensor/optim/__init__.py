"""torch.optim's optimizers and Lion, with u-muP's learning rates, which the tags of parameters
choose, and with states and masters of few bits."""

from scaledtensor.optim.groups import (
    lr_scale_for_depth,
    lr_scale_func_adam,
    lr_scale_func_muon,
    lr_scale_func_sgd,
    lr_scale_func_soap,
    lr_scale_func_spectral,
    scaled_parameters,
)
from scaledtensor.optim.optimizers import SGD, Adam, AdamW, Lion, Muon

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Lion",
    "Muon",
    "lr_scale_for_depth",
    "lr_scale_func_adam",
    "lr_scale_func_muon",
    "lr_scale_func_sgd",
    "lr_scale_func_soap",
    "lr_scale_func_spectral",
    "scaled_parameters",
]
