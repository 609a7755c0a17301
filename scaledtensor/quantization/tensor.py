"""QuantizedTensor: a weight in few bits that a plain model multiplies by.

A QuantizedTensor has the inner tensors of a `CodedTensor`, packed codes and the scales of their
blocks, and its `Config` says how products cast their inputs. It behaves as a plain tensor of its
value. A product with it is caught above autograd, in every spelling of the table of products, and
`quantization/products.py` computes it from the codes. Every other operator reads the plain value.
A copy, a move to a device, a transposition and a file keep the codes. A gradient flows to the input
of a product, so adapters train on a quantised base, and to a weight only in `training.py`.

The codes form a matrix whose rows are summed over (`Order`):

    rows      the tensor itself, as the weight of nn.Linear; leading dimensions are a batch
    columns   its transpose, as the weight of GPT-2's Conv1D, and as `weight.t()`
    kernel    each output channel of a convolution in one row
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any, Self, cast

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor._version import source_digest
from scaledtensor.errors import DTypeError, QuantizationError, ShapeError
from scaledtensor.formats import (
    Format,
    TwoLevelScale,
    dequantize_blocks,
    pack,
    unpack,
)
from scaledtensor.quantization.configs import Config, config_from
from scaledtensor.quantization.parts import (
    EXTRAS,
    Order,
    block_of,
    check_inner,
    matrix_shape,
    rows_of_scales,
    scale_dtype,
)
from scaledtensor.quantization.written import form_of, refuse_onnx
from scaledtensor.recipes.casts import TwoLevel
from scaledtensor.tensors.storable import appearance
from scaledtensor.tensors.wrapper import Wrapper, refuse_jit

__all__ = ["QuantizedTensor"]

_INNER = ("qdata", "scale", "tensor_scale")


class _Names:
    """The names of the inner tensors of a QuantizedTensor."""

    def __get__(self, x: Any, owner: type) -> tuple[str, ...]:
        return _INNER if x is None else (*_INNER, *x.extras)


class QuantizedTensor(Wrapper):
    """Codes in few bits and the scales of their blocks, with the config by which products use them.
    `quantize_` makes them.

    Args:
        codes: the matrix of codes, one an element, in the storage dtype of the config's format.
        scale: the scales of its blocks, as `formats.quantize_blocks` returns them.
        config: a `WeightOnly`, `Dynamic` or `Static`, whose `weight` is the cast of the codes.
        shape: the shape of the tensor; by default the shape of the codes.
        order: how the codes lie in the tensor (see the module).
        dtype: the dtype of the value: float32, bfloat16, float16 or float64.
        input_scale: the scale of inputs, one positive number, for `Static`.
        columns: powers of two, one for each element along the summed dimension. The codes are of
            the weight times them, and products divide the input by them (`Config.fold`).
        requires_grad: for libraries that make a parameter again, as accelerate does, by
            `type(p)(x, requires_grad=p.requires_grad)`: `x` is a QuantizedTensor, in place of
            `codes`, and the result is the parameter of its codes.

    Attributes:
        qdata: the packed codes. `codes` are the codes one an element.
        scale: for each block: float32, float8_e8m0fnu or float8_e4m3fn.
        tensor_scale: the second level of `TwoLevel` scales, 0-dim float32; else 1.
        config, order, input_scale, columns: as above.

    Raises:
        DTypeError, QuantizationError, ScaleError, ShapeError: an argument is not one of the
            allowed.
    """

    INNER: tuple[str, ...] = cast(Any, _Names())
    _EXTRAS: tuple[str, ...] = EXTRAS
    _FACTS: tuple[str, ...] = ("format", "config", "order", "extras")

    config: Config
    order: Order
    extras: tuple[str, ...]
    scale: Tensor
    tensor_scale: Tensor
    input_scale: Tensor | None = None
    loop: Any = None  # `native.products.Prepared`, made by the first product
    agreed: bool = False  # whether the ranks of its other parts have the same facts (`shards.py`)
    columns: Tensor | None = None
    recipe = None
    nonnegative = False

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        scale: Tensor | TwoLevelScale | None = None,
        config: Config | None = None,
        shape: Sequence[int] | None = None,
        *,
        order: Order = "rows",
        dtype: torch.dtype = torch.float32,
        input_scale: Tensor | float | None = None,
        columns: Tensor | None = None,
        requires_grad: bool = False,
    ) -> Self:
        if scale is None and config is None:
            if isinstance(codes, cls):
                return cast(Self, torch.nn.Parameter(codes.detach(), requires_grad))
            raise QuantizationError(
                "a QuantizedTensor is made of codes, their scales and a config, and the values of "
                "a tensor are none of them: quantize_(model, config) makes it. accelerate's "
                "disk_offload keeps values and not codes: use cpu_offload, which keeps the codes"
            )
        if not isinstance(config, Config) or scale is None:
            raise QuantizationError(
                "a config is WeightOnly(...) or the like, and comes with the scales of the codes; "
                f"got {config!r} and {type(scale).__name__}"
            )
        fmt = config.weight.format
        if not isinstance(codes, Tensor) or codes.dtype != fmt.storage_dtype:
            told = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
            raise DTypeError(f"codes of {fmt.name} are {fmt.storage_dtype}; got {told}")
        full = tuple(codes.shape if shape is None else shape)
        if tuple(codes.shape) != matrix_shape(full, order):
            raise ShapeError(
                f"codes of a tensor of {full} in {order} have shape "
                f"{matrix_shape(full, order)}; got {tuple(codes.shape)}"
            )
        levels = scale if isinstance(scale, TwoLevelScale) else (scale, None)
        whole = (
            torch.ones((), device=codes.device, dtype=torch.float32)
            if levels[1] is None
            else levels[1]
        )
        extras: dict[str, Tensor] = {}
        if input_scale is not None:
            given = torch.as_tensor(input_scale, dtype=torch.float32, device=codes.device)
            extras["input_scale"] = given.detach().reshape(())
        if columns is not None:
            extras["columns"] = columns.detach().float()
        inner = (
            pack(codes.detach(), fmt).contiguous(),
            levels[0].detach(),
            whole,
            *extras.values(),
        )
        context = (fmt, appearance(dtype), config, order, tuple(extras))
        check_inner(inner, full, context)
        return cls.put_together(inner, full, context)

    @classmethod
    @_torch.inlined_only
    def put_together(cls, inner: Sequence[Tensor], shape: Sequence[int], context: Any) -> Self:
        """The one constructor path, unchecked."""
        fmt, dtype, config, order, extras = context
        self = cast(Self, _torch.make_wrapper(cls, inner[0], dtype, shape))
        self.format, self.config, self.order, self.extras = fmt, config, order, extras
        for name, tensor in zip((*_INNER, *extras), inner, strict=True):
            setattr(self, name, tensor)
        return self

    @property
    @_torch.inlined_only
    def context(self) -> Any:
        """The facts by which the inner tensors are read."""
        return self.format, self.dtype, self.config, self.order, self.extras

    # --- the value ---------------------------------------------------------------------------

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape of the matrix of codes."""
        return matrix_shape(self.shape, self.order)

    @property
    def codes(self) -> Tensor:
        """The matrix of codes, one an element."""
        return unpack(self.qdata, self.format, self.matrix_shape)

    def matrix(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values of the codes as a matrix, as products multiply by them."""
        held: Any = self.scale
        if isinstance(self.config.weight.scale, TwoLevel):
            held = TwoLevelScale(self.scale, self.tensor_scale)
        return dequantize_blocks(self.codes, held, self.format, block_of(self.config.weight), dtype)

    def value_in(self, dtype: torch.dtype) -> Tensor:
        """The plain tensor of the value."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        held = self.matrix(wide)
        if self.config.rotate:
            held = _products().turned_back(held)
        if self.columns is not None:
            held = held / self.columns
        held = held.mT if self.order == "columns" else held.reshape(self.shape)
        return held.to(dtype)

    @property
    def cut(self) -> tuple[str, ...]:
        matrix = self.matrix_shape
        return ("qdata",) if rows_of_scales(self.config.weight, matrix) is None else _INNER[:2]

    def dequantize(self) -> Tensor:
        """The plain tensor of the same value, shape and dtype."""
        return cast(Tensor, _products().dequantize(self))

    def shared(self) -> Self:
        """Another tensor of the same codes, and no view of this one."""
        return self.like(*(getattr(self, name) for name in self.INNER))

    # --- torch -------------------------------------------------------------------------------

    @classmethod
    @_torch.inlined_only
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> Self:
        *_, extras = context
        return cls.put_together([inner[n] for n in (*_INNER, *extras)], outer_size, context)

    @classmethod
    @_torch.inlined_only
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _torch.BODIES:
            return _torch.BODIES[func](*args, **(kwargs or {}))
        products = _products()
        own = products.FUNCTIONS.get(func)
        if own is None or _torch.is_transforming():
            made = _torch.without_torch_function(func, types, args, kwargs or {})
            viewed = type(made) in (Tensor, tuple) and not torch.compiler.is_compiling()
            return products.guarded(made) if viewed else made
        refuse_jit(cls)
        with _torch.disable_torch_function():
            return own(*args, **(kwargs or {}))

    @classmethod
    @_torch.uncompiled
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inferring = func.is_view and torch.is_inference_mode_enabled()
        # Views of a tensor are made outside inference mode if the tensor was.
        where = torch.inference_mode(args[0].is_inference()) if inferring else nullcontext()
        with _torch.disable_torch_function(), where:
            own = form_of(func) or _OWN.get(func)
            if own is None:
                own = _products().computation(func)
                refuse_onnx()
            made = own(*args, **kwargs) if own is not None else NotImplemented
            if made is not NotImplemented:
                return made
            products = _products()
            products.refuse_writing(func, args, kwargs)
            read, named = torch.utils._pytree.tree_map(_read, (args, kwargs))
            made = func(*read, **named)
            # Autograd does not know all views that are made in inference mode, such as `w.T`.
            return products.as_parts(made) if inferring else made

    @classmethod
    def _fingerprint(cls) -> str:
        return source_digest()

    # --- fully_shard, which looks for these methods on the class of a part -------------------

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: Any,
    ) -> Any:
        """The codes and scales to send of this part of a weight."""
        return _shards().before(self, mesh, outer_size, mp_policy)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """The whole weight, of the codes that all ranks sent."""
        return _shards().after(all_gather_outputs, metadata, out)

    # --- Python ------------------------------------------------------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        """The values as a NumPy array: a copy, which is read-only."""
        return _products().read_only(super().numpy(force=force))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        made = super().__array__(dtype, copy)
        return made.copy() if copy else made

    def _spelled_scale(self) -> str:
        return f"{tuple(self.scale.shape)} {self.config}"

    def _spelled_facts(self) -> tuple[Any, ...]:
        return self.dtype, self.config.to_json(), self.order, self.extras

    @classmethod
    def _unpickled(
        cls, inner: Sequence[Tensor], shape: Sequence[int], fmt: Format, *facts: Any
    ) -> Self:
        dtype, config, order, extras = facts
        return cls.checked(inner, shape, (fmt, dtype, config_from(config), order, tuple(extras)))

    # --- files -------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        told = {"config": self.config.to_json(), "order": self.order}
        return told | {"extras": list(self.extras)}

    @classmethod
    def from_facts(
        cls,
        parts: Mapping[str, Tensor],
        shape: tuple[int, ...],
        context: tuple[Any, ...],
        facts: Mapping[str, Any],
    ) -> Self:
        extras, order = tuple(facts["extras"]), facts["order"]
        context = (*context[:2], config_from(facts["config"]), order, extras)
        return cls.checked([parts[name] for name in (*_INNER, *extras)], shape, context)

    @classmethod
    def checked(cls, inner: Sequence[Tensor], shape: Sequence[int], context: Any) -> Self:
        """The tensor of inner tensors that came from a file."""
        fmt, _, config, *_ = context
        held = config.weight
        wanted = (fmt.storage_dtype if fmt.bits >= 8 else torch.uint8, scale_dtype(held))
        read = [
            x.view(d) if x.dtype == torch.uint8 and d.itemsize == 1 else x
            for x, d in zip(inner[:2], wanted, strict=True)
        ]
        inner = (*read, *inner[2:])
        check_inner(inner, shape, context)
        return cls.put_together(inner, shape, context)


