"""The verbs of a ScaledTensor: torch operators, each with its derivative.

They are torch operators rather than `autograd.Function`s so that Dynamo, AOTAutograd and export see
one node each. This module defines their schemas and derivatives. Rules compute them, as they
compute other operators (`scaledtensor.ops.rules.casts`).

Two kinds never mix: a cast changes the format and never the scale; a rescale changes the scale and
never the format. The sections are casts of a tensor, casts of its gradient, scales, plain tensors,
and products.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from scaledtensor.backends import backend_of
from scaledtensor.errors import DTypeError, UnsupportedError
from scaledtensor.formats import FP32
from scaledtensor.scales.powers import MAX_SCALE, MIN_SCALE
from scaledtensor.scales.singles import Single, scale_of, tensor_of
from scaledtensor.tensors import site
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = [
    "GRADIENT",
    "LIBRARY",
    "delayed_scale",
    "dequantize",
    "drop",
    "expect",
    "fit",
    "gradient_delayed",
    "gradient_quantize",
    "gradient_to_format",
    "keep",
    "operator",
    "product",
    "product_gradient",
    "promote",
    "quantize",
    "quantize_under",
    "rescale",
    "shifted",
    "to_format",
    "to_format_at",
]

LIBRARY = torch.library.Library("scaledtensor", "DEF")

Backward = Callable[..., Any]
Setup = Callable[[Any, tuple[Any, ...], Any], None]


def operator(schema: str, backward: Backward, setup: Setup) -> Any:
    """Define `scaledtensor::<schema>` with a derivative; return its overload."""
    name = LIBRARY.define(schema)

    def without_scale(*args: Any) -> Tensor:
        raise DTypeError(
            f"scaledtensor::{name} takes a ScaledTensor; got a plain tensor. "
            "Wrap it first with scaledtensor.scaled(tensor)"
        )

    LIBRARY.impl(name, without_scale, "CompositeExplicitAutograd")
    torch.library.register_autograd(
        f"scaledtensor::{name}", backward, setup_context=setup, lib=LIBRARY
    )
    return getattr(torch.ops.scaledtensor, name).default


def _remember_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _remember_scale(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    # Not the tensor itself, whose elements would stay in memory until the backward pass.
    x = inputs[0]
    number = None if backend_of(x).host else scale_of(x)
    ctx.scale = tensor_of(number, x.device) if isinstance(number, Single) else x.scale
    ctx.dtype, ctx.recipe = x.dtype, x.recipe


def _as_scaled(ctx: Any, grad: Tensor) -> ScaledTensor:
    # The gradient of a plain result (a loss, a statistic) is plain.
    if isinstance(grad, ScaledTensor):
        return grad
    like = ScaledTensor.make(ctx.scale, ctx.scale, ctx.scale, FP32, ctx.dtype, ctx.recipe)
    return cast(ScaledTensor, promote(grad, like))


# --- casts of a tensor -----------------------------------------------------------------------


def _remember_format(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.source = inputs[0].format
    ctx.others = (None,) * (len(inputs) - 1)


def _to_source_format(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # The gradient of a cast arrives in the format of its source, as in torch's own casts. The
    # gradient of an FP8 source stays in the wider format that it has.
    narrow = ctx.source.storage_dtype.itemsize == 1
    if isinstance(grad, ScaledTensor) and grad.format != ctx.source and not narrow:
        grad = to_format(grad, ctx.source.name)
    return grad, *ctx.others


#: `x` with its elements rounded into the format of that name. The scale stays; 8 bits saturate.
#: With `unless_wild=True`, traced code leaves `x` as it is if its RMS is `wild`
#: (`scaledtensor.ops.plausible`).
to_format = operator(
    'to_format(Tensor x, str format, str rounding="nearest_even", bool unless_wild=False) '
    "-> Tensor",
    _to_source_format,
    _remember_format,
)

#: `to_format` of the value of `x` under its scale times the factor of a role: an element of the
#: `factors` that the site of a weight lends. If `counts` is true, the site looks at the result when
#: the code runs (`ops/products/counted.py`). `trains` says whether the code trains.
to_format_at = operator(
    "to_format_at(Tensor x, str format, str rounding, Tensor factors, int role, bool counts, "
    "bool trains) -> Tensor",
    _to_source_format,
    _remember_format,
)

#: `x` with its elements rounded under another scale, both as a `Cast` (its `spec`) says.
quantize = operator("quantize(Tensor x, str cast) -> Tensor", _to_source_format, _remember_format)

#: Works like `quantize`, under the given scale.
quantize_under = operator(
    "quantize_under(Tensor x, Tensor scale, str cast) -> Tensor",
    _to_source_format,
    _remember_format,
)

#: The row of gradients in a history (`scaledtensor.ops.products.delayed`).
GRADIENT = 2

#: The scale for a cast of `x` by the amaxes of earlier steps, which are a row of `history`. If
#: `record` is true, the amax of `x` is written into the history. The schema does not tell graphs of
#: this write; a site accounts for it (`scaledtensor.tensors.site`).
LIBRARY.define("delayed_scale(Tensor x, Tensor history, str cast, int row, bool record) -> Tensor")
delayed_scale = torch.ops.scaledtensor.delayed_scale.default


# --- casts of a gradient: the operator returns `x` itself ------------------------------------


def _remember_target(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.target, ctx.rounding, ctx.shift, ctx.factors, ctx.counts, ctx.fits = inputs[1:]
    _remember_scale(ctx, inputs, output)


def _round_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    held = shifted(_as_scaled(ctx, grad), ctx.shift)
    if ctx.fits:
        held = fit(held, ctx.target, True)
    if ctx.factors is None:
        made = to_format(held, ctx.target, ctx.rounding)
    else:
        how = ctx.target, ctx.rounding, ctx.factors, site.GRADIENT, ctx.counts, True
        made = to_format_at(held, *how)
    return made, *(None,) * 6


#: The gradient of `x` is rounded into the format, as `to_format` does. Before that its scale is
#: multiplied by 2^shift. With `factors`, it is rounded as `to_format_at` does. `fits` is true for a
#: product without a weight in traced code: its gradient is cast as `fit` makes it, and its RMS is
#: marked for `fit`.
gradient_to_format = operator(
    'gradient_to_format(Tensor x, str format, str rounding="nearest_even", int shift=0, '
    "Tensor? factors=None, bool counts=False, bool fits=False) -> Tensor",
    _round_gradient,
    _remember_target,
)


def _remember_cast(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.cast = inputs[1]
    _remember_scale(ctx, inputs, output)


def _quantize_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    held = _as_scaled(ctx, grad)
    if held.qdata.dtype.itemsize == 1:  # a history has cast it
        return held, None
    return quantize(held, ctx.cast), None


#: The gradient of `x` is cast as `quantize` does.
gradient_quantize = operator(
    "gradient_quantize(Tensor x, str cast) -> Tensor", _quantize_gradient, _remember_cast
)


def _remember_history(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.history, ctx.cast = inputs[1:]
    _remember_scale(ctx, inputs, output)


def _delay_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    held = _as_scaled(ctx, grad)
    scale = delayed_scale(held, ctx.history, ctx.cast, GRADIENT, True)
    return quantize_under(held, scale, ctx.cast), None, None


#: The gradient of `x` is cast under the `delayed_scale` of the row of gradients in `history`.
gradient_delayed = operator(
    "gradient_delayed(Tensor x, Tensor history, str cast) -> Tensor",
    _delay_gradient,
    _remember_history,
)


# --- scales ----------------------------------------------------------------------------------


def _count_others(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.others = (None,) * (len(inputs) - 1)


def _pass(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad, *ctx.others


#: The value of `x` under another scale, a 0-dim power of two.
rescale = operator("rescale(Tensor x, Tensor scale) -> Tensor", _pass, _count_others)


def shifted(x: ScaledTensor, shift: int) -> ScaledTensor:
    """The value of `x` under its scale times 2^shift, within the range of scales."""
    if shift == 0:
        return x
    scale = (x.scale.double() * 2.0**shift).clamp(MIN_SCALE, MAX_SCALE).float()
    return cast(ScaledTensor, rescale(x, scale))


#: The value of `x` under a scale by which a cast to the format loses nothing, if its scale follows
#: from the result of a product without a weight; otherwise `x` itself. It is for traced code, where
#: eager code measures on the host (`ops/products/sites.py`). `marks` is true for the gradient of
#: such a product: the gradients that follow from it are measured in the same way.
fit = operator("fit(Tensor x, str format, bool marks=False) -> Tensor", _pass, _count_others)

#: The value of `x`, whose RMS is known to be `growth` times the RMS that a rule expected.
expect = operator("expect(Tensor x, float growth) -> Tensor", _pass, _count_others)


def _divide_by_scale(ctx: Any, grad: Tensor) -> Tensor:
    # y = x / s: the chain rule moves only the gradient's scale.
    return cast(Tensor, _as_scaled(ctx, grad) / ctx.scale)


drop = operator("drop(Tensor x) -> Tensor", _divide_by_scale, _remember_scale)
drop.__doc__ = """drop(x): the elements of a ScaledTensor under scale 1, which is x / x.scale.

