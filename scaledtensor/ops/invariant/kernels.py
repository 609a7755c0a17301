"""The operators of ATen that the setting replaces or refuses, and how the replacement runs.

A replacement is a kernel of the dispatch key CPU. All spellings of an operator end there, also
calls from C++ and from the rules of ScaledTensors, and autograd stays above it.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import UnsupportedError
from scaledtensor.ops.invariant import attention, elementwise, products, reductions

__all__ = ["REFUSED", "REPLACED", "kernels"]

_HOST, _COMPOSITE = "CPU", "CompositeImplicitAutograd"
#: Keys of tensors for which there is no kernel of a fixed order.
_ELSEWHERE = ("CUDA", "XPU", "MPS", "SparseCPU", "SparseCsrCPU")

aten = torch.ops.aten

_PRODUCTS: dict[str, Any] = {
    "mm": products.mm,
    "bmm": products.bmm,
    "mv": products.mv,
    "dot": products.dot,
    "vdot": products.dot,
    "addmm": products.addmm,
    "addmv": products.addmv,
    "addbmm": products.addbmm,
    "baddbmm": products.baddbmm,
    "_addmm_activation": products.addmm_activation,
}

#: Name of a functional operator -> the function that replaces it and its in-place and out= forms.
REPLACED: dict[str, Callable[..., Any]] = {
    **_PRODUCTS,
    "_scaled_dot_product_flash_attention_for_cpu": attention.flash,
    "sum": reductions.sum_of_all,
    "sum.dim_IntList": reductions.summed,
    "mean": reductions.mean_of_all,
    "mean.dim": reductions.mean,
    "var.correction": reductions.var,
    "var_mean.correction": reductions.var_mean,
    "std.correction": reductions.std,
    "std_mean.correction": reductions.std_mean,
    "linalg_vector_norm": reductions.vector_norm,
    "_softmax": reductions.softmax,
    "_log_softmax": reductions.log_softmax,
    "logsumexp": reductions.logsumexp,
    "glu": elementwise.glu,
    "native_batch_norm": reductions.batch_norm,
    "pow.Tensor_Scalar": elementwise.power,
    **dict.fromkeys(elementwise.UNARY, elementwise.of_one),
    **dict.fromkeys(elementwise.BINARY, elementwise.of_two),
}

_RECURRENT = "switch off this kernel with torch.backends.mkldnn.flags(enabled=False)"
_FAST_PATH = "torch.backends.mha.set_fastpath_enabled(False) runs the operators one by one"
_PACKED = "multiply by the dequantised weight, in torch.nn.functional.linear"
_UNFOLD = "write it as torch.nn.functional.unfold and a product"
_REAL = "write it in real numbers, as rotary positions with a cosine and a sine"
_OUTSIDE = "run it outside of the setting, or write it as products and sums"

#: Name of an operator without a fixed order -> what to do instead.
REFUSED: dict[str, str] = {
    **dict.fromkeys(("convolution", "_convolution"), _UNFOLD),
    **dict.fromkeys(("_transformer_encoder_layer_fwd", "_native_multi_head_attention"), _FAST_PATH),
    **dict.fromkeys(
        ("_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu", "_scaled_mm"),
        _PACKED,
    ),
    "mkldnn_rnn_layer": _RECURRENT,
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), _OUTSIDE),
    **dict.fromkeys(("_cdist_forward", "_trilinear", "_pdist_forward"), _OUTSIDE),
    **dict.fromkeys(("prod", "prod.dim_int", "nansum"), _OUTSIDE),
    **dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c"), _OUTSIDE),
    # Products of complex numbers round differently in some positions.
    **dict.fromkeys(("view_as_complex", "complex", "polar"), _REAL),
}


Kernel = tuple[str, str, Callable[..., Any]]


@cache
def kernels() -> tuple[Kernel, ...]:
    """Return (operator, dispatch key, kernel). A kernel gets its keys before the arguments."""
    return tuple(_kernels())


def _kernels() -> Iterator[Kernel]:
    for name, function in REPLACED.items():
        functional = _overload(name)
        torchs = torch.library.get_kernel(functional, _HOST)
        yield _spelled(functional), _HOST, partial(_replaced, function, torchs, torchs, None)
        for form in _forms(functional):
            if _torch.functional_twin(form) is functional:
                own = torch.library.get_kernel(form, _HOST)
                outs = tuple(a.name for a in form._schema.arguments if a.is_out)
                yield _spelled(form), _HOST, partial(_replaced, function, torchs, own, outs)
    composite = _overload("scaled_dot_product_attention")
    torchs = torch.library.get_kernel(composite, _HOST)
    yield _spelled(composite), _COMPOSITE, partial(_attention, torchs)
    for name, instead in REFUSED.items():
        overload = _overload(name)
        own = torch.library.get_kernel(overload, _HOST)
        yield _spelled(overload), _HOST, partial(_refused, own, name, instead)
    for name in _PRODUCTS:
        for key in _ELSEWHERE:
            yield _spelled(_overload(name)), key, partial(_absent, name, key)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _forms(functional: Any) -> Iterator[Any]:
    """Yield the overloads of an operator and of its in-place spelling."""
    name = functional._schema.name.removeprefix("aten::")
    for packet in (functional.overloadpacket, getattr(aten, f"{name}_", None)):
        for overload in () if packet is None else packet.overloads():
            yield getattr(packet, overload)


def _spelled(overload: Any) -> str:
    name: str = overload._schema.name
    return f"{name}.{overload._schema.overload_name}".rstrip(".")


def _replaced(
    function: Callable[..., Any],
    torchs: Any,
    own: Any,
    outs: tuple[str, ...] | None,
    keys: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a replacement. `outs` are the names of out= arguments: none for an in-place form. It is
    None for a functional form.

    Gradients are computed by torch's own operators, which are faster: they depend on the batch
    anyway. Sums of whole numbers are exact in any order.
    """
    if function is elementwise.of_two:
        args = elementwise.as_tensors(*args)
    if _torch.is_within_backward() or not _is_real(args):
        return own.call_boxed(keys, *args, **kwargs)
    made = _in_order(function, partial(torchs.call_boxed, keys), args, kwargs, outs or ())
    if outs is None:
        return made
    targets = [kwargs[name] for name in outs] or [args[0]]
    for target, result in zip(targets, (made,) if isinstance(made, Tensor) else made, strict=True):
        if target.shape != result.shape:
            target.resize_(result.shape)
        target.copy_(result)
    return targets[0] if len(targets) == 1 else tuple(targets)


