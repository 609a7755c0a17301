"""The setting `batch_invariant`."""

import threading
import warnings
from typing import Any, NamedTuple

import torch

from scaledtensor import _torch
from scaledtensor.errors import OptionError, RecipeError, UnsupportedError
from scaledtensor.recipes import Recipe
from scaledtensor.recipes.casts import Carried, Cast, Fixed, TwoLevel
from scaledtensor.setting import Setting

__all__ = [
    "assumes_unit_scale",
    "batch_invariant",
    "check_cast",
    "check_recipe",
    "context_length",
    "is_on",
]


class _State(NamedTuple):
    on: bool
    context_length: int


class batch_invariant(Setting):  # noqa: N801 - reads as a verb, like torch.no_grad
    """Compute the same bits for a row in any batch: a setting, and a context manager that restores
    the setting before.

    Prefill, decoding with a cache, any batch size and the training forward then give equal logits
    to the bit. Within the setting, products, sums, norms, softmax, attention and functions such as
    sigmoid run in a fixed order of additions on a CPU. Gradients are computed as without it.

    Args:
        on: False ends the setting.
        context_length: The number of keys by which the expected RMS of the attention of
            ScaledTensors is calculated. Without the setting it is the number of keys of the call,
            which differs between training and decoding.

    Compiled functions run eagerly within the setting, which loads TorchDynamo. It holds for all
    threads of the process. docs/how_to/same_bits.md lists what it covers.

    Raises:
        OptionError: `context_length` is not a positive whole number.
        UnsupportedError: The call is inside code that `torch.compile` traces. Within the setting:
            an operator has no fixed order (convolutions), or a tensor is on another device.
        RecipeError: Within the setting, a recipe measures its scale over the whole batch.
    """

    _now: _State = _State(on=False, context_length=1024)

    def __init__(self, on: bool = True, *, context_length: int = 1024) -> None:
        if type(context_length) is not int or context_length < 1:
            raise OptionError(
                f"context_length is a positive whole number of keys; got {context_length!r}"
            )
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                "scaledtensor.batch_invariant cannot change inside code that torch.compile traces; "
                "enter it outside of the compiled function, which then runs eagerly"
            )
        super().__init__(_State(bool(on), context_length))
        try:
            _follow()
        except BaseException:
            super().__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _follow()


_lock = threading.Lock()
_held: list[Any] = []
"""The library of kernels, and the stance of the compiler; empty without the setting. A library's
kernels are there for as long as the object is."""


def _follow() -> None:
    """Put the kernels in place, or take them away, as the setting says."""
    with _lock:
        if batch_invariant._now.on == bool(_held):
            return
        if _held:
            _, stance = _held
            _held.clear()
            stance.__exit__(None, None, None)
            return
        from scaledtensor.ops.invariant.kernels import kernels

        library: Any = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # torch warns of the first kernel that replaces another
            warnings.simplefilter("ignore")
            for name, key, kernel in kernels():
                library.impl(name, kernel, key, with_keyset=True)
        _held.extend((library, torch.compiler.set_stance("force_eager")))


def is_on() -> bool:
    """Whether the setting is on."""
    return batch_invariant._now.on


def context_length() -> int | None:
    """The number of keys by which attention is scaled, or None without the setting."""
    return batch_invariant._now.context_length if batch_invariant._now.on else None


def assumes_unit_scale() -> bool:
    """Whether a plain tensor beside a ScaledTensor has the expected RMS 1. Otherwise its RMS is
    measured, which depends on the batch. Gradients are measured in any case."""
    return batch_invariant._now.on and not _torch.is_within_backward()


def check_recipe(recipe: Recipe, scaled: bool) -> None:
    """Raise RecipeError if the cast of an input depends on other rows of the batch.

    `scaled` says whether all operands of the product are ScaledTensors.
    """
    cast: Any = recipe.cast("input", "forward")
    if isinstance(cast, Cast) and isinstance(cast.scale, Carried) and not scaled:
        raise RecipeError(
            "a plain tensor enters a product under scaledtensor.batch_invariant: its scale would "
            "be measured over the batch. State its scale, as "
            "scaledtensor.ScaledTensor(x, 1.0, 'fp32', recipe='unit') does for x of RMS near 1"
        )
    if isinstance(cast, Cast):
        check_cast(
            cast,
            f"the recipe {type(recipe).__name__}",
            "Unit or Constant, which measure nothing, Current(granularity='row'), or blocks of one "
            "row, such as MXFP8",
        )


def check_cast(cast: Cast, name: str, instead: str) -> None:
    """Raise RecipeError if the cast of an input depends on other rows of the batch.

    The message names `name`, and `instead`, the casts to take.
    """
    by_row = cast.block[0] == 1 and not isinstance(cast.scale, TwoLevel)
    if cast.rounding != "nearest_even":
        reason = "rounds inputs at random"
    elif not (by_row or isinstance(cast.scale, (Carried, Fixed))):
        reason = "measures the scale of an input over several rows of a batch"
    else:
        return
    raise RecipeError(
        f"{name} {reason}, so results depend on the batch, which contradicts "
        f"scaledtensor.batch_invariant. Take {instead}"
    )
