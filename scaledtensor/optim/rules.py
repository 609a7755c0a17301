"""Learning-rate rules of u-muP: by what a parameter's learning rate is multiplied.

A unit-scaled weight has entries of variance 1, and the function it computes has the factor that
the usual initialisation would have: fan_in^-1/2 in a hidden layer, 1/fan_in in the readout. What an
optimizer does to the function is the change of the entries times that factor, and u-muP asks that
it be the same at every width and depth. So a rule depends on the size of an optimizer's updates.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from scaledtensor.errors import MupError
from scaledtensor.mup import fan_in, tags

__all__ = [
    "LRScale",
    "lr_scale_for_depth",
    "lr_scale_func_adam",
    "lr_scale_func_muon",
    "lr_scale_func_sgd",
    "lr_scale_func_soap",
    "lr_scale_func_spectral",
]

LRScale = Callable[[Any], float]
"""Takes a tagged parameter, returns what its learning rate is multiplied by."""


def lr_scale_for_depth(parameter: Any) -> float:
    """depth^-1/2 for a parameter in a residual stack of that many layers, 1 outside of one.

    Source: u-muP (Blake et al., arXiv 2407.17465), after depth-muP (Yang et al., arXiv 2310.02244).

    Raises:
        MupError: the parameter has no tags.
    """
    depth = tags(parameter).mup_scaling_depth
    return 1.0 if depth is None else 1 / math.sqrt(depth)


def lr_scale_func_adam(parameter: Any) -> float:
    """The rule for optimizers whose updates have entries of size 1, as Adam, AdamW and Lion do.

    fan_in^-1/2 for a "weight", 1 for the rest, times the factor for depth. Source: u-muP.

    Raises:
        MupError: the parameter has no tags.
    """
    hidden = tags(parameter).mup_type == "weight"
    width = 1 / math.sqrt(fan_in(parameter)) if hidden else 1.0
    return lr_scale_for_depth(parameter) * width


def lr_scale_func_sgd(readout_constraint: str | None) -> LRScale:
    """The rule for SGD, whose updates are as large as the gradients.

    Args:
        readout_constraint: the `constraint` of the model's `LinearReadout`. With None gradients
            have unit scale, and Adam's rule holds. With "to_output_scale" every gradient below the
            readout has its factor of 1/width, and every rate makes up for it: weights get
            fan_in^1/2 and vectors their length, times the factor for depth.

    Raises:
        MupError: another constraint; here at once, and in the rule for a parameter without tags.
    """
    if readout_constraint is None:
        return lr_scale_func_adam
    if readout_constraint == "to_output_scale":
        return _sgd_to_output_scale
    raise MupError(
        'SGD has rules for readout_constraint=None and "to_output_scale"; '
        f"got {readout_constraint!r}"
    )


def _sgd_to_output_scale(parameter: Any) -> float:
    mup_type = tags(parameter).mup_type
    width = 1.0
    if mup_type == "weight":
        width = math.sqrt(fan_in(parameter))
    elif mup_type in ("bias", "norm"):
        width = float(parameter.numel())
    return lr_scale_for_depth(parameter) * width


def lr_scale_func_spectral(norm: Callable[[int, int], float]) -> LRScale:
    """The rule for optimizers that are known by the spectral norm of their updates.

    A layer learns features at every width if its weight matrix and the change of it have spectral
    norms of the order of (out / in)^1/2 (Yang et al., "A spectral condition for feature learning",
    arXiv 2310.17813). The change of the function is lr * update * in^-1/2 in a hidden layer, and
    lr * update / in in the readout. With an update of spectral norm u(out, in) this gives

        hidden: lr = out^1/2 / u           readout: lr = (in * out)^1/2 / u

    and Adam's rule is the case of aligned signs, u = (in * out)^1/2. Vectors get Adam's rule.

    Args:
        norm: u(out, in).

    Raises:
        MupError: in the rule, for a parameter without tags.
    """
    return partial(_spectral, norm)


def _spectral(norm: Callable[[int, int], float], parameter: Any) -> float:
    mup_type = tags(parameter).mup_type
    if mup_type in ("bias", "norm"):
        return lr_scale_func_adam(parameter)
    inputs = fan_in(parameter)
    outputs = max(parameter.numel() // inputs, 1)
    wanted = outputs if mup_type == "weight" else inputs * outputs
    return lr_scale_for_depth(parameter) * math.sqrt(wanted) / norm(outputs, inputs)


def lr_scale_func_muon(adjust_lr_fn: str | None = None) -> LRScale:
    """The rule for `torch.optim.Muon`, whose updates are orthogonal matrices.

    All singular values of such an update are 1 (Bernstein and Newhouse, "Old optimizer, new norm",
    arXiv 2409.20325), and torch multiplies it by a factor of the shape: max(1, out / in)^1/2 for
    "original" and 0.2 max(out, in)^1/2 for "match_rms_adamw". The rule is that of
    `lr_scale_func_spectral` for the product, so a hidden layer gets min(out, in)^1/2 with
    "original", and the two choices train alike.

    Muon is for matrices between hidden layers; give embeddings and vectors to Adam.

    Args:
        adjust_lr_fn: as of `torch.optim.Muon`; None is "original".

    Raises:
        MupError: another `adjust_lr_fn`; here at once, and in the rule for a parameter that is no
            matrix or has no tags.
    """
    if adjust_lr_fn not in _MUON_NORMS:
        raise MupError(
            f'adjust_lr_fn is None, "original" or "match_rms_adamw"; got {adjust_lr_fn!r}'
        )
    return partial(_muon, _MUON_NORMS[adjust_lr_fn])


def lr_scale_func_soap(parameter: Any) -> float:
    """The rule for optimizers that run Adam in the eigenbasis of the gradients, as SOAP does.

    Adam's updates have entries of size 1 whose signs follow the few directions of the gradient, so
    their spectral norm is of the order of (in * out)^1/2. In the eigenbasis these directions are
    few of the entries (Vyas et al., arXiv 2409.11321), and the others, of size 1 too, are noise:
    the spectral norm is that of a Gaussian matrix, in^1/2 + out^1/2. By `lr_scale_func_spectral` a
    hidden layer gets out^1/2 / (in^1/2 + out^1/2), which between layers of one width does not
    depend on it. Vectors, which SOAP leaves to Adam, get Adam's rule. Derived here, and measured:
    in a test both norms grow with the width as said.

    Raises:
        MupError: the parameter has no tags.
    """
    return _spectral(_gaussian, parameter)


def _gaussian(outputs: int, inputs: int) -> float:
    return math.sqrt(outputs) + math.sqrt(inputs)


def _muon(norm: Callable[[int, int], float], parameter: Any) -> float:
    _check_matrix(parameter)
    return _spectral(norm, parameter)


def _check_matrix(parameter: torch.Tensor) -> None:
    if parameter.dim() != 2:
        raise MupError(
            f"Muon is for matrices; got a parameter of shape {tuple(parameter.shape)}. "
            "Give the others to Adam"
        )


def _muon_original(outputs: int, inputs: int) -> float:
    return math.sqrt(max(1, outputs / inputs))


def _muon_match_rms_adamw(outputs: int, inputs: int) -> float:
    return 0.2 * math.sqrt(max(outputs, inputs))


_MUON_NORMS: dict[str | None, Callable[[int, int], float]] = {
    None: _muon_original,
    "original": _muon_original,
    "match_rms_adamw": _muon_match_rms_adamw,
}
