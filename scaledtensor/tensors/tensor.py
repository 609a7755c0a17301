"""ScaledTensor: a tensor whose value is `qdata * scale`."""

import math
from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import DTypeError, StorageError, UnsupportedError
from scaledtensor.formats import Format, FormatLike, Granularity, PerTensor, encode, from_dtype
from scaledtensor.formats import get as get_format
from scaledtensor.formats.rounding import Overflow
from scaledtensor.formats.tensors import in_pieces
from scaledtensor.recipes import Recipe
from scaledtensor.recipes import get as get_recipe
from scaledtensor.scales.measure import measured_rms
from scaledtensor.scales.powers import checked_scale, nearest_power_of_two
from scaledtensor.scales.singles import Amount, Cell, asked, hold, shared, single_of, view_of
from scaledtensor.tensors.engine import Engine, OnUse
from scaledtensor.tensors.site import Site, lend
from scaledtensor.tensors.storable import APPEARANCES, appearance, check_storable, check_strided

__all__ = [
    "SENT_AS_ONE",
    "Context",
    "Engine",
    "ScaledTensor",
    "from_plain",
    "is_parameter",
    "is_stored",
    "under_scale",
    "with_autograd",
]

#: Where an RMS says that it is of several tensors that were sent as one.
SENT_AS_ONE = "of_several"

_LARGEST = torch.finfo(torch.float32).max


Context: TypeAlias = tuple[Format, torch.dtype, Recipe | None, bool]
"""What flatten keeps beside the inner tensors: format, dtype, recipe, nonnegative."""