The result is a ScaledTensor of the shape and format of `x`. Its gradient with respect to `x` is the
incoming gradient divided by `x.scale`."""


# --- plain tensors ---------------------------------------------------------------------------

#: The plain tensor of the same value and dtype.
dequantize = operator("dequantize(Tensor x) -> Tensor", lambda ctx, grad: grad, _remember_nothing)


def _restore_plain(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return (dequantize(grad) if isinstance(grad, ScaledTensor) else grad), None


#: `x` itself if it is a ScaledTensor; a plain `x` under the power of two nearest to its RMS, with
#: the recipe of `like`.
promote = operator("promote(Tensor x, Tensor like) -> Tensor", _restore_plain, _remember_nothing)


# --- products, if each of the three casts its own operands -----------------------------------


def _no_gradient(ctx: Any, *grads: Tensor) -> Any:
    raise UnsupportedError(
        "a product whose recipe casts the operands of each of its three products for themselves has"
        " no second derivative; take a recipe of one scale for a tensor, such as Current()"
    )


def _remember_operands(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, kept_a, kept_b, ctx.gemms = inputs
    _remember_scale(ctx, (output,), output)
    # The backward pass reads the codes of an operand if there are any, else the operand itself.
    for side, x, kept in (("a", a, kept_a), ("b", b, kept_b)):
        setattr(ctx, side, (x.scale, x.rms, x.shape, x.format))
        setattr(ctx, f"kept_{side}", len(kept))
    # If one of the two has no gradient (a frozen weight, an input), the other is not read.
    of_a = (kept_a or (a,)) if b.requires_grad else ()
    of_b = (kept_b or (b,)) if a.requires_grad else ()
    ctx.count = len(of_a)
    ctx.save_for_backward(*of_a, *of_b)


def _product_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dy = _as_scaled(ctx, grad)
    saved = list(ctx.saved_tensors)
    parts = {"a": (saved[: ctx.count], ctx.kept_a), "b": (saved[ctx.count :], ctx.kept_b)}

    def gradient(gemm: str, of: str, other: str) -> Tensor:
        tensors, kept = parts[other]
        scale, rms, shape, _ = getattr(ctx, other)
        itself, coded = (None, tensors) if kept else (tensors[0], [])
        found: Tensor = product_gradient(dy, itself, coded, scale, rms, shape, gemm, ctx.gemms)
        fmt = getattr(ctx, of)[3]
        wide = fmt.storage_dtype.itemsize > 1 and cast(ScaledTensor, found).format != fmt
        return cast(Tensor, to_format(found, fmt.name)) if wide else found

    da = gradient("dgrad", "a", "b") if ctx.needs_input_grad[0] else None
    db = gradient("wgrad", "b", "a") if ctx.needs_input_grad[1] else None
    return da, db, [None] * ctx.kept_a, [None] * ctx.kept_b, None


#: The codes and scales of `x` that the backward pass reads. A product sums over dimension `dim`, -1
#: or -2; `hadamard` says whether a Hadamard transform mixes its elements first.
keep = operator(
    "keep(Tensor x, str cast, int dim, bool hadamard) -> Tensor[]", _no_gradient, _remember_nothing
)

#: `a @ b`, of matrices or batches of matrices. `kept_a` and `kept_b` are the results of `keep` that
#: wgrad and dgrad read; `gemms` is a `Gemms.spec`.
product = operator(
    "product(Tensor a, Tensor b, Tensor[] kept_a, Tensor[] kept_b, str gemms) -> Tensor",
    _product_gradients,
    _remember_operands,
)

#: The gradient of one operand of `product`. `other` is the other operand, or None if `kept` holds
#: its codes; `scale`, `rms` and `shape` are its facts. `gemm` is "dgrad" or "wgrad".
product_gradient = operator(
    "product_gradient(Tensor grad, Tensor? other, Tensor[] kept, Tensor scale, Tensor rms, "
    "SymInt[] shape, str gemm, str gemms) -> Tensor",
    _no_gradient,
    _remember_nothing,
)


# --- operators that modules of rules define --------------------------------------------------


def _define_others(name: str) -> Any:
    """Load the rules if a program asks for an operator that is not in `torch.ops.scaledtensor` yet.

    An exported program may name such an operator before any tensor has loaded the rules.
    """
    vars(torch.ops.scaledtensor).pop("__getattr__", None)
    import_module("scaledtensor.ops")
    raise AttributeError(name)  # now torch looks it up


vars(torch.ops.scaledtensor)["__getattr__"] = _define_others
