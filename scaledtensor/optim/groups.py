"""Learning-rate rules of u-muP, and parameter groups with the learning rates of a rule.

A unit-scaled weight has entries of variance 1. The function that it computes has the factor that
the usual initialisation would have: fan_in^-1/2 in a hidden layer, and 1/fan_in in the readout. An
optimizer changes this function by the change of the entries times the factor. u-muP requires that
this change be the same at every width and depth. The rule for the learning rate therefore depends
on the size of an optimizer's updates.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from scaledtensor.errors import MupError
from scaledtensor.mup import fan_in, has_parameter_data, tags

__all__ = [
    "GroupRule",
    "LRScale",
    "groups_of",
    "lr_scale_for_depth",
    "lr_scale_func_adam",
    "lr_scale_func_muon",
    "lr_scale_func_sgd",
    "lr_scale_func_soap",
    "lr_scale_func_spectral",
    "scaled_parameters",
]


LRScale = Callable[[Any], float]
"""A rule: takes a tagged parameter, and returns the factor of its learning rate."""

Group = dict[str, Any]


def lr_scale_for_depth(parameter: Any) -> float:
    """Return depth^-1/2 for a parameter in a residual stack of `depth` layers, and 1 for any other.

    Source: u-muP (Blake et al., arXiv 2407.17465), after depth-muP (Yang et al., arXiv 2310.02244).

    Raises:
        MupError: the parameter has no tags.
    """
    depth = tags(parameter).mup_scaling_depth
    return 1.0 if depth is None else 1 / math.sqrt(depth)


def lr_scale_func_adam(parameter: Any) -> float:
    """The rule for optimizers whose updates have entries of size 1: Adam, AdamW and Lion.

    The factor is fan_in^-1/2 for a "weight" and 1 for all other types, times the factor for depth.
    Source: u-muP.

    Raises:
        MupError: the parameter has no tags.
    """
    hidden = tags(parameter).mup_type == "weight"
    width = 1 / math.sqrt(fan_in(parameter)) if hidden else 1.0
    return lr_scale_for_depth(parameter) * width


def lr_scale_func_sgd(readout_constraint: str | None) -> LRScale:
    """Return the rule for SGD, whose updates are as large as the gradients.

    Args:
        readout_constraint: the `constraint` of the model's `LinearReadout`. With None, gradients
            have unit scale, and Adam's rule holds. With "to_output_scale", every gradient below the
            readout has the readout's factor of 1/width. The learning rates compensate for it:
            weights get fan_in^1/2 and vectors their length, times the factor for depth.

    Raises:
        MupError: the constraint is unknown. The rule itself raises it for a parameter without tags.
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
    """Return the rule for optimizers whose updates have a known spectral norm.

    A layer learns features at every width if its weight matrix and the change of this matrix have
    spectral norms of the order of (out / in)^1/2 (Yang et al., "A spectral condition for feature
    learning", arXiv 2310.17813). The change of the function is lr * update * in^-1/2 in a hidden
    layer, and lr * update / in in the readout. If an update has the spectral norm u(out, in), then

        hidden: lr = out^1/2 / u           readout: lr = (in * out)^1/2 / u

    Adam's rule is the case of aligned signs, u = (in * out)^1/2. Vectors get Adam's rule.

    Args:
        norm: u(out, in).

    Raises:
        MupError: the rule raises it for a parameter without tags.
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
    """Return the rule for `torch.optim.Muon`, whose updates are orthogonal matrices.

    All singular values of such an update are 1 (Bernstein and Newhouse, "Old optimizer, new norm",
    arXiv 2409.20325). torch multiplies the update by a factor of the shape: max(1, out / in)^1/2
    for "original" and 0.2 max(out, in)^1/2 for "match_rms_adamw". `lr_scale_func_spectral` gives
    the rule for the product. A hidden layer therefore gets min(out, in)^1/2 with "original", and
    both choices train alike.

    Muon is for matrices between hidden layers. Give embeddings and vectors to Adam.

    Args:
        adjust_lr_fn: the option of `torch.optim.Muon`; None is "original".

    Raises:
        MupError: `adjust_lr_fn` is unknown. The rule itself raises it for a parameter that is no
            matrix or has no tags.
    """
    if adjust_lr_fn not in _MUON_NORMS:
        raise MupError(
            f'adjust_lr_fn is None, "original" or "match_rms_adamw"; got {adjust_lr_fn!r}'
        )
    return partial(_muon, _MUON_NORMS[adjust_lr_fn])


def _muon(norm: Callable[[int, int], float], parameter: Any) -> float:
    if parameter.dim() != 2:
        raise MupError(
            f"Muon is for matrices; got a parameter of shape {tuple(parameter.shape)}. "
            "Give the others to Adam"
        )
    return _spectral(norm, parameter)


def _muon_original(outputs: int, inputs: int) -> float:
    return math.sqrt(max(1, outputs / inputs))


def _muon_match_rms_adamw(outputs: int, inputs: int) -> float:
    return 0.2 * math.sqrt(max(outputs, inputs))


_MUON_NORMS: dict[str | None, Callable[[int, int], float]] = {
    None: _muon_original,
    "original": _muon_original,
    "match_rms_adamw": _muon_match_rms_adamw,
}


def lr_scale_func_soap(parameter: Any) -> float:
    """The rule for optimizers that run Adam in the eigenbasis of the gradients, such as SOAP.

    Adam's updates have entries of size 1 whose signs follow the few directions of the gradient, so
    their spectral norm is of the order of (in * out)^1/2. In the eigenbasis, few of the entries
    belong to these directions (Vyas et al., arXiv 2409.11321). The other entries, of size 1 too,
    are noise, and a Gaussian matrix has the spectral norm in^1/2 + out^1/2. By
    `lr_scale_func_spectral` a hidden layer gets out^1/2 / (in^1/2 + out^1/2), which does not depend
    on the width if all layers have one width. Vectors, which SOAP leaves to Adam, get Adam's rule.
    This rule is derived here. A test measures that both norms grow with the width in this way.

    Raises:
        MupError: the parameter has no tags.
    """
    return _spectral(_gaussian, parameter)


def _gaussian(outputs: int, inputs: int) -> float:
    return math.sqrt(outputs) + math.sqrt(inputs)


@dataclass(frozen=True)
class GroupRule:
    """How one parameter group becomes several, one for each learning rate in it."""

    lr_scale: LRScale
    independent_weight_decay: bool = True
    allow_non_unit_scaling_params: bool = False
    scales: bool = True
    """Whether a parameter is tagged; otherwise groups stay unchanged."""

    @classmethod
    def of(
        cls, groups: list[Group], lr_scale: LRScale, independent: bool | None, allowed: bool | None
    ) -> "GroupRule":
        """Return the rule of an optimizer, from the groups and options of its constructor. Groups
        that are added later must be of the same kind: with or without tagged parameters.

        Args:
            groups: the parameter groups.
            lr_scale: the rule for learning rates.
            independent: `independent_weight_decay`; None means True if a parameter is tagged.
            allowed: `allow_non_unit_scaling_params`; None means True if no parameter is tagged.
        """
        for group in groups:
            group["params"] = _entries(group["params"])  # an iterator is read once
        given = [_parameter(entry) for group in groups for entry in group["params"]]
        scales = allowed is not None or any(map(has_parameter_data, given))
        if independent is None:
            independent = scales
        return cls(lr_scale, independent, not scales if allowed is None else allowed, scales)

    def split(self, group: Group) -> Iterator[Group]:
        """Divide the parameters of `group`, which has an `lr` and a `weight_decay`.

        Parameters with equal learning rates stay together, so that fused and foreach steps take as
        many parameters at once as possible. All other options stay unchanged.
        """
        _check_numbers(group)
        if not self.scales:
            self._refuse_tagged(group)
        by_scale: dict[float, list[Any]] = {}
        for entry in _entries(group["params"]):
            by_scale.setdefault(self._scale(entry), []).append(entry)
        for scale, members in by_scale.items():
            lr = group["lr"] * scale  # a tensor of its own for every group
            decay = group["weight_decay"]
            yield group | {"params": members, "lr": lr, "weight_decay": self._decay(decay, lr)}

    def _scale(self, entry: Any) -> float:
        parameter = _parameter(entry)
        if has_parameter_data(parameter):
            return float(self.lr_scale(parameter)) * tags(parameter).mup_lr_mult
        if self.allow_non_unit_scaling_params:
            return 1.0
        name = f"{entry[0]}, " if isinstance(entry, tuple) else "a parameter "
        shape = tuple(getattr(parameter, "shape", ()))
        raise MupError(
            f"{name}of shape {shape} has no u-muP tags; see scaledtensor.mup, or pass "
            "allow_non_unit_scaling_params=True to train it at the plain learning rate"
        )

    def _refuse_tagged(self, group: Group) -> None:
        group["params"] = _entries(group["params"])
        if any(has_parameter_data(_parameter(entry)) for entry in group["params"]):
            raise MupError(
                "this optimizer was made for parameters without u-muP tags and takes them as "
                "torch.optim does; a group with a tagged one needs an optimizer of its own, or "
                "allow_non_unit_scaling_params=True"
            )

    def _decay(self, decay: float, lr: float | Tensor) -> float:
        """Return torch's `weight_decay`. torch decays by lr * weight_decay, so an independent decay
        is divided by the learning rate."""
        if not self.independent_weight_decay or decay == 0:
            return decay
        if float(lr) == 0:
            raise MupError(
                "no weight decay is independent of a learning rate of 0; pass the peak learning "
                "rate and warm up by a scheduler, or independent_weight_decay=False"
            )
        return decay / float(lr)


#: Options of torch's optimizers that are numbers or pairs of numbers.
_NUMBERS = ("lr", "weight_decay", "betas", "eps", "momentum", "dampening")


def _check_numbers(group: Group) -> None:
    """Raise MupError for infinities and NaNs, some of which torch's comparisons accept."""
    for name in _NUMBERS:
        given = group.get(name)
        for x in given if isinstance(given, (tuple, list)) else (given,):
            if x is not None and not math.isfinite(float(x)):
                raise MupError(f"{name} is a finite number; got {given}")


