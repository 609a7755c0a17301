"""What an operator keeps for its backward pass, in 8 bits (COAT, Xi et al. 2024, arXiv 2410.19313).

Under a recipe with `saved`, each function of the table below runs as an operator of its own: the
same rule computes the result, to the bit, and what the derivative reads is kept as codes of that
format in groups of 16 along the last dimension, with the power of two of each group, one byte:

    kept = code * 2^k * scale,  2^k the least under which no element of its group saturates

That is 17/16 bytes an element. A float32 amax / max for each group would take 20/16: of E4M3 codes
on Gaussians the relative error of an element is then 0.026 RMS instead of 0.027, that of the tensor
0.022 instead of 0.027.

What is kept is an input wherever one suffices, so that the derivative is that of the function at
one point next to the true one:

- of elementwise functions the input: 1 - y^2 of a kept tanh y has 2.5 times the error; of relu and
  leaky_relu its sign alone, which is exact;
- of norms the input; mean and deviation, a number a row, stay float32;
- of a product both factors, and of a power its base;
- of attention q, k and v: its output is computed again, one forward kernel more and a tensor less.
  The rows of its softmax then sum to 1: on Gaussian logits the gradients of q and k are off by
  0.05, and by 0.06 with the output kept (0.07 and 0.10 at twice the size);
- of softmax the result, whose rows are divided by their sums again: an error that is common to a
  row would add a multiple of y where y (g - sum y g) has none.

A parameter, as the weight of a norm or a factor, is kept as it is: it is there anyway. So is what
would not become smaller, and what has 8 bits already. A tensor that several operators keep is kept
once.

Not here, and so kept in the format that it comes in: cross-entropy's log-probabilities, where an
error of 1/16 of -8 would be one of 1/2 in p; batch, instance and weight norm; attention with
dropout, a head size of its own for v, grouped or broadcast heads, and off the CPU; products with a
plain tensor; powers other than 2 and 3; in-place and out= forms; log_softmax, exp, log, sqrt, div
and all other functions. A tensor that one of these keeps too is kept twice.

A second derivative would be one of rounded copies: it is refused. Compiled, what is offered here
are alternatives to AOTAutograd's partitioner, which saves the least that the backward pass can be
computed from: of a norm's input and its result, cast for a product, once the 16-bit input instead
of two copies. Operands of products too are then read from their codes (`ScaledTensor.passing`).
"""

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import saved_format, value
from scaledtensor.ops.copies import is_worth_it, keep, keep_sign, kept
from scaledtensor.ops.operators import Absent, Overload, aten
from scaledtensor.ops.registry import RULES, rule
from scaledtensor.tensors import verbs
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["over"]

Function = Callable[..., Any]

# --- operators -------------------------------------------------------------------------------


def _operator(
    op: Overload | Absent,
    setup: Function,
    backward: Function,
    *,
    function: Function | None = None,
    further: str = "",
) -> Any:
    """An operator with the schema of `op` and its rule, or `function`, and a derivative of its own.

    `setup(ctx, inputs, output)` keeps; `backward(ctx, *grads)` gives a gradient for each argument.
    `further` are arguments that these two read.
    """
    if isinstance(op, Absent):
        return op  # which raises where a recipe asks for it
    arguments = op._schema.arguments
    count = sum(not a.kwarg_only for a in arguments)
    name = op._schema.name.split("::")[1].strip("_")
    signature = str(op._schema).partition("(")[2].replace("*, ", "").replace(")", further + ")", 1)
    own = verbs.operator(f"saved_{name}({signature}", backward, setup)
    run = function or RULES[op].function

    if count == len(arguments) and not further:
        rule(own)(run)
        return own

    @rule(own)
    @wraps(run)
    def served(*args: Any) -> Any:
        keywords = zip((a.name for a in arguments[count:]), args[count:], strict=False)
        return run(*args[:count], **dict(keywords))

    return own


#: function that a user may call -> the same by an operator that keeps 8 bits.
_CAUGHT: dict[Any, Function] = {}


def _catch(own: Function, *spellings: Any) -> None:
    _CAUGHT.update(dict.fromkeys(spellings, own))