def _in_order(
    function: Callable[..., Any], torchs: Any, args: Any, kwargs: Any, outs: tuple[str, ...]
) -> Any:
    """Run a replacement. Function modes and classes of tensors do not see the calls in it."""
    given = {name: x for name, x in kwargs.items() if name not in outs} if outs else kwargs
    if not _torch.is_watched() and all(type(x) in _UNSEEN for x in args):
        return function(torchs, *args, **given)
    with _torch.without_function_modes(), _torch.disable_torch_function():
        return function(torchs, *map(_plain, args), **given)


_UNSEEN = {Tensor, int, float, bool, list, type(None)}


def _attention(torchs: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    return attention.contiguous_heads(partial(torchs.call_boxed, keys), *args, **kwargs)


def _plain(x: Any) -> Any:
    """Return a tensor without its Python class: a loop in C++ reads its memory."""
    return x.as_subclass(Tensor) if isinstance(x, Tensor) and type(x) is not Tensor else x


def _is_real(args: Any) -> bool:
    for x in args:
        if isinstance(x, Tensor) and (x.dim() or len(args) == 1):
            return x.dtype.is_floating_point and x.dtype.itemsize > 1
    return any(isinstance(x, Tensor) and x.dtype.is_floating_point for x in args)


def _refused(own: Any, name: str, instead: str, keys: Any, *args: Any, **kwargs: Any) -> Any:
    if _torch.is_within_backward() or not _is_real(args):
        return own.call_boxed(keys, *args, **kwargs)
    raise UnsupportedError(
        f"{name} has no fixed order of additions under scaledtensor.batch_invariant; {instead}"
    )


def _absent(name: str, key: str, keys: Any, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        f"scaledtensor.batch_invariant fixes the order of additions of dense tensors on a CPU; got "
        f"{name} of {key} tensors. Move the model and its inputs to the CPU, or leave the setting"
    )
