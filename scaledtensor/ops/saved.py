"""Activations that operators keep in 8 bits for their backward pass.

The method is COAT (Xi et al. 2024, arXiv 2410.19313). Under a recipe with `saved`, each function of
this table runs as an operator of this library. The same rule computes its result, to the bit. Only
the tensors that it keeps for the backward pass differ:

    function                               keeps in 8 bits       keeps as it is
    gelu, silu, mish, hardswish            input
    softplus, glu, elu, tanh, sigmoid      input
    relu, leaky_relu                       sign of the input
    softmax                                result
    layer_norm                             input                 mean, rstd, weight, bias
    group_norm                             input                 mean, rstd, weight
    rms_norm                               input                 weight
    product of two ScaledTensors           both factors          a factor that is a parameter
    square, x**2, x**3                     input
    scaled_dot_product_attention           q, k, v               mask

A tensor is kept as codes of the recipe's format, in groups of 16 along the last dimension. Each
group has a power of two, one byte (`copies.py`):

    kept = code * 2^k * scale,  2^k the least under which no element of its group saturates

That is 17/16 bytes an element. A float32 amax / max for each group would take 20/16. With E4M3
codes of Gaussians, the RMS of an element's relative error would then be 0.026 instead of 0.027, and
the relative error of the tensor 0.022 instead of 0.027.

Why these tensors:

- An input is kept wherever an input suffices. The derivative is then the true derivative at a
  point next to the true point. The derivative 1 - y^2 of a kept result y of tanh has 2.5 times the
  error.
- The sign of the input is enough for relu and leaky_relu, and it is exact.
- Attention computes its output again, which costs one more forward kernel and saves a tensor. The
  rows of its softmax then sum to 1. On Gaussian logits the gradients of q and k have an error of
  0.05, and of 0.06 if the output is kept (0.07 and 0.10 at twice the size).
- Softmax divides the rows of its kept result by their sums. An error that is common to a row would
  add a multiple of y where y (g - sum y g) has none.

A parameter is kept as it is, since it is in memory anyway. A tensor of 8 bits, and a tensor whose
codes would not be smaller, are kept as they are too. A tensor that several operators keep is kept
once.

All other functions keep their tensors in the format in which they come: cross-entropy, where an
error of 1/16 in a log-probability of -8 would be an error of 1/2 in p; batch, instance and weight
norm; attention with dropout, with another head size of v, with grouped or broadcast heads, and on
devices other than the CPU; products with a plain tensor; other powers; in-place and out= forms;
log_softmax, exp, log, sqrt, div and so on. A tensor that one of these keeps as well is kept twice.

A second derivative would be a derivative of rounded copies, so it is refused. In compiled code
AOTAutograd's partitioner chooses among all tensors from which the backward pass can be computed. It
keeps the smallest ones: for a norm whose result is cast for a product, one 16-bit input instead of
two copies. The operands of products are then read from their codes too (`Memo.passing`).
"""

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaledtensor.backends import backend_of
from scaledtensor.formats import FP32
from scaledtensor.ops.algebra import saved_format, value
from scaledtensor.ops.copies import is_worth_it, keep, keep_sign, kept
from scaledtensor.ops.operators import Absent, Overload, Tensors, aten, define_operator
from scaledtensor.ops.registry import RULES, rule
from scaledtensor.ops.rules.norm import DEFAULT_EPS
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["over"]

Function = Callable[..., Any]


# --- what is kept ----------------------------------------------------------------------------
# Each function saves the tensors that the derivative of a row names (`define_operator`).


def _codes(*names: str) -> Function:
    """Save the tensors of these names in 8 bits, and the others as they are."""

    def save(ctx: Any, tensors: Tensors, inputs: tuple[Any, ...]) -> None:
        keep(ctx, tensors.values(), [name in names for name in tensors])

    return save


def _sign(ctx: Any, tensors: Tensors, inputs: tuple[Any, ...]) -> None:
    (x,) = tensors.values()
    keep_sign(ctx, x)