def over(functions: dict[Any, Function]) -> dict[Any, Function]:
    """`functions`, with those of this module in front of them where a recipe has `saved`."""
    found = {f: partial(_call, own, functions.get(f, f)) for f, own in _CAUGHT.items()}
    return functions | found


def _call(own: Function, otherwise: Function, *args: Any, **kwargs: Any) -> Any:
    if torch.is_grad_enabled() and _keeps(*args, *kwargs.values()):
        result = own(*args, **kwargs)
        if result is not NotImplemented:
            return result
    return otherwise(*args, **kwargs)


def _keeps(*args: Any) -> bool:
    keeps = differentiable = False
    for x in args:
        if isinstance(x, Tensor):
            differentiable = differentiable or x.requires_grad
            keeps = keeps or saved_format(x) is not None
    return keeps and differentiable


# --- of one tensor ---------------------------------------------------------------------------


def _of_input(
    op: Overload | Absent, derivative: Function, *spellings: Any, sign: bool = False
) -> None:
    """A function of one tensor, whose `derivative` takes (g, x, the other arguments)."""

    def setup(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.others = inputs[1:]
        if sign:
            keep_sign(ctx, inputs[0])
        else:
            keep(ctx, inputs[:1])

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,) = kept(ctx)
        return derivative(grad, x, *ctx.others), *(None for _ in ctx.others)

    own = _operator(op, setup, backward)
    if isinstance(op, Absent):
        _catch(own, *spellings)
        return
    count = len(op._schema.arguments) - 1

    def call(input: Tensor, *others: Any, **options: Any) -> Any:
        # torch.nn.functional's own end with `inplace`.
        inplace = others[count:] or (options.pop("inplace", False),)
        if any(inplace) or "out" in options:
            return NotImplemented
        return own(input, *others[:count], **options)

    _catch(call, *spellings)


_of_input(
    aten.gelu.default,
    lambda g, x, approximate="none": aten.gelu_backward.default(g, x, approximate=approximate),
    F.gelu,
)
_of_input(aten.silu.default, aten.silu_backward.default, F.silu)
_of_input(aten.mish.default, aten.mish_backward.default, F.mish)
_of_input(aten.hardswish.default, aten.hardswish_backward.default, F.hardswish)
_of_input(
    aten.softplus.default,
    lambda g, x, beta=1, threshold=20: aten.softplus_backward.default(g, x, beta, threshold),
    F.softplus,
)
_of_input(aten.glu.default, lambda g, x, dim=-1: aten.glu_backward.default(g, x, dim), F.glu)
_of_input(
    aten.elu.default,
    lambda g, x, alpha=1, scale=1, input_scale=1: aten.elu_backward.default(
        g, alpha, scale, input_scale, False, x
    ),
    F.elu,
)
_of_input(
    aten.relu.default,
    lambda g, x: aten.threshold_backward.default(g, x, 0),
    *(F.relu, torch.relu, Tensor.relu),
    sign=True,
)
_of_input(
    aten.leaky_relu.default,
    lambda g, x, slope=0.01: aten.leaky_relu_backward.default(g, x, slope, False),
    F.leaky_relu,
    sign=True,
)
_of_input(
    aten.tanh.default,
    lambda g, x: aten.tanh_backward.default(g, aten.tanh.default(x)),
    *(F.tanh, torch.tanh, Tensor.tanh),
)
_of_input(
    aten.sigmoid.default,
    lambda g, x: aten.sigmoid_backward.default(g, aten.sigmoid.default(x)),
    *(F.sigmoid, torch.sigmoid, Tensor.sigmoid, torch.special.expit),
)


# --- softmax ---------------------------------------------------------------------------------