def _parameter(entry: Any) -> Any:
    return entry[1] if isinstance(entry, tuple) else entry


def scaled_parameters(
    params: Iterable[Any],
    lr_scale_func: LRScale,
    lr: float | Tensor | None = None,
    weight_decay: float = 0,
    independent_weight_decay: bool = True,
    allow_non_unit_scaling_params: bool = False,
) -> list[Group]:
    """Return parameter groups with scaled learning rates, for any optimizer like torch.optim's.

        torch.optim.RAdam(scaled_parameters(model.parameters(), lr_scale_func_adam, lr=1.0))

    Args:
        params: parameters, pairs of name and parameter, or groups, as torch's optimizers take them.
        lr_scale_func: takes a tagged parameter, returns a factor of its learning rate.
        lr: learning rate of groups without an `lr`.
        weight_decay: weight decay of groups without a `weight_decay`.
        independent_weight_decay: divide the weight decay by the learning rate, so that a step at
            the given learning rate decays by `weight_decay` itself. A scheduler of the learning
            rate changes both.
        allow_non_unit_scaling_params: leave parameters without tags at the plain learning rate.

    Returns:
        One group for each learning rate in each given group, in the order of first parameters.

    Raises:
        MupError: a group has no learning rate, a parameter has no tags, or a weight decay is
            independent of a learning rate of 0.
    """
    rule = GroupRule(lr_scale_func, independent_weight_decay, allow_non_unit_scaling_params)
    found: list[Group] = []
    for group in groups_of(params):
        full = {"lr": lr, "weight_decay": weight_decay} | group
        if full["lr"] is None:
            raise MupError("no learning rate: pass lr, or groups that each have an lr")
        found.extend(rule.split(full))
    return found


def groups_of(params: Iterable[Any]) -> list[Group]:
    """Return groups in their order. Loose parameters become one group, in the place of the first.

    torch takes either groups or parameters. The published library takes a mixture, and so does this
    function.

    Raises:
        MupError: `params` is one tensor.
    """
    if isinstance(params, Tensor):
        raise MupError("params is an iterable of parameters; got one tensor. Put it in a list")
    found: list[Group] = []
    loose: list[Any] = []
    for entry in _entries(params):
        if isinstance(entry, dict):
            found.append(entry)
        else:
            if not loose:
                found.append({"params": loose})
            loose.append(entry)
    return found


def _entries(params: Any) -> list[Any]:
    if isinstance(params, set):
        raise MupError("params has an order; got a set. Put the parameters in a list")
    return [params] if isinstance(params, Tensor) else list(params)