def _factors(ctx: Any, tensors: Tensors, inputs: tuple[Any, ...]) -> None:
    x, y, copies_x, copies_y = inputs
    wanted = x if y.requires_grad else None, y if x.requires_grad else None
    keep(ctx, wanted, (copies_x, copies_y))


# --- derivatives -----------------------------------------------------------------------------


def _softmax_backward(grad: Tensor, result: Any, dim: int) -> Any:
    y = result
    if y.qdata.numel():
        total = y.qdata.float().sum(dim, keepdim=True) * y.scale
        q = y.qdata / torch.where(total > 0, total, 1.0)
        y = ScaledTensor.make(q, y.scale, y.rms, FP32, y.dtype, y.recipe, nonnegative=True)
    return aten._softmax_backward_data.default(grad, y, dim, result.dtype)


def _rms_norm_backward(
    grad: Tensor,
    input: Any,
    weight: Any,
    normalized_shape: Any,
    eps: float | None,
    grad_input_mask: list[bool],
) -> Any:
    eps = DEFAULT_EPS if eps is None else eps
    dims = tuple(range(-len(normalized_shape), 0))
    rrms = torch.rsqrt(value(input).float().square().mean(dims, keepdim=True) + eps)
    return aten._fused_rms_norm_backward.default(
        grad, input, normalized_shape, rrms, weight, grad_input_mask
    )


_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_flash = aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward


def _attention_backward(
    grad: Tensor, query: Any, key: Any, value: Any, is_causal: bool, attn_mask: Any, scale: Any
) -> Any:
    options = {"attn_mask": attn_mask, "scale": scale}
    made = _flash.default(query, key, value, 0.0, is_causal, **options)
    return _flash_backward.default(grad, query, key, value, *made, 0.0, is_causal, **options)


# --- calls -----------------------------------------------------------------------------------
# Each function takes the operator and the arguments of a call by the user. NotImplemented sends the
# call to torch.


def _elementwise(own: Any) -> Function:
    """Return the call of an operator whose first argument is its only tensor."""
    count = len(own._schema.arguments) - 1

    def call(input: Tensor, *others: Any, **options: Any) -> Any:
        # The functions of torch.nn.functional end with `inplace`.
        inplace = others[count:] or (options.pop("inplace", False),)
        if any(inplace) or "out" in options:
            return NotImplemented
        return own(input, *others[:count], **options)

    return call


