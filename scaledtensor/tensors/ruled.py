"""Ruled: a tensor of inner tensors whose operators run by the rules of this library.

ScaledTensor and CodedTensor are such tensors. Rules compute on ScaledTensors, and read a
CodedTensor as the ScaledTensor of its value, `widened()`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.formats import FormatLike
from scaledtensor.formats import get as get_format
from scaledtensor.scales.powers import checked_scale
from scaledtensor.scales.singles import UNCOUNTED
from scaledtensor.tensors.engine import Engine, OnUse
from scaledtensor.tensors.storable import check_storable
from scaledtensor.tensors.wrapper import Wrapper

if TYPE_CHECKING:
    from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["Ruled"]


class Ruled(Wrapper):
    """The base of ScaledTensor and CodedTensor: their verbs, and the way to their rules."""

    #: The rules of operators, which are loaded with the first tensor.
    _engine: ClassVar[Engine | OnUse] = OnUse()

    def widened(self) -> "ScaledTensor":
        """A ScaledTensor of the same value, on which operators compute."""
        raise NotImplementedError

    # --- the verbs ---------------------------------------------------------------------------

    def dequantize(self) -> Tensor:
        """The plain tensor of the same value, shape and dtype. Differentiable."""
        return cast(Tensor, torch.ops.scaledtensor.dequantize(self))

    def to_format(self, format: FormatLike) -> "ScaledTensor":
        """Round the elements into another format; the scale stays. 8-bit formats saturate.
        Differentiable."""
        fmt = get_format(format)
        check_storable(fmt)
        return cast("ScaledTensor", torch.ops.scaledtensor.to_format(self, fmt.name))

    def rescale(self, scale: float | Tensor) -> "ScaledTensor":
        """Hold the same value under another power of two; the format stays. Differentiable."""
        single = checked_scale(scale, self.device, power_of_two=True)
        return cast("ScaledTensor", torch.ops.scaledtensor.rescale(self, single))

    # --- operators ---------------------------------------------------------------------------

    @classmethod
    @_torch.inlined_only
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _torch.BODIES and not _torch.is_transforming():
            return _torch.BODIES[func](*args, **(kwargs or {}))
        replacement = cls._engine.functions.get(func)
        if replacement is None or _torch.is_transforming():
            return _torch.without_torch_function(func, types, args, kwargs or {})
        with _torch.disable_torch_function():
            return replacement(*args, **(kwargs or {}))

    @classmethod
    def _fingerprint(cls) -> str:
        return cls._engine.fingerprint()

    # --- assignment of `.data` ---------------------------------------------------------------

    @property
    def data(self) -> Tensor:
        with _torch.disable_torch_function():
            made = cast(Tensor, Tensor.data.__get__(self))  # type: ignore[attr-defined]
        if not torch.compiler.is_compiling():
            vars(made)[UNCOUNTED] = True
        return made

    @data.setter
    def data(self, new: Tensor) -> None:
        # torch's own setter, which Module.to() calls, would replace the wrapper alone.
        self._adopt(self._as_data(new))

    def _as_data(self, new: Tensor) -> Tensor:
        """The tensor that `self` becomes by the assignment `self.data = new`."""
        return new

    if TYPE_CHECKING:
        __mul__: Any
        __truediv__: Any