class ScaledTensor(Tensor):
    """A tensor that carries its scale: the value is exactly `qdata * scale`.

    Args:
        qdata: the elements, in `format.storage_dtype`, of any shape.
        scale: one power of two (a float or a 0-dim tensor).
        format: the number format of the elements: a `Format`, its name or its torch dtype.
        dtype: what autograd and optimizers see as `.dtype`; by default `qdata.dtype` where that is
            a 16-bit or wider float, else float32.
        recipe: how matrix products cast this tensor, or the name of a recipe; None leaves its
            elements as they are.
        power_of_two: False allows any positive scale (amax recipes); rescaling then rounds.

    Attributes:
        qdata, scale, format, recipe: as above; `scale` is a 0-dim float32 tensor.
        rms: the RMS that the rules expect of the value, 0-dim float32. It is unrounded, so that the
            scales of a deep network do not drift. Zero marks a tensor known to be all zeros.
        nonnegative: whether the rules know that no element is negative (squares, softmax): a sum of
            such grows by n, not by sqrt(n).

    Raises:
        ScaleError, FormatError, DTypeError, RecipeError: an argument is outside what is allowed.
    """

    qdata: Tensor
    scale: Tensor = asked()
    rms: Tensor = asked()
    format: Format
    recipe: Recipe | None
    nonnegative: bool

    #: The inner tensors. Flatten, unflatten, repr, copy and pickle follow from this list.
    INNER: ClassVar[tuple[str, ...]] = ("qdata", "scale", "rms")

    #: What shares a scale: here, all elements.
    granularity: Granularity = PerTensor()

    #: The elements of an 8-bit tensor as bfloat16, while a graph is traced.
    decoded: Tensor | None = None

    #: Whether `decoded` is for the forward pass alone, since the codes are what is to be saved.
    passing: bool = False

    #: The 8-bit copy that operators keep for the backward pass, and what it was made of.
    copies: tuple[Any, ...] | None = None

    #: Whether this is a part whose scale the other ranks with parts of the tensor count on.
    agreed: bool = False

    #: The largest finite |element| of all those parts, where it was asked for; lost by writing.
    whole_amax: Tensor | None = None

    #: What a weight knows of the operands of its products.
    site: Site | None = None

    #: While a graph is traced: what this weight lent to it (`lent`), or the weight that it is of.
    traced_lent: Tensor | None = None
    viewed_lent: Tensor | None = None

    #: While a graph is traced, what a difference is from and to.
    towards: Any = None

    #: The rules of operators.
    _engine: ClassVar[Engine | OnUse] = OnUse()

    @staticmethod
    def __new__(
        cls,
        qdata: Tensor,
        scale: float | Tensor,
        format: FormatLike,
        *,
        dtype: torch.dtype | None = None,
        recipe: Recipe | str | None = None,
        power_of_two: bool = True,
    ) -> Self:
        fmt = get_format(format)
        if isinstance(qdata, ScaledTensor) or not isinstance(qdata, Tensor):
            raise DTypeError(f"qdata is a plain torch.Tensor; got {type(qdata).__name__}")
        if qdata.dtype != fmt.storage_dtype:
            raise DTypeError(
                f"{fmt.name} is stored as {fmt.storage_dtype}; got qdata of {qdata.dtype}. "
                f"To convert values, use scaledtensor.scaled(tensor, {fmt.name!r})"
            )
        check_storable(fmt)
        check_strided(qdata)
        single = checked_scale(scale, qdata.device, power_of_two=power_of_two)
        chosen = None if recipe is None else get_recipe(recipe)
        if dtype is None:
            dtype = qdata.dtype if qdata.dtype in APPEARANCES else torch.float32
        return cls.make(qdata.detach(), single, single.clone(), fmt, appearance(dtype), chosen)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    @_torch.inlined_only
    def make(
        cls,
        qdata: Tensor,
        scale: Amount | Cell,
        rms: Amount | Cell,
        format: Format,
        dtype: torch.dtype,
        recipe: Recipe | None,
        nonnegative: bool = False,
    ) -> Self:
        """The one constructor path, unchecked: for rules, which make only valid tensors."""
        self = cast(Self, cls._wrapper(qdata, dtype))
        self.qdata, self.format = qdata, format
        self.recipe, self.nonnegative = recipe, nonnegative
        hold(self, scale, rms)
        return self

    @classmethod
    def _wrapper(cls, qdata: Tensor, dtype: torch.dtype) -> Any:
        return _torch.make_wrapper(cls, qdata, dtype)

    def like(self, *inner: Any) -> Self:
        """A tensor with this one's format, dtype and recipe around other tensors for `INNER`."""
        qdata, scale, rms = inner
        return self.make(qdata, scale, rms, *self.context)

    @property
    @_torch.inlined_only
    def context(self) -> Context:
        """What says how the inner tensors are to be read."""
        return self.format, self.dtype, self.recipe, self.nonnegative

    @property
    @_torch.inlined_only
    def lent(self) -> Tensor | None:
        """What compiled code reads of a weight's site (`Site.lends`); None of other tensors."""
        if type(self) is not ScaledTensor or _torch.is_tracing(self.qdata):
            return self.traced_lent
        if self.site is None:
            if not is_parameter(self):
                return None
            self.site = Site()
        return self.site.lends(self)

    def viewed(self, qdata: Tensor) -> Self:
        """A view of this tensor, around a view of its elements: the very same scale."""
        if torch.is_inference_mode_enabled() and not self.is_inference():
            with torch.inference_mode(False):  # as torch makes a view of a tensor from outside
                return self.viewed(qdata)
        if self.INNER is ScaledTensor.INNER and not torch.compiler.is_compiling():
            return cast(Self, view_of(self, qdata, self._wrapper(qdata, self.dtype)))
        made = self.like(qdata, *[shared(self, name) for name in self.INNER[1:]])
        lend(self, made)
        return made

    # --- the verbs ---------------------------------------------------------------------------

    def dequantize(self) -> Tensor:
        """The plain tensor of the same value, shape and dtype. Differentiable."""
        return cast(Tensor, torch.ops.scaledtensor.dequantize(self))

    def to_format(self, format: FormatLike) -> "ScaledTensor":
        """Round the elements into another format; the scale stays. 8-bit formats saturate.
        Differentiable."""
        fmt = get_format(format)
        check_storable(fmt)
        return cast(ScaledTensor, torch.ops.scaledtensor.to_format(self, fmt.name))

    def rescale(self, scale: float | Tensor) -> "ScaledTensor":
        """Hold the same value under another power of two; the format stays. Differentiable."""
        single = checked_scale(scale, self.device, power_of_two=True)
        return cast(ScaledTensor, torch.ops.scaledtensor.rescale(self, single))

    # --- what torch asks of a wrapper subclass -----------------------------------------------

    @_torch.inlined_only
    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        if self.lent is None:
            return list(self.INNER), self.context
        fmt, dtype, recipe, nonnegative = self.context
        return [*self.INNER, "lent"], (fmt, dtype, recipe and recipe.uncorrected, nonnegative)

    @classmethod
    @_torch.inlined_only
    def __tensor_unflatten__(
        cls,
        inner: dict[str, Tensor],
        context: Context,
        outer_size: Any,
        outer_stride: Any,
    ) -> Self:
        qdata, scale, rms = (inner[name] for name in cls.INNER)
        made = cls.make(qdata, scale, rms, *context)
        if "lent" in inner:
            made.traced_lent = inner["lent"]
        return made

    @_torch.inlined_only
    def __coerce_tangent_metadata__(self) -> Self:
        # AOTAutograd guesses a gradient's metadata from its output's. The scale is a tensor, so
        # nothing about it is guessed; a sign may not be.
        return self.make(self.qdata, self.scale, self.rms, self.format, self.dtype, self.recipe)

    @_torch.inlined_only
    def __coerce_same_metadata_as_tangent__(
        self, expected: Context, expected_type: Any = None
    ) -> Tensor:
        if expected_type is Tensor:
            return self.dequantize()
        held = self if self.format == expected[0] else self.to_format(expected[0])
        return self.make(held.qdata, held.scale, held.rms, *expected)

    def _stable_hash_for_caching(self) -> str:
        # AOTAutograd's on-disk cache hashes the graph that Dynamo saw, which holds ATen operators
        # and not the rules behind them: without the fingerprint a changed rule runs as it was.
        names, context = self.__tensor_flatten__()
        return "|".join(
            (
                self._engine.fingerprint(),
                *(str(part) for part in context),
                *(
                    f"{name}:{t.dtype}{tuple(t.shape)}{tuple(t.stride())}{t.device}"
                    for name in names
                    for t in (getattr(self, name),)
                ),
                str(self.requires_grad),
            )
        )

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
    # Beside a graph that broke, dynamo would compile the Python of rules.
    @_torch.uncompiled
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Rules read shapes and dtypes of tensors, each of which would ask `__torch_function__`.
        with _torch.disable_torch_function():
            return cls._engine.dispatch(func, args, kwargs or {})

    # --- Python protocols --------------------------------------------------------------------

    def tolist(self) -> Any:
        return self.detach().dequantize().tolist()

    def numpy(self, *, force: bool = False) -> "np.ndarray[Any, Any]":
        """The dequantised values as a NumPy array (a copy)."""
        return self.dequantize().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> "np.ndarray[Any, Any]":
        if copy is False:
            raise ValueError("values of a ScaledTensor are computed: an array of them is a copy")
        values = self.numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise UnsupportedError("DLPack takes memory: export x.detach().dequantize() in its place")

    __dlpack_device__: Any = __dlpack__

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    @property
    def data(self) -> Tensor:
        with _torch.disable_torch_function():
            return cast(Tensor, Tensor.data.__get__(self))  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: Tensor) -> None:
        # torch's own setter, which Module.to() calls, would replace the wrapper alone.
        if new.dtype == torch.float64 != self.dtype:
            raise UnsupportedError(
                f"no format has the bits of float64; this tensor computes in {self.format.name}. "
                "A float64 model (for gradcheck, say): scaledtensor.unscale_model(model).double()"
            )
        plain = not isinstance(new, ScaledTensor)
        held = self.recipe.master if self.recipe is not None and is_stored(self) else self.format
        fmt = held if new.dtype == self.dtype else from_dtype(new.dtype)
        self._adopt(from_plain(new, fmt, new.dtype, self.recipe) if plain else new)

    def _adopt(self, held: Any) -> None:
        """Become `held`, which is of the same class."""
        if type(held) is not type(self):
            raise UnsupportedError(
                f"a {type(self).__name__} cannot become a {type(held).__name__} by assigning "
                "`.data`; put a new nn.Parameter in its place"
            )
        with _torch.disable_torch_function():
            Tensor.data.__set__(self, held)  # type: ignore[attr-defined]
        for name in self.INNER:
            setattr(self, name, getattr(held, name))
        self.format, _, self.recipe, self.nonnegative = held.context
        self.decoded, self.agreed, self.whole_amax = None, False, None

    def new(self, *args: Any, **kwargs: Any) -> Any:
        # default_collate stacks into it: empty, of the kind that a stack is.
        if args and isinstance(args[0], (torch.TypedStorage, torch.UntypedStorage)):
            return torch.stack([self.detach().flatten()[:0]])
        return super().new(*args, **kwargs)

    def share_memory_(self) -> Self:
        for name in self.INNER:  # the wrapper has no memory
            getattr(self, name).share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(getattr(self, name).is_shared() for name in self.INNER)

    def data_ptr(self) -> int:
        raise StorageError(  # torch's own message names no way out
            f"a {type(self).__name__} has no bytes of its own, which safetensors asks for: write "
            "it by scaledtensor.checkpoint.save_safetensors(model_or_state_dict, path), with "
            "dequantized=True for a plain file; one plain tensor is x.dequantize()"
        )

    storage: Any = data_ptr  #: safetensors asks this next

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        body, symbolic = f"shape={tuple(self.shape)}", _torch.is_tracing(self.qdata) or self.is_meta
        if not symbolic:
            values = self.detach().dequantize()
            body = repr(values).removeprefix("tensor(").removesuffix(")")
            body = body.replace(f", dtype={values.dtype}", "").replace("\n", "\n      ")
        scale = "?" if symbolic else self._spelled_scale()
        facts = [f"format={self.format.name}", f"scale={scale}", f"dtype={self.dtype}"]
        if self.grad_fn is not None:
            facts.append(f"grad_fn=<{self.grad_fn.name()}>")
        elif self.requires_grad:
            facts.append("requires_grad=True")
        return f"{type(self).__name__}({', '.join((body, *facts))})"

    def _spelled_scale(self) -> str:
        significand, exponent = math.frexp(float(self.scale))
        return f"2**{exponent - 1}" if significand == 0.5 else f"{float(self.scale):.6g}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            return cast(Self, memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied; use .detach() first")
        copy = self.like(*(getattr(self, name).clone() for name in self.INNER))
        copy.site = self.site and self.site.copied(copy)
        memo[id(self)] = copy = with_autograd(copy, self.requires_grad, is_parameter(self))
        if self.grad is not None:
            with torch.no_grad():
                copy.grad = deepcopy(self.grad, memo)
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # As bytes: torch cannot read back the 8-bit floats that plain pickle writes.
        narrow = self.qdata.dtype.itemsize == 1
        qdata = self.qdata.view(torch.uint8) if narrow else self.qdata
        inner = (qdata, self.scale, self.rms)
        if self.site is not None:
            self.site.correct(self)
        own = () if self.site is None or self.site.own is None else (self.site.own,)
        context = (self.format.name, *self.context[1:])
        return _rebuild, (inner, context, self.requires_grad, is_parameter(self), *own)

    if TYPE_CHECKING:
        __mul__: Any
        __truediv__: Any