def _softmax(
    own: Any,
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    if dim is None or dtype not in (None, input.dtype) or options:
        return NotImplemented
    return own(input, dim, False)


def _softmax_method(own: Any, input: Tensor, dim: int, dtype: Any = None, **options: Any) -> Any:
    return _softmax(own, input, dim, dtype=dtype, **options)


def _layer_norm(
    own: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    return own(input, normalized_shape, weight, bias, eps)[0]


def _group_norm(
    own: Any,
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
    return own(input, weight, bias, *sizes, eps)[0]


def _rms_norm(own: Any, *args: Any, **options: Any) -> Any:
    return own(*args, **options)


def _mul(own: Any, input: Any, other: Any, **options: Any) -> Any:
    both = isinstance(input, ScaledTensor) and isinstance(other, ScaledTensor)
    if not both or input.dtype != other.dtype or options:
        return NotImplemented
    copies = [not isinstance(x, nn.Parameter) and is_worth_it(x) for x in (input, other)]
    return own(input, other, *copies) if any(copies) else NotImplemented


def _pow(own: Any, input: Any, exponent: Any, **options: Any) -> Any:
    # The other powers have a large or an infinite slope at a small base, and rounding makes zeros.
    if exponent not in (2, 3) if isinstance(exponent, int | float) else True:
        return NotImplemented
    return NotImplemented if options else own(input, exponent)


def _square(own: Any, input: Tensor, **options: Any) -> Any:
    return _pow(own, input, 2, **options)


def _attention(
    own: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Run the operator in the cases in which torch would take its flash kernel for the CPU."""
    if not all(_fits_flash(x, query) for x in (query, key, value)) or dropout_p:
        return NotImplemented
    if attn_mask is not None:
        if attn_mask.requires_grad or attn_mask.dim() not in (2, 4) or is_causal:
            return NotImplemented
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
                ~attn_mask, -math.inf
            )
    return own(query, key, value, 0.0, is_causal, attn_mask, scale)[0]


def _fits_flash(x: Any, query: Tensor) -> bool:
    return (
        isinstance(x, ScaledTensor)
        and backend_of(x.qdata).flash(x.qdata.device) == _FLASH
        and x.dim() == 4
        and x.numel() > 0
        and x.shape[:2] == query.shape[:2]
        and x.shape[-1] == query.shape[-1]
        and x.stride(-1) == 1
        and x.dtype == query.dtype
        and torch.backends.cuda.flash_sdp_enabled()
    )


def _rms_norm_alone(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """r = rw for the weight."""
    return RULES[aten._fused_rms_norm.default].function(x, shape, weight, eps)[0]


# --- the table -------------------------------------------------------------------------------


class Row(NamedTuple):
    """An operator that keeps activations in 8 bits."""

    op: Overload | Absent
    """The operator of torch with the same arguments. Its rule computes the result."""
    calls: dict[Function | None, tuple[Any, ...]]
    """The call of each function of torch that this operator replaces; None is `_elementwise`."""
    save: Function
    """Saves the tensors that `derivative` names."""
    derivative: Function
    """Returns the gradients, as `define_operator` describes it."""
    function: Function | None = None
    """The rule, if `op` has no rule."""
    further: str = ""
    """Further arguments of the operator, which only `save` reads."""


def _of_input(op: Overload | Absent, derivative: Function, *functions: Any) -> Row:
    """The row of a function that keeps its input."""
    return Row(op, {None: functions}, _codes("self"), derivative)


def _of_sign(op: Overload | Absent, derivative: Function, *functions: Any) -> Row:
    """The row of a function that keeps the sign of its input."""
    return Row(op, {None: functions}, _sign, derivative)


_TABLE = (
    _of_input(
        aten.gelu.default,
        lambda grad, self, approximate: aten.gelu_backward.default(
            grad, self, approximate=approximate
        ),
        F.gelu,
    ),
    _of_input(aten.silu.default, lambda grad, self: aten.silu_backward.default(grad, self), F.silu),
    _of_input(aten.mish.default, lambda grad, self: aten.mish_backward.default(grad, self), F.mish),
    _of_input(
        aten.hardswish.default,
        lambda grad, self: aten.hardswish_backward.default(grad, self),
        F.hardswish,
    ),
    _of_input(
        aten.softplus.default,
        lambda grad, self, beta, threshold: aten.softplus_backward.default(
            grad, self, beta, threshold
        ),
        F.softplus,
    ),
    _of_input(
        aten.glu.default,
        lambda grad, self, dim: aten.glu_backward.default(grad, self, dim),
        F.glu,
    ),
    _of_input(
        aten.elu.default,
        lambda grad, self, alpha, scale, input_scale: aten.elu_backward.default(
            grad, alpha, scale, input_scale, False, self
        ),
        F.elu,
    ),
    _of_input(
        aten.tanh.default,
        lambda grad, self: aten.tanh_backward.default(grad, aten.tanh.default(self)),
        *(F.tanh, torch.tanh, Tensor.tanh),
    ),
    _of_input(
        aten.sigmoid.default,
        lambda grad, self: aten.sigmoid_backward.default(grad, aten.sigmoid.default(self)),
        *(F.sigmoid, torch.sigmoid, Tensor.sigmoid, torch.special.expit),
    ),
    _of_sign(
        aten.relu.default,
        lambda grad, self: aten.threshold_backward.default(grad, self, 0),
        *(F.relu, torch.relu, Tensor.relu),
    ),
    _of_sign(
        aten.leaky_relu.default,
        lambda grad, self, negative_slope: aten.leaky_relu_backward.default(
            grad, self, negative_slope, False
        ),
        F.leaky_relu,
    ),
    Row(
        aten._softmax.default,
        {
            _softmax: (F.softmax,),
            _softmax_method: (torch.softmax, Tensor.softmax, torch.special.softmax),
        },
        _codes("result"),
        _softmax_backward,
    ),
    Row(
        aten.native_layer_norm.default,
        {_layer_norm: (F.layer_norm, torch.layer_norm)},
        _codes("input"),
        lambda grad, input, normalized_shape, result1, result2, weight, bias, grad_input_mask: (
            aten.native_layer_norm_backward.default(
                grad, input, normalized_shape, result1, result2, weight, bias, grad_input_mask
            )
        ),
    ),
    Row(
        aten.rms_norm.default,
        {_rms_norm: (F.rms_norm, torch.rms_norm)},
        _codes("input"),
        _rms_norm_backward,
        function=_rms_norm_alone,
    ),
    Row(
        aten.native_group_norm.default,
        {_group_norm: (F.group_norm, torch.group_norm)},
        _codes("input"),
        lambda grad, input, result1, result2, weight, N, C, HxW, group, grad_input_mask: (
            aten.native_group_norm_backward.default(
                grad, input, result1, result2, weight, N, C, HxW, group, grad_input_mask
            )
        ),
    ),
    Row(
        aten.mul.Tensor,
        {
            _mul: (
                *(torch.mul, torch.multiply, Tensor.mul, Tensor.multiply),
                *(Tensor.__mul__, Tensor.__rmul__),
            )
        },
        _factors,
        lambda grad, self, other, self_shape, other_shape: (
            None if other is None else (grad * other).sum_to_size(self_shape),
            None if self is None else (grad * self).sum_to_size(other_shape),
        ),
        further=", bool copies_self, bool copies_other",
    ),
    Row(
        aten.pow.Tensor_Scalar,
        {
            _pow: (torch.pow, Tensor.pow, Tensor.__pow__),
            _square: (torch.square, Tensor.square),
        },
        _codes("self"),
        lambda grad, self, exponent: grad * (self.pow(exponent - 1) * exponent),
    ),
    Row(
        _flash.default,
        {_attention: (F.scaled_dot_product_attention,)},
        _codes("query", "key", "value"),
        _attention_backward,
    ),
)


def _operator(row: Row) -> Any:
    """Define the operator of a row, with the schema of `op`."""
    if isinstance(row.op, Absent):
        return row.op  # raises if a recipe asks for it
    schema = row.op._schema
    count = sum(not a.kwarg_only for a in schema.arguments)
    name = schema.name.split("::")[1].strip("_")
    signature = str(schema).partition("(")[2].replace("*, ", "").replace(")", row.further + ")", 1)
    own = define_operator(f"saved_{name}({signature}", row.derivative, save=row.save, saved=kept)
    run = row.function or RULES[row.op].function
    if count == len(schema.arguments) and not row.further:
        rule(own)(run)
        return own
    keywords = [a.name for a in schema.arguments[count:]]

    @rule(own)
    @wraps(run)
    def served(*args: Any) -> Any:
        return run(*args[:count], **dict(zip(keywords, args[count:], strict=False)))

    return own


def _caught() -> dict[Any, Function]:
    found: dict[Any, Function] = {}
    for row in _TABLE:
        own = _operator(row)
        for call, functions in row.calls.items():
            if isinstance(own, Absent):
                caught: Function = own
            else:
                caught = _elementwise(own) if call is None else partial(call, own)
            found.update(dict.fromkeys(functions, caught))
    return found


#: function of torch -> the call of the operator that keeps 8 bits.
_CAUGHT = _caught()


def over(functions: dict[Any, Function]) -> dict[Any, Function]:
    """Return `functions` and the functions of this module, which come first under `saved`."""
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
