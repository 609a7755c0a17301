"""Wrapper: a tensor that consists of other tensors, and behaves as one tensor.

torch calls such a class a wrapper subclass. It has a shape and a dtype, and no memory of its own.
Its class lists its inner tensors by name in `INNER`. Printing, copying, pickling and sharing memory
follow from this list, and so do the answers to `torch.compile`. A derived class says how its inner
tensors become a tensor (`put_together`), and how operators treat it.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Self, TypeGuard, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends import backend_of
from scaledtensor.errors import StorageError, UnsupportedError
from scaledtensor.formats import FORMATS, Format
from scaledtensor.formats import get as get_format
from scaledtensor.recipes import Recipe
from scaledtensor.tensors.site import Site

__all__ = [
    "Wrapper",
    "as_bytes",
    "is_parameter",
    "is_wrapper",
    "rebuild",
    "refuse_capture",
    "refuse_jit",
    "with_autograd",
    "written_by",
]

T = TypeVar("T", bound="Wrapper")
S = TypeVar("S", bound=Tensor)


class Wrapper(Tensor):
    """A tensor of inner tensors.

    Attributes:
        INNER: the names of the inner tensors. Each is an attribute of the tensor.
        _EXTRAS: the names of inner tensors that only some tensors of the class have.
        _FACTS: the names of its other attributes on which the value depends.
        qdata: the first inner tensor, the elements.
        format: the number format of the elements.
        recipe: how matrix products cast this tensor.
        nonnegative: whether the rules know that no element is negative.
        site: measurements of the operands of a weight's products. Views of the weight share it.
    """

    INNER: tuple[str, ...]
    _EXTRAS: tuple[str, ...] = ()
    _FACTS: tuple[str, ...] = ("format", "recipe", "nonnegative")

    qdata: Tensor
    format: Format
    recipe: Recipe | None
    nonnegative: bool
    site: Site | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def put_together(cls, inner: Sequence[Tensor], shape: Sequence[int], context: Any) -> Self:
        """The tensor of a shape that consists of these tensors, one for each name in `INNER`."""
        raise NotImplementedError

    def like(self, *inner: Any) -> Self:
        """A tensor with this one's format, dtype and recipe around other tensors for `INNER`."""
        return self.put_together(inner, self.shape, self.context)

    @property
    def context(self) -> Any:
        """Format, dtype, recipe and the other facts by which the inner tensors are read."""
        return self.format, self.dtype, self.recipe, self.nonnegative

    @property
    def kind(self) -> str:
        """The name of this kind of tensor in files and messages."""
        return type(self).__name__

    def dequantize(self) -> Tensor:
        """The plain tensor of the same value, shape and dtype."""
        raise NotImplementedError

    def as_subclass(self, cls: type[S]) -> S:
        """This tensor as another subclass of `torch.Tensor`, as fastai's losses ask for. An object
        has one class, so another class than its own gets the value: `x.dequantize()`.
        Differentiable."""
        if isinstance(self, cls) and cls is not Tensor:
            return self
        return self.dequantize().as_subclass(cls)

    @property
    def cut(self) -> tuple[str, ...]:
        """The inner tensors that a part of this tensor on one rank has a part of."""
        return ("qdata",)

    @property
    def _fsdp_flattened(self) -> bool:
        # FullyShardedDataParallel asks this of each parameter first. Optimizers ask, too (Prodigy),
        # to learn whether they are in it.
        asks = sys._getframe(1).f_globals.get("__name__", "")
        if not asks.startswith("torch.distributed."):
            raise AttributeError(f"{self.kind} has no attribute '_fsdp_flattened'")
        raise UnsupportedError(
            "FullyShardedDataParallel copies its parameters into one flat tensor, where "
            f"{self.kind}s would have neither formats nor scales of their own: use "
            "torch.distributed.fsdp.fully_shard(model), which takes them as they are"
        )

    # --- torch.compile -----------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.INNER), self.context

    def _stable_hash_for_caching(self) -> str:
        # AOTAutograd's on-disk cache hashes the graph that Dynamo saw. That graph holds ATen
        # operators and not the rules behind them. Without the fingerprint, a changed rule would
        # run as it was.
        names, context = self.__tensor_flatten__()
        parts = [self._fingerprint(), *map(str, context)]
        for name in names:
            t = getattr(self, name)
            parts.append(f"{name}:{t.dtype}{tuple(t.shape)}{tuple(t.stride())}{t.device}")
        return "|".join((*parts, str(self.requires_grad)))

    @classmethod
    def _fingerprint(cls) -> str:
        """A digest of the code that runs the operators of this class."""
        raise NotImplementedError

    # --- values ------------------------------------------------------------------------------

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
        return f"{self.kind}({', '.join((body, *facts))})"

    def _spelled_scale(self) -> str:
        scale = float(self.scale)  # type: ignore[attr-defined]
        significand, exponent = math.frexp(scale)
        return f"2**{exponent - 1}" if significand == 0.5 else f"{scale:.6g}"

    # --- memory ------------------------------------------------------------------------------

    def new(self, *args: Any, **kwargs: Any) -> Any:
        # default_collate stacks into it: an empty tensor of the kind that a stack has.
        if args and isinstance(args[0], (torch.TypedStorage, torch.UntypedStorage)):
            return torch.stack([self.detach().flatten()[:0]])
        return super().new(*args, **kwargs)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of all inner tensors."""
        return sum(getattr(self, name).nbytes for name in self.INNER)

    def share_memory_(self) -> Self:
        for name in self.INNER:  # the wrapper has no memory
            getattr(self, name).share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(getattr(self, name).is_shared() for name in self.INNER)

    def data_ptr(self) -> int:
        raise StorageError(  # torch's own message names no way out
            f"a {self.kind} has no storage of its own; its parts ({', '.join(self.INNER)}) have "
            "one each. If safetensors asks for it, write the tensor by "
            "scaledtensor.checkpoint.save_safetensors(model_or_state_dict, path), with "
            "dequantized=True for a plain file; one plain tensor is x.dequantize(). For "
            "torch.distributed.checkpoint.async_save, give it "
            "scaledtensor.checkpoint.apart(state_dict)"
        )

    storage: Any = data_ptr  #: safetensors asks this next

    def apply_(self, function: Callable[[Any], Any]) -> Tensor:
        with torch.no_grad():
            return self.copy_(self.dequantize().apply_(function))

    # --- copies and files --------------------------------------------------------------------

    def _adopt(self, held: Any) -> None:
        """Become `held`, which is of the same class."""
        kind = getattr(held, "kind", "plain tensor")
        if kind != self.kind:
            raise UnsupportedError(
                f"a {self.kind} cannot become a {kind} by assigning `.data`; put a new "
                "nn.Parameter in its place"
            )
        with _torch.disable_torch_function():
            Tensor.data.__set__(self, held)  # type: ignore[attr-defined]
        for name in (*held._FACTS, *held.INNER):
            setattr(self, name, getattr(held, name))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            return cast(Self, memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied; use .detach() first")
        copy = self.like(*(getattr(self, name).clone() for name in self.INNER))
        copy.site = self.site and self.site.copied(copy)
        memo[id(self)] = copy = with_autograd(copy, self.requires_grad, is_parameter(self))
        if self.grad is not None and not is_parameter(self):  # nn.Parameter drops it
            with torch.no_grad():
                copy.grad = deepcopy(self.grad, memo)
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        inner = tuple(as_bytes(getattr(self, name)) for name in self.INNER)
        if self.site is not None:
            self.site.correct(self)
        history = None if self.site is None else self.site.own
        named = FORMATS.get(self.format.name) is self.format
        context = (self.format.name if named else self.format, *self._spelled_facts())
        flags: tuple[Any, ...] = (self.requires_grad, is_parameter(self))
        tags = self._tags()
        if tags or history is not None:
            flags += (history, tags) if tags else (history,)
        return rebuild, (type(self), inner, tuple(self.shape), context, *flags)

    def _tags(self) -> dict[str, Any]:
        """The attributes that a program gave to this parameter, as far as safe loading reads their
        values."""
        if not is_parameter(self):
            return {}
        return {k: v for k, v in vars(self).items() if not self._owns(k) and _is_simple(v)}

    def _owns(self, name: str) -> bool:
        """Whether an attribute belongs to this library or to torch."""
        listed = (*_OWN, *self._FACTS, *self.INNER, *self._EXTRAS)
        return name in listed or hasattr(type(self), name)

    def _spelled_facts(self) -> tuple[Any, ...]:
        """The context without the format, as types that safe loading reads."""
        return cast(tuple[Any, ...], self.context[1:])

    @classmethod
    def _unpickled(
        cls, inner: Sequence[Tensor], shape: Sequence[int], fmt: Format, *facts: Any
    ) -> Self:
        """The tensor of a pickle. `facts` are as `_spelled_facts` returned them."""
        qdata, *others = inner
        elements = qdata if qdata.dtype == fmt.storage_dtype else qdata.view(fmt.storage_dtype)
        return cls.put_together((elements, *others), shape, (fmt, *facts))

    # --- files -------------------------------------------------------------------------------

    @classmethod
    def kinds(cls) -> dict[str, tuple[str, ...]]:
        """The kinds of this class by their names in files, each with the names of the inner tensors
        that all tensors of the kind have."""
        return {cls.__name__: cls.INNER}

    def facts(self) -> dict[str, Any]:
        """The facts by which the codec rebuilds this tensor, beside the facts of every tensor."""
        return {}

    @classmethod
    def from_facts(
        cls,
        parts: Mapping[str, Tensor],
        shape: tuple[int, ...],
        context: tuple[Any, ...],
        facts: Mapping[str, Any],
    ) -> Self:
        """The tensor that has these parts and facts.

        Args:
            parts: the inner tensors by their names.
            shape: the shape of the tensor.
            context: format, dtype, recipe, and whether no element is negative.
            facts: all facts of the tensor, with those that `facts()` returned.

        Raises:
            ScaledTensorError, KeyError: parts and facts do not fit together.
        """
        raise NotImplementedError


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments of a call of an operator that it writes into."""
    # A collective writes into its first argument. The schemas of `c10d` do not say so.
    if func.namespace == "c10d" and func._opname.endswith("_") and args:
        yield from torch.utils._pytree.tree_leaves(args[0])
    if not func._schema.is_mutable:
        return
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    for a in func._schema.arguments:
        if a.alias_info is not None and a.alias_info.is_write and a.name in given:
            held = given[a.name]
            yield from held if isinstance(held, (list, tuple)) else [held]


