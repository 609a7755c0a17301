"""Writes into a QuantizedTensor: which of them its codes take, and errors for the others.

Codes and scales are made together from a plain weight, so no operator writes into a part of them.
A weight takes the codes of another weight of the same shape and config. Everything else is an
error, also where the plain value that a program reads would take the write and lose it: an
assignment to `.data` or to elements, a collective of `torch.distributed`, and a view such as
`w[:4]`, which is a part of a decoded copy (`DecodedPart`).
"""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import UnsupportedError
from scaledtensor.quantization.tensor import QuantizedTensor
from scaledtensor.tensors.wrapper import Wrapper, is_parameter, written_by

__all__ = [
    "FUNCTIONS",
    "DecodedPart",
    "as_parts",
    "copy_into",
    "guarded",
    "read_only",
    "refuse_writing",
]

_WAYS_OUT = (
    "unscale_model(model) makes the weight plain. To keep few bits, put a plain weight into the "
    "module and call quantize_(model, config) again. To train, add adapters"
)


# --- codes of another weight -----------------------------------------------------------------


def copy_into(x: Any, source: Any, *rest: Any) -> Any:
    """`x.copy_(source)`. `load_state_dict` copies codes between tensors of one config. Plain values
    that the weight has already change nothing: DistributedDataParallel sends the values of rank 0
    to all ranks."""
    if not isinstance(x, QuantizedTensor):
        return NotImplemented
    if _is_value_of(x, source):
        return x
    _check_alike(x, source)
    for name in x.INNER:
        getattr(x, name).copy_(getattr(source, name))
    x.loop, x.agreed = None, False
    return x


def _assign(x: Any, new: Any) -> None:
    """`x.data = new`."""
    if not _is_value_of(x, new):
        _check_alike(x, new)
        x._adopt(new)
        x.loop = None


def _is_value_of(x: QuantizedTensor, source: Any) -> bool:
    plain = isinstance(source, Tensor) and not isinstance(source, Wrapper)
    if not plain or source.dtype is not x.dtype or source.device != x.device or x.is_meta:
        return False
    return torch.equal(x.value_in(x.dtype), source)


def _check_alike(x: QuantizedTensor, source: Any) -> None:
    if isinstance(source, QuantizedTensor) and _kept(source) == _kept(x):
        return
    if isinstance(source, QuantizedTensor):
        what = f"{source.config} of {tuple(source.shape)}"
    else:
        what = f"a {type(source).__name__} of other values"
    ranks = ""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = (
            ". DistributedDataParallel sends the values of rank 0, so all ranks hold equal codes: "
            "quantize_ the same plain weights on each rank, or broadcast them before quantize_()"
        )
    raise UnsupportedError(
        f"a weight of {x.config} takes the codes of another one of the same shape and config; "
        f"got {what}. Load plain weights into the plain model, before quantize_(); {_WAYS_OUT}. "
        "torch.distributed.checkpoint takes scaledtensor.checkpoint.apart(state_dict, "
        "loading=True), and get_model_state_dict has an option ignore_frozen_params"
        f"{ranks}"
    )


def _kept(x: QuantizedTensor) -> Any:
    fmt, _, *facts = x.context
    return tuple(x.shape), fmt, *facts


# --- errors ----------------------------------------------------------------------------------


def refuse_writing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise an error if an operator would write into a QuantizedTensor."""
    for t in written_by(func, args, kwargs):
        if isinstance(t, QuantizedTensor):
            _refuse(func, t)


def _refuse(what: Any, x: QuantizedTensor) -> NoReturn:
    raise UnsupportedError(
        f"{what} would write into a weight of {x.config}, whose codes and scales are made "
        f"together: {_WAYS_OUT}"
    )


def _set_elements(x: Any, index: Any, value: Any) -> None:
    if isinstance(x, QuantizedTensor):
        _refuse("An assignment to elements", x)
    x[index] = value


def _require_gradient(x: Any, required: bool = True) -> Any:
    # `load_state_dict(assign=True)` makes parameters, and a plain model's require gradients.
    if required and is_parameter(x) and not x.requires_grad:
        raise UnsupportedError(
            f"a weight of {x.config} is frozen, and requires no gradient: "
            "quantize_(model, config, train=True) trains plain weights for few bits; a filter_fn "
            "leaves a module out that is to train, such as one of peft's modules_to_save"
        )
    return Tensor.requires_grad_(x, required)


def _set_requires_grad(x: Any, required: bool) -> None:
    _require_gradient(x, required)


#: Function of torch -> the same on a QuantizedTensor.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.data.__set__: _assign,  # type: ignore[attr-defined]
    Tensor.__setitem__: _set_elements,
    Tensor.requires_grad_: _require_gradient,
    Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
}


def read_only(values: Any) -> Any:
    """The array of a decoded copy. A write into it would not reach the codes."""
    if isinstance(values, np.ndarray):
        values.setflags(write=False)
    return values


# --- parts of the value ----------------------------------------------------------------------


class DecodedPart(Tensor):
    """A view of a QuantizedTensor that torch made of the decoded value, such as `w[:4]` or
    `w.view(-1)`. It reads as a plain tensor, and its results are plain. A write into it is an
    error, since the codes would not change. `clone()` makes a plain tensor of it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if any(isinstance(t, cls) for t in _written(name, args, kwargs)):
            raise UnsupportedError(
                f"{name} would write into a part of a decoded copy of a quantised weight, and the "
                f"codes would not change: clone() makes a plain copy of this part; {_WAYS_OUT}"
            )
        if any(kind is not cls for kind in types):  # the other class knows what to do
            args, kwargs = torch.utils._pytree.tree_map(_plain, (args, kwargs))
            return func(*args, **kwargs)
        made = _torch.without_torch_function(func, types, args, kwargs)
        if name in ("__get__", "detach") and type(made) is Tensor:  # no views for autograd
            return made.as_subclass(cls)
        return read_only(made) if isinstance(made, np.ndarray) else guarded(made)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made: Tensor = _plain(self).clone()
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def guarded(made: Any) -> Any:
    """The result of a function of a QuantizedTensor, with a `DecodedPart` in place of each view
    of its value. Traced code and recordings keep the views."""
    if type(made) is tuple:
        return tuple(map(guarded, made))
    if type(made) is not Tensor or not made._is_view() or made.requires_grad:
        return made
    return as_parts(made) if isinstance(made._base, QuantizedTensor) else made


def as_parts(made: Any) -> Any:
    """Views of a decoded copy as `DecodedPart`s."""
    if type(made) in (list, tuple):
        return type(made)(map(as_parts, made))
    if type(made) is not Tensor or _torch.recording_modes() or _torch.is_transforming():
        return made
    return made.as_subclass(DecodedPart)


def _plain(x: Any) -> Any:
    if not isinstance(x, DecodedPart):
        return x
    with _torch.disable_torch_function():
        return x.as_subclass(Tensor)


def _written(name: str, args: Any, kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that a function of torch writes into, by the name of the function."""
    held = [kwargs.get("out")]
    in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    if in_place or name in _IN_PLACE or kwargs.get("inplace") is True:
        held += args[:1] or list(kwargs.values())[:1]
    for x in held:
        yield from x if isinstance(x, (list, tuple)) else (x,)


_HARMLESS = {"requires_grad_", "detach_", "share_memory_"}
_OPERATIONS = "add sub mul div truediv floordiv mod pow and or xor lshift rshift"
_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in _OPERATIONS.split())}