def _rebuild(
    inner: tuple[Tensor, Tensor, Tensor],
    context: tuple[str, torch.dtype, Recipe | None, bool],
    requires_grad: bool,
    is_parameter: bool,
    history: Tensor | None = None,
) -> ScaledTensor:
    """Unpickle. A module-level function, so that `weights_only` loading can allow it by name."""
    (name, dtype, recipe, nonnegative), (qdata, scale, rms) = context, inner
    fmt = get_format(name)
    made = ScaledTensor.make(
        qdata.view(fmt.storage_dtype), scale, rms, fmt, dtype, recipe, nonnegative
    )
    made = with_autograd(made, requires_grad, is_parameter)
    made.site = None if history is None else Site(own=history)
    return made


T = TypeVar("T", bound=ScaledTensor)

torch.serialization.add_safe_globals([_rebuild, ScaledTensor])


def is_parameter(x: Tensor) -> bool:
    """Whether `x` is an nn.Parameter, which for a subclass is a flag."""
    return isinstance(x, torch.nn.Parameter)


def is_stored(x: ScaledTensor) -> bool:
    """Whether `x` is held as its recipe stores frozen weights: in the format of their products."""
    if x.recipe is None or not x.recipe.store_frozen:
        return False
    once = x.recipe.gemms.once
    return once is not None and x.format == once[1].format


