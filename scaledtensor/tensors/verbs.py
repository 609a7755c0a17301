"""The verbs of a ScaledTensor as torch operators, with their derivatives.

They are torch operators rather than `autograd.Function`s so that Dynamo, AOTAutograd and export see
one node each. What they compute is a rule like any other and lives in
`scaledtensor.ops.rules.casts`.
Two kinds never mix: a cast changes the format and never the scale; a rescale changes the scale and
never the format.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from scaledtensor.errors import DTypeError, UnsupportedError
from scaledtensor.formats import FP32
from scaledtensor.scales.powers import MAX_SCALE, MIN_SCALE
from scaledtensor.tensors import site
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = [
    "GRADIENT",
    "LIBRARY",
    "corrected",
    "counted",
    "delayed_scale",
    "dequantize",
    "drop",
    "expect",
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
]

LIBRARY = torch.library.Library("scaledtensor", "DEF")  # type: ignore[no-untyped-call]


def operator(schema: str, backward: Callable[..., Any], setup: Callable[..., None]) -> Any:
    """Define `scaledtensor::<schema>` with a derivative; return its overload."""
    name = LIBRARY.define(schema)  # type: ignore[no-untyped-call]

    def without_scale(*args: Any) -> Tensor:
        raise DTypeError(
            f"scaledtensor::{name} takes a ScaledTensor; got a plain tensor. "
            "Wrap it first with scaledtensor.scaled(tensor)"
        )

    LIBRARY.impl(name, without_scale, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_autograd(
        f"scaledtensor::{name}", backward, setup_context=setup, lib=LIBRARY
    )
    return getattr(torch.ops.scaledtensor, name).default


def _remember_format(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.source = inputs[0].format
    ctx.others = (None,) * (len(inputs) - 1)


def _to_source_format(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # As torch's own casts do: the gradient arrives in the format of what was cast. A gradient of
    # an FP8 source stays in the wider format it came in.
    narrow = ctx.source.storage_dtype.itemsize == 1
    if isinstance(grad, ScaledTensor) and grad.format != ctx.source and not narrow:
        grad = to_format(grad, ctx.source.name)
    return grad, *ctx.others


def _remember_target(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.target, ctx.rounding, ctx.shift, ctx.factors, ctx.counts, ctx.rows = inputs[1:]
    _remember_scale(ctx, inputs, output)


def _round_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    held = shifted(_as_scaled(ctx, grad), ctx.shift)
    if ctx.factors is not None:
        held = corrected(held, ctx.factors, site.GRADIENT)
    made = to_format(held, ctx.target, ctx.rounding)
    if ctx.counts:
        made = counted(made, ctx.factors, site.GRADIENT, True, ctx.rows)
    return made, *(None,) * 6


def _remember_cast(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.cast = inputs[1]
    _remember_scale(ctx, inputs, output)


def _quantize_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    held = _as_scaled(ctx, grad)
    if held.qdata.dtype.itemsize == 1:  # cast already, by a history
        return held, None
    return quantize(held, ctx.cast), None


#: The row of gradients in a history (`scaledtensor.ops.products.delayed`).
GRADIENT = 2


def _remember_history(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.history, ctx.cast = inputs[1:]
    _remember_scale(ctx, inputs, output)


def _delay_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    held = _as_scaled(ctx, grad)
    scale = delayed_scale(held, ctx.history, ctx.cast, GRADIENT, True)
    return quantize_under(held, scale, ctx.cast), None, None


def _nothing(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pass


def _pass(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad, *ctx.others


def _count_others(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.others = (None,) * (len(inputs) - 1)


def _remember_scale(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # Not the tensor itself: that would keep its elements until the backward pass.
    ctx.scale, ctx.dtype, ctx.recipe = inputs[0].scale, inputs[0].dtype, inputs[0].recipe


def _divide_by_scale(ctx: Any, grad: Tensor) -> Tensor:
    # y = x / s: the chain rule moves only the gradient's scale.
    return cast(Tensor, _as_scaled(ctx, grad) / ctx.scale)


def _restore_plain(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return (dequantize(grad) if isinstance(grad, ScaledTensor) else grad), None


def _as_scaled(ctx: Any, grad: Tensor) -> ScaledTensor:
    # Gradients are plain where the forward result was (a loss, a statistic).
    if isinstance(grad, ScaledTensor):
        return grad
    like = ScaledTensor.make(ctx.scale, ctx.scale, ctx.scale, FP32, ctx.dtype, ctx.recipe)
    return cast(ScaledTensor, promote(grad, like))


#: (x, format name, rounding) -> x with its elements rounded into `format`, saturating.
to_format = operator(
    'to_format(Tensor x, str format, str rounding="nearest_even") -> Tensor',
    _to_source_format,
    _remember_format,
)

#: (x, format name, rounding, shift, factors, counts, rows) -> x itself; its gradient is rounded
#: into `format` on the way back, under its scale times 2^shift, or times the factor in
#: `Site.lends`; compiled code that `counts` looks at it as `counted` does.
gradient_to_format = operator(
    'gradient_to_format(Tensor x, str format, str rounding="nearest_even", int shift=0, '
    "Tensor? factors=None, bool counts=False, bool rows=False) -> Tensor",
    _round_gradient,
    _remember_target,
)

#: (x, cast) -> x with its elements rounded as a recipe's `Cast.spec` says, under another scale.
quantize = operator("quantize(Tensor x, str cast) -> Tensor", _to_source_format, _remember_format)

#: (x, cast) -> x itself; its gradient is rounded as the `Cast.spec` says on the way back.
gradient_quantize = operator(
    "gradient_quantize(Tensor x, str cast) -> Tensor", _quantize_gradient, _remember_cast
)

#: (x, history, Cast.spec, row, whether to record) -> the scale by a history, which is written to.
#: Graphs do not see that: for them it is what a site knows (`scaledtensor.tensors.site`).
LIBRARY.define(  # type: ignore[no-untyped-call]
    "delayed_scale(Tensor x, Tensor history, str cast, int row, bool record) -> Tensor"
)
delayed_scale = torch.ops.scaledtensor.delayed_scale.default

#: (x, scale, Cast.spec) -> as `quantize`, under that scale.
quantize_under = operator(
    "quantize_under(Tensor x, Tensor scale, str cast) -> Tensor",
    _to_source_format,
    _remember_format,
)

#: (x, history, Cast.spec) -> x itself; its gradient is cast by its row of the history.
gradient_delayed = operator(
    "gradient_delayed(Tensor x, Tensor history, str cast) -> Tensor",
    _delay_gradient,
    _remember_history,
)

#: (x, 0-dim power of two) -> the same value held under another scale.
rescale = operator("rescale(Tensor x, Tensor scale) -> Tensor", _pass, _count_others)


def shifted(x: ScaledTensor, shift: int) -> ScaledTensor:
    """The same value under the scale times 2^shift, as far as there is such a float32."""
    if shift == 0:
        return x
    scale = (x.scale.double() * 2.0**shift).clamp(MIN_SCALE, MAX_SCALE).float()
    return cast(ScaledTensor, rescale(x, scale))


#: (x, factors of a weight, role) -> the same value under the scale times the factor of that role.
corrected = operator(
    "corrected(Tensor x, Tensor factors, int role) -> Tensor", _pass, _count_others
)

#: (x, factors of a weight, role, whether the code trains, whether products take x as a matrix) ->
#: x, an operand that was cast for a product of the weight; see `ops/products/counted.py`.
counted = operator(
    "counted(Tensor x, Tensor factors, int role, bool trains, bool rows) -> Tensor",
    _pass,
    _count_others,
)

#: (x, growth) -> the same value, whose RMS is known to be `growth` times what a rule said.
expect = operator("expect(Tensor x, float growth) -> Tensor", _pass, _count_others)

#: x -> the same qdata at scale 1, that is x / x.scale.
drop = operator("drop(Tensor x) -> Tensor", _divide_by_scale, _remember_scale)

#: x -> a plain tensor of the same value and dtype.
dequantize = operator("dequantize(Tensor x) -> Tensor", lambda ctx, grad: grad, _nothing)

#: (plain or scaled, like) -> a ScaledTensor; a plain one gets the power of two next to its RMS.
promote = operator("promote(Tensor x, Tensor like) -> Tensor", _restore_plain, _nothing)


# --- products of which each casts its operands for itself ------------------------------------


def _remember_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, kept_a, kept_b, ctx.gemms = inputs
    _remember_scale(ctx, (output,), output)
    # What is kept of an operand stands for it; where nothing is, it is kept itself.
    for side, x, kept in (("a", a, kept_a), ("b", b, kept_b)):
        setattr(ctx, side, (x.scale, x.rms, x.shape, x.format))
        setattr(ctx, f"kept_{side}", len(kept))
    # Of a frozen weight, or an input without a gradient, one operand suffices.
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


def _no_gradient(ctx: Any, *grads: Tensor) -> Any:
    raise UnsupportedError(
        "a product whose recipe casts the operands of each of its three products for themselves has"
        " no second derivative; take a recipe of one scale for a tensor, such as Current()"
    )


#: (x, Cast.spec, the dimension that is summed, -1 or -2, whether mixed) -> codes and scales.
keep = operator(
    "keep(Tensor x, str cast, int dim, bool hadamard) -> Tensor[]", _no_gradient, _nothing
)

#: (a, b, what is kept of a for wgrad, of b for dgrad, Gemms.spec) -> a @ b, of matrices or batches.
product = operator(
    "product(Tensor a, Tensor b, Tensor[] kept_a, Tensor[] kept_b, str gemms) -> Tensor",
    _product_gradients,
    _remember_operands,
)

#: (dy; the other operand, or what is kept of it; its scale, RMS and shape; "dgrad" or "wgrad";
#: Gemms.spec) -> the gradient of an operand of `product`.
product_gradient = operator(
    "product_gradient(Tensor grad, Tensor? other, Tensor[] kept, Tensor scale, Tensor rms, "
    "SymInt[] shape, str gemm, str gemms) -> Tensor",
    _no_gradient,
    _nothing,
)


# --- operators that are defined with the rules of what they are parts of ---------------------


def _define_others(name: str) -> Any:
    """What Python asks for a name that is not in `torch.ops.scaledtensor`, before torch itself: an
    exported program may name an operator when no tensor has brought the rules yet."""
    vars(torch.ops.scaledtensor).pop("__getattr__", None)
    import_module("scaledtensor.ops")
    raise AttributeError(name)  # now torch looks it up


vars(torch.ops.scaledtensor)["__getattr__"] = _define_others