def _keep_softmax(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.dim, ctx.dtype = inputs[1], inputs[0].dtype
    keep(ctx, [output])


def _softmax_backward(ctx: Any, grad: Tensor) -> tuple[Any, None, None]:
    (y,) = kept(ctx)
    if y.qdata.numel():
        total = y.qdata.float().sum(ctx.dim, keepdim=True) * y.scale
        q = y.qdata / torch.where(total > 0, total, 1.0)
        y = ScaledTensor.make(q, y.scale, y.rms, FP32, y.dtype, y.recipe, nonnegative=True)
    return aten._softmax_backward_data.default(grad, y, ctx.dim, ctx.dtype), None, None


_own_softmax = _operator(aten._softmax.default, _keep_softmax, _softmax_backward)


def _softmax(
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    if dim is None or dtype not in (None, input.dtype) or options:
        return NotImplemented
    return _own_softmax(input, dim, False)


def _softmax_method(input: Tensor, dim: int, dtype: Any = None, **options: Any) -> Any:
    return _softmax(input, dim, dtype=dtype, **options)


_catch(_softmax, F.softmax)
_catch(_softmax_method, torch.softmax, Tensor.softmax, torch.special.softmax)


# --- norms -----------------------------------------------------------------------------------


def _asked(ctx: Any, *positions: int) -> list[bool]:
    given = ctx.needs_input_grad  # defaults are not
    return [i < len(given) and given[i] for i in positions]


def _keep_layer_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.shape, weight, bias, _ = inputs
    keep(ctx, [x], *output[1:], weight, bias)


def _layer_norm_backward(ctx: Any, grad: Tensor, *of_statistics: Any) -> tuple[Any, ...]:
    x, mean, rstd, weight, bias = kept(ctx)
    dx, dw, db = aten.native_layer_norm_backward.default(
        grad, x, ctx.shape, mean, rstd, weight, bias, _asked(ctx, 0, 2, 3)
    )
    return dx, None, dw, db, None


_own_layer_norm = _operator(aten.native_layer_norm.default, _keep_layer_norm, _layer_norm_backward)


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    return _own_layer_norm(input, normalized_shape, weight, bias, eps)[0]


def _composed_rms_norm(
    x: ScaledTensor, shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    """r = r_gamma: on a CPU from the parts that torch makes it of there, which round in between."""
    fused = aten._fused_rms_norm.default
    run = fused.decompose if x.device.type == "cpu" else RULES[fused].function
    return run(x, shape, weight, eps)[0]


def _keep_rms_norm(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, ctx.shape, weight, eps = inputs
    ctx.eps = torch.finfo(x.dtype).eps if eps is None else eps
    keep(ctx, [x], weight)


def _rms_norm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = kept(ctx)
    dims = tuple(range(-len(ctx.shape), 0))
    rrms = torch.rsqrt(value(x).float().square().mean(dims, keepdim=True) + ctx.eps)
    dx, dw = aten._fused_rms_norm_backward.default(
        grad, x, ctx.shape, rrms, weight, _asked(ctx, 0, 2)
    )
    return dx, None, dw, None


_own_rms_norm = _operator(
    aten.rms_norm.default, _keep_rms_norm, _rms_norm_backward, function=_composed_rms_norm
)


def _keep_group_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, *ctx.sizes, _ = inputs
    keep(ctx, [x], *output[1:], weight)


def _group_norm_backward(ctx: Any, grad: Tensor, *of_statistics: Any) -> tuple[Any, ...]:
    x, mean, rstd, weight = kept(ctx)
    gradients = aten.native_group_norm_backward.default(
        grad, x, mean, rstd, weight, *ctx.sizes, _asked(ctx, 0, 1, 2)
    )
    return *gradients, *(None for _ in (*ctx.sizes, "eps"))


_own_group_norm = _operator(aten.native_group_norm.default, _keep_group_norm, _group_norm_backward)


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    if input.dim() < 2 or input.numel() == 0 or input.shape[1] % num_groups:
        return NotImplemented
    images, channels, *pixels = input.shape
    sizes = (images, channels, math.prod(pixels), num_groups)
    return _own_group_norm(input, weight, bias, *sizes, eps)[0]


_catch(_layer_norm, F.layer_norm, torch.layer_norm)
_catch(_own_rms_norm, F.rms_norm, torch.rms_norm)
_catch(_group_norm, F.group_norm, torch.group_norm)


# --- products and powers ---------------------------------------------------------------------


def _keep_factors(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, y, copies_x, copies_y = inputs
    ctx.shapes, ctx.first = (x.shape, y.shape), copies_x or not copies_y
    wanted = x if y.requires_grad else None, y if x.requires_grad else None
    copied: list[Tensor | None] = []
    others: list[Tensor | None] = []
    for factor, copies in zip(wanted, (copies_x, copies_y), strict=True):
        (copied if copies else others).append(factor)
    keep(ctx, copied, *others)


def _mul_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, y = kept(ctx) if ctx.first else reversed(kept(ctx))
    left, right = ctx.shapes
    return (
        None if y is None else (grad * y).sum_to_size(left),
        None if x is None else (grad * x).sum_to_size(right),
        None,
        None,
    )


_own_mul = _operator(
    aten.mul.Tensor,
    _keep_factors,
    _mul_backward,
    further=", bool copies_self, bool copies_other",
)


def _mul(input: Any, other: Any, **options: Any) -> Any:
    both = isinstance(input, ScaledTensor) and isinstance(other, ScaledTensor)
    if not both or input.dtype != other.dtype or options:
        return NotImplemented
    copies = [not isinstance(x, nn.Parameter) and is_worth_it(x) for x in (input, other)]
    return _own_mul(input, other, *copies) if any(copies) else NotImplemented


def _keep_base(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.exponent = inputs[1]
    keep(ctx, inputs[:1])


def _pow_backward(ctx: Any, grad: Tensor) -> tuple[Any, None]:
    (x,) = kept(ctx)
    return grad * (x.pow(ctx.exponent - 1) * ctx.exponent), None


_own_pow = _operator(aten.pow.Tensor_Scalar, _keep_base, _pow_backward)


def _pow(input: Any, exponent: Any, **options: Any) -> Any:
    # Of others a small base has a large slope, or none; and rounding makes zeros.
    if exponent not in (2, 3) if isinstance(exponent, int | float) else True:
        return NotImplemented
    return NotImplemented if options else _own_pow(input, exponent)


def _square(input: Tensor, **options: Any) -> Any:
    return _pow(input, 2, **options)


_catch(_mul, torch.mul, torch.multiply, *(getattr(Tensor, n) for n in ("mul", "multiply")))
_catch(_mul, Tensor.__mul__, Tensor.__rmul__)
_catch(_pow, torch.pow, Tensor.pow, Tensor.__pow__)
_catch(_square, torch.square, Tensor.square)


# --- attention -------------------------------------------------------------------------------

_flash = aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward


def _keep_attention(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.dropout, ctx.causal, mask, ctx.scale = inputs
    keep(ctx, tensors, mask)


def _attention_backward(ctx: Any, grad: Tensor, *of_statistics: Any) -> tuple[Any, ...]:
    q, k, v, mask = kept(ctx)
    options = {"attn_mask": mask, "scale": ctx.scale}
    made = _flash.default(q, k, v, ctx.dropout, ctx.causal, **options)
    gradients = _flash_backward.default(grad, q, k, v, *made, ctx.dropout, ctx.causal, **options)
    return *gradients, None, None, None, None


_own_attention = _operator(_flash.default, _keep_attention, _attention_backward)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Where torch would take the kernel that `_own_attention` is."""
    if not all(_is_of_flash(x, query) for x in (query, key, value)) or dropout_p:
        return NotImplemented
    if attn_mask is not None:
        if attn_mask.requires_grad or attn_mask.dim() not in (2, 4) or is_causal:
            return NotImplemented
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
                ~attn_mask, -math.inf
            )
    return _own_attention(query, key, value, 0.0, is_causal, attn_mask, scale)[0]


def _is_of_flash(x: Any, query: Tensor) -> bool:
    return (
        isinstance(x, ScaledTensor)
        and x.device.type == "cpu"
        and x.dim() == 4
        and x.numel() > 0
        and x.shape[:2] == query.shape[:2]
        and x.shape[-1] == query.shape[-1]
        and x.stride(-1) == 1
        and x.dtype == query.dtype
        and torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    )


_catch(_attention, F.scaled_dot_product_attention)