def as_bytes(x: Tensor) -> Tensor:
    """`x` as uint8 if its elements are 8-bit floats, which torch cannot read back from a pickle."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 and not x.is_sparse else x


def rebuild(
    kind: type[T],
    inner: Sequence[Tensor],
    shape: Sequence[int],
    context: tuple[Any, ...],
    requires_grad: bool,
    is_parameter: bool,
    history: Tensor | None = None,
    tags: dict[str, Any] | None = None,
) -> T:
    """Unpickle a Wrapper. Safe loading (`weights_only=True`) allows this function by its name."""
    name, *facts = context
    made = kind._unpickled(inner, shape, get_format(name), *facts)
    made = with_autograd(made, requires_grad, is_parameter)
    made.site = None if history is None else Site(own=history)
    for key, value in (tags or {}).items():
        if not made._owns(key):  # a forged file might have other names
            setattr(made, key, value)
    return made


#: Attributes of tensors that belong to this library or to torch, beside those that classes have.
_OWN = ("_scale", "_rms", "loop", "_is_param", "_keeps_step_hooks", "_dynamo_static_input_type")


def _is_simple(x: Any) -> bool:
    """Whether `x` consists of numbers, strings, None, tuples, lists and dictionaries."""
    if isinstance(x, dict):
        return all(_is_simple(part) for pair in x.items() for part in pair)
    if isinstance(x, (tuple, list)):
        return all(map(_is_simple, x))
    return x is None or type(x) in (bool, int, float, str)


def refuse_jit(cls: type[Tensor]) -> None:
    """Raise an error inside `torch.jit.trace`, which records inner tensors as constants or not at
    all.

    Raises:
        UnsupportedError: `torch.jit.trace` is recording.
    """
    if torch.jit.is_tracing():  # type: ignore[no-untyped-call, attr-defined]
        raise UnsupportedError(
            f"torch.jit.trace does not record what a {cls.__name__} computes: use "
            "torch.export.export, or trace the plain model that unscale_model(model) makes"
        )


def refuse_capture(x: Tensor) -> None:
    """Raise an error while a CUDA graph records eager operators. The graph would keep the scales of
    today as constants of its kernels, and multiply by them after a rebalance.

    Raises:
        UnsupportedError: A CUDA graph is being recorded on the device of `x`.
    """
    if backend_of(x).is_capturing() and not torch.compiler.is_compiling():
        raise UnsupportedError(
            "a CUDA graph does not record eager operators of a ScaledTensor, whose scales are "
            'numbers of the host: use torch.compile(model, mode="reduce-overhead"), which reads '
            "scales on the device and records the graph itself"
        )


def is_parameter(x: Tensor) -> bool:
    """Whether `x` is an nn.Parameter, which for a subclass is a flag."""
    return isinstance(x, torch.nn.Parameter)


def is_wrapper(x: Any) -> TypeGuard[Wrapper]:
    """Whether `x` is a tensor of inner tensors: scaled, coded or quantised."""
    return isinstance(x, Wrapper)


def with_autograd(x: T, requires_grad: bool, is_parameter: bool) -> T:
    """`x` as the parameter, or with the `requires_grad`, that its original had."""
    if is_parameter:
        return cast(T, torch.nn.Parameter(x, requires_grad))
    return cast(T, x.requires_grad_(requires_grad))


torch.serialization.add_safe_globals([rebuild])


# --- plain tensors that take the data of a Wrapper -----------------------------------------------


def _may_take(keys: Any, x: Tensor, data: Tensor) -> bool:
    """The question that the assignment `x.data = data` asks before `x` takes the memory of `data`.

    A Wrapper has no memory, and torch's own answer lets a plain `x` take it nevertheless. The next
    operator on `x` would end the process. So the wrapper gets memory with its values first.

    Raises:
        UnsupportedError: the assignment is traced.
    """
    if is_wrapper(data) and not is_wrapper(x):
        if _torch.is_tracing(data.qdata):
            raise UnsupportedError(
                f"compiled code assigns a {data.kind} to the `.data` of a plain tensor: write the "
                "values by `.copy_(x)`, or assign x.dequantize()"
            )
        _fill(data)
    rest = keys.remove(keys.highestPriorityTypeId())
    answer: bool = _QUESTION.redispatch(rest, x, data)
    return answer


def _fill(x: Wrapper) -> None:
    """Give the wrapper of `x` memory with its values, in its geometry."""
    with torch.no_grad(), _torch.disable_torch_function():
        values, start = x.dequantize(), x.storage_offset()
        end = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
        memory = values.new_empty(start + end if x.numel() else 0)
        target = memory.as_strided(x.shape, x.stride(), start)
        for dim, step in enumerate(x.stride()):
            if step == 0 and x.shape[dim]:  # an expanded dimension holds one element
                target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        target.copy_(values)
        place = memory.untyped_storage(), start, x.shape, x.stride()
        _torch.reshape_wrapper(torch.ops.aten.set_.source_Storage_storage_offset, x, *place)


_QUESTION: Any = torch.ops.aten._has_compatible_shallow_copy_type.default
_ATEN = torch.library.Library("aten", "IMPL")
# Under this key torch asks for tensors of subclasses alone.
_ATEN.impl("_has_compatible_shallow_copy_type", _may_take, "PythonTLSSnapshot", with_keyset=True)