torch.serialization.add_safe_globals([QuantizedTensor])


def _products() -> Any:
    """The products, which load the operators on first use."""
    return import_module("scaledtensor.quantization.products")


def _shards() -> Any:
    """The parts that `fully_shard` makes, which are loaded on use."""
    return import_module("scaledtensor.quantization.shards")


# --- operators -------------------------------------------------------------------------------

_aten = torch.ops.aten


def _share(x: QuantizedTensor) -> QuantizedTensor:
    return x.shared()


def _copy(x: QuantizedTensor, **options: Any) -> QuantizedTensor:
    return x.like(*(getattr(x, name).clone() for name in x.INNER))


def _to(
    x: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    non_blocking: bool = False,
    **options: Any,
) -> Any:
    """A float dtype is the dtype of the value; the codes stay. Any other dtype is a reading."""
    kept = x.dtype if dtype is None else dtype
    if not kept.is_floating_point:
        return x.value_in(torch.float32).to(dtype=kept, device=device)
    move = {"device": device, "non_blocking": non_blocking, "copy": True}
    moved = [getattr(x, name).to(**move) for name in x.INNER]
    fmt, _, *rest = x.context
    return x.put_together(moved, x.shape, (fmt, appearance(kept), *rest))


def _empty(x: QuantizedTensor, *, device: Any = None, **options: Any) -> Any:
    """`Module.to_empty` makes room for the codes of a file on another device. Other callers make
    a plain tensor like the value."""
    if device is None:
        return NotImplemented
    return x.like(*(torch.empty_like(getattr(x, name), device=device) for name in x.INNER))