def with_autograd(x: T, requires_grad: bool, is_parameter: bool) -> T:
    """`x` as the parameter, or with the `requires_grad`, that its original had."""
    if is_parameter:
        return cast(T, torch.nn.Parameter(x, requires_grad))
    return cast(T, x.requires_grad_(requires_grad))


def from_plain(x: Tensor, fmt: Format, dtype: torch.dtype, recipe: Recipe | None) -> ScaledTensor:
    """Wrap plain data under the power of two nearest to its RMS, which is measured.

    This runs where plain tensors enter (inputs, tables), never on what the rules carry. It neither
    checks its arguments nor records a gradient.
    """
    rms = measured_rms(x)
    return under_scale(x, nearest_power_of_two(rms), rms, fmt, dtype, recipe)


def under_scale(
    x: Tensor, scale: Tensor, rms: Tensor, fmt: Format, dtype: torch.dtype, recipe: Recipe | None
) -> ScaledTensor:
    """Plain data under a scale that is chosen already. No gradient is recorded."""
    # What is not finite stays so: -inf in a mask means something.
    overflow: Overflow = "ieee" if fmt.storage_dtype in APPEARANCES else "saturate_finite"

    def divided(t: Tensor, *_: object) -> Tensor:
        # In float32 at least, so that dividing by the scale rounds nothing.
        wide = t if t.dtype == torch.float64 else t.float()
        quotient = wide / scale
        if overflow == "saturate_finite":  # a scale far below a number makes no infinity of it
            quotient = torch.where(wide.isfinite(), quotient.clamp(-_LARGEST, _LARGEST), wide)
        return encode(quotient, fmt, overflow=overflow)

    qdata = in_pieces(divided, x.detach(), fmt.storage_dtype)
    return ScaledTensor.make(qdata, single_of(scale), single_of(rms), fmt, dtype, recipe)