def _transposed(x: QuantizedTensor, *dims: int) -> Any:
    """The codes stay: rows become columns. Other dimensions are read."""
    n = x.dim()
    last = n >= 2 and (not dims or {d % n for d in dims} == {n - 2, n - 1})
    if x.order == "kernel" or not last or (not dims and n != 2):
        return NotImplemented
    fmt, dtype, config, order, extras = x.context
    turned = "rows" if order == "columns" else "columns"
    shape = (*x.shape[:-2], x.shape[-1], x.shape[-2])
    inner = [getattr(x, name) for name in x.INNER]
    return x.put_together(inner, shape, (fmt, dtype, config, turned, extras))


def _selected(x: QuantizedTensor, dim: int, index: Any) -> Any:
    """One matrix of a batch, as the weight of one expert. Other parts are read."""
    if dim != 0 or x.dim() != 3 or x.order == "kernel":
        return NotImplemented
    scale = x.scale if x.scale.dim() == 0 else x.scale[index]
    inner = (x.qdata[index], scale, *(getattr(x, name) for name in x.INNER[2:]))
    return x.put_together(inner, x.shape[1:], x.context)


#: Operators that keep codes as they are.
_OWN: dict[Any, Callable[..., Any]] = {
    _aten.alias.default: _share,
    _aten.clone.default: _copy,
    _aten.detach.default: _share,
    _aten.empty_like.default: _empty,
    _aten.lift_fresh.default: _share,
    _aten._to_copy.default: _to,
    _aten.t.default: _transposed,
    _aten.transpose.int: _transposed,
    _aten.select.int: _selected,
}


def _read(x: Any) -> Any:
    if not isinstance(x, QuantizedTensor):
        return x
    form = form_of(_products().dequantize)
    return x.value_in(x.dtype) if form is None else form(x)
