"""Products with a QuantizedTensor, on plain tensors.

`linear` multiplies rows of the input by the matrix of codes:

1. The input is divided by the folded powers of two, and mixed if the weight is (`Config`).
2. `Dynamic` and `Static` cast it. `WeightOnly` leaves it as it is.
3. If the device has FP8 units for the two operands, they multiply the codes.
4. Otherwise, on a CPU, a loop in C++ decodes the weight while it multiplies (`native/products.py`).
5. Otherwise the same values are multiplied by torch, in the dtype that the device multiplies fast
   if it holds them.

Sums are in float32, and scales that all terms of a sum share are multiplied afterwards. Other
products (convolutions, einsum, products by a left operand) read the weight's value. Their inputs
are cast in the same way. Derivatives take the casts of inputs as identities (straight-through).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp import is_autocast_available

from scaledtensor import native
from scaledtensor.backends import backend_of, units_of
from scaledtensor.errors import UnsupportedError
from scaledtensor.formats import unpack
from scaledtensor.native import products
from scaledtensor.ops import invariant
from scaledtensor.ops.algebra import check_dtypes
from scaledtensor.ops.products import by_gemm
from scaledtensor.ops.products.dtype import multiplied
from scaledtensor.ops.products.linear import is_alone
from scaledtensor.ops.products.quantize import Coded, factors, mixed
from scaledtensor.ops.products.table import PRODUCTS
from scaledtensor.quantization import flops, inputs, shards, writing
from scaledtensor.quantization.tensor import QuantizedTensor
from scaledtensor.quantization.writing import as_parts, guarded, read_only, refuse_writing
from scaledtensor.recipes.casts import HADAMARD, Cast, TwoLevel, parsed_cast
from scaledtensor.tensors import verbs
from scaledtensor.tensors.ruled import Ruled
from scaledtensor.tensors.wrapper import Wrapper

__all__ = [
    "FUNCTIONS",
    "OPERATORS",
    "as_parts",
    "cast_input",
    "computation",
    "dequantize",
    "entering",
    "guarded",
    "leaving",
    "linear",
    "read_only",
    "refuse_writing",
    "rows",
    "summed_dim",
    "turned_back",
    "under_autocast",
]


# --- operators -------------------------------------------------------------------------------
# torch.compile sees one node for each, and the codes are read below autograd.


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    # Another tensor of the same codes: Module.to() swaps parameters, and refuses one that is held.
    x, weight = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight.shared())


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    of_x = linear_gradient(grad, weight) if ctx.needs_input_grad[0] else None
    return of_x, None if x is None else weight_gradient(grad, x, weight)


def _keep_weight(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1].shared())


def _back_to_output(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    """`linear_gradient` is linear in the gradient of the result, which is not cast."""
    (weight,) = ctx.saved_tensors
    value = dequantize(weight)
    return torch.matmul(grad, value if weight.order == "columns" else value.mT), None


def _refuse_second(ctx: Any, grad: Tensor) -> None:
    raise UnsupportedError(
        "second derivatives of a weight that trains for few bits: casts are taken as identities in "
        "the first derivative only. quantize_(model, config) freezes the weights, and "
        "unscale_model(model) makes them plain"
    )


def _identity(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad, None, None


def _keep_ids(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    weight, ids, ctx.padding, ctx.by_frequency = inputs
    ctx.count = weight.shape[0]
    ctx.save_for_backward(ids)


def _rows_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
    if not ctx.needs_input_grad[0]:
        return None, None, None, None
    (ids,) = ctx.saved_tensors
    of_table = torch.ops.aten.embedding_dense_backward(
        grad, ids, ctx.count, ctx.padding, ctx.by_frequency
    )
    return of_table, None, None, None


def _forget(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None: ...


#: The plain tensor of the value of `w`.
dequantize = verbs.operator("quantized_value(Tensor w) -> Tensor", lambda ctx, grad: grad, _forget)

#: Rows of `x`, in any batch, times the matrix of `w`.
linear = verbs.operator(
    "quantized_linear(Tensor x, Tensor w) -> Tensor", _gradients, _keep_operands
)

#: The gradient of `linear` for its input.
linear_gradient = verbs.operator(
    "quantized_linear_gradient(Tensor grad, Tensor w) -> Tensor", _back_to_output, _keep_weight
)

#: The gradient of `linear` for its weight. The cast of the weight is taken as the identity.
weight_gradient = verbs.operator(
    "quantized_weight_gradient(Tensor grad, Tensor x, Tensor w) -> Tensor", _refuse_second, _forget
)

#: `x` with the values that the config of `w` casts it to. `dim` is the summed dimension.
cast_input = verbs.operator(
    "quantized_input(Tensor x, Tensor w, int dim) -> Tensor", _identity, _forget
)

#: The rows of a table of embeddings. The row `padding` has no gradient.
rows = verbs.operator(
    "quantized_rows(Tensor w, Tensor ids, int padding=-1, bool by_frequency=False) -> Tensor",
    _rows_gradient,
    _keep_ids,
)

flops.register(linear, linear_gradient, weight_gradient)


# --- functions of torch, above autograd ------------------------------------------------------


def _multiply(
    function: Callable[..., Any],
    *operands: Any,
    spelled: Any = None,
    lowered: Any = None,
    **kwargs: Any,
) -> Any:
    """`function(*operands)`, where one operand or more is a QuantizedTensor."""
    for x in operands:
        if isinstance(x, Ruled):
            raise UnsupportedError(
                "a product of a ScaledTensor and a quantised weight: a model is scaled or "
                "quantised as a whole. unscale_model(model) comes before quantize_(model, ...)"
            )
    operands = tuple(map(under_autocast, operands))
    if len(operands) == 2 and not kwargs:
        x, w = operands
        if isinstance(w, QuantizedTensor) and not isinstance(x, Wrapper):
            by_rows = function is torch.nn.functional.linear and w.order == "rows"
            by_columns = function in _MATRIX and w.order == "columns"
            if (by_rows or by_columns) and w.dim() == 2 and x.dim() > 0:
                check_dtypes(x, w)
                # Eager code without a gradient needs no node: the operator would take as long as a
                # small product.
                recorded = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
                return linear(x, w) if recorded or not is_alone() else _linear(x, w)
    return function(*_values(operands), **kwargs)


_MATRIX = (torch.mm, torch.matmul)


def _values(operands: Sequence[Any]) -> list[Any]:
    """The values of operands: weights are decoded, and inputs are cast as the weight's config
    says."""
    place, weight = next((i, x) for i, x in enumerate(operands) if isinstance(x, QuantizedTensor))
    found: list[Any] = []
    for i, x in enumerate(operands):
        if isinstance(x, QuantizedTensor):
            found.append(dequantize(x))
        elif isinstance(x, Tensor) and weight.config.input is not None:
            found.append(cast_input(x, weight, summed_dim(i, place, x)))
        else:
            found.append(x)
    return found


def summed_dim(i: int, weight: int, x: Tensor) -> int:
    """The dimension that a product sums over in operand `i`, `x`, if operand `weight` is the
    weight."""
    return -2 if i > weight and x.dim() > 1 else -1


def under_autocast(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    kind = x.device.type  # some devices have no autocast, such as meta
    if not is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(kind))


def _embedding(
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None:
        raise UnsupportedError(
            "max_norm writes into the table of an embedding, and codes are not written: leave "
            "'embedding' out of the roles of the config"
        )
    if sparse and weight.requires_grad:
        raise UnsupportedError(
            "sparse=True: an embedding that trains for few bits has dense gradients; leave "
            "'embedding' out of the roles of the config, or let sparse be False"
        )
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return rows(weight, input, padding, scale_grad_by_freq)


#: Function of torch -> the same with quantised operands.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    spelling: partial(found.on, _multiply)
    for spelling, found in PRODUCTS.items()
    if found.on is not None and found.places
} | {torch.nn.functional.embedding: _embedding, **writing.FUNCTIONS}


# --- below autograd --------------------------------------------------------------------------


def _linear(x: Tensor, w: QuantizedTensor) -> Tensor:
    *batch, terms = x.shape
    if terms != w.matrix_shape[-1]:
        raise_shapes(x, w)
    held = entering(x.reshape(-1, terms), w)
    how = w.config.input
    y: Tensor | None = None
    outer: Tensor | None = None
    if how is not None:
        y = _by_units(held, w)
        if y is None:
            held, outer = inputs.factored(held, w.config, w.input_scale)
            if x.dtype is not torch.bfloat16:  # a bfloat16 product has fewer bits than the result
                held = held.float()
    if y is None:
        y = multiplied_by(held, w, outer)
    return y.to(x.dtype).view(*batch, w.matrix_shape[0])


def raise_shapes(x: Tensor, w: QuantizedTensor) -> None:
    rows, terms = w.matrix_shape[-2:]
    # The message of torch.
    raise RuntimeError(
        f"mat1 and mat2 shapes cannot be multiplied ({x.numel() // max(x.shape[-1], 1)}x"
        f"{x.shape[-1]} and {terms}x{rows})"
    )


def entering(x: Tensor, w: Any, dim: int = -1) -> Tensor:
    """The input as it meets the codes: divided by the folded powers of two, and mixed. `dim` is the
    summed dimension. Inputs of convolutions, and of einsums that sum over another dimension, meet
    the value of the weight, so they stay as they are."""
    if not _enters(x, w, dim):
        return x
    x = x.movedim(dim, -1)
    if w.columns is not None:
        x = (x / w.columns).to(x.dtype)  # exact except for subnormals
    if w.config.rotate:
        x = mixed(x, -1)
    return x.movedim(-1, dim)


def leaving(x: Tensor, w: QuantizedTensor, dim: int) -> Tensor:
    """Undo `entering`."""
    if not _enters(x, w, dim):
        return x
    held = x.movedim(dim, -1)
    if w.config.rotate:
        held = turned_back(held)
    if w.columns is not None:
        held = held * w.columns
    return held.to(x.dtype).movedim(-1, dim)


def _enters(x: Tensor, w: Any, dim: int) -> bool:
    changes: bool = w.columns is not None or w.config.rotate
    return changes and w.order != "kernel" and x.shape[dim] == w.matrix_shape[-1]


def _by_units(x: Tensor, w: QuantizedTensor) -> Tensor | None:
    """The product by the FP8 units of the device, or None."""
    if units_of(x) is None or w.config.input is None or w.config.input.format.bits > 8:
        return None
    left = by_gemm.Side(inputs.coded_input(x, w.config, w.input_scale), w.config.input, -1)
    right = by_gemm.Side(_coded(w), w.config.weight, -1)
    return by_gemm.by_units(
        left, right, torch.ones((), device=w.qdata.device, dtype=torch.float32), False
    )


def _coded(w: QuantizedTensor) -> Coded:
    two = w.scale.dtype == torch.float8_e4m3fn
    return Coded(w.codes, w.scale, w.tensor_scale if two else None)


def multiplied_by(x: Tensor, w: QuantizedTensor, outer: Tensor | None) -> Tensor:
    """The rows of `x` times the matrix of `w`, and times `outer`, a scale for each row."""
    y = _by_loop(x, w)
    if y is None:
        y = _by_torch(x, _coded(w), w.config.weight)
    return y if outer is None else y * outer


def _by_torch(x: Tensor, coded: Coded, how: Cast) -> Tensor:
    values, outer = factors(coded, how, -1)
    a, b = multiplied(x, values) if x.dtype == values.dtype else (x.float(), values.float())
    y = torch.mm(a, b.mT)
    return y if outer is None else y * (outer.mT if outer.dim() else outer)


# --- the loop in C++ -------------------------------------------------------------------------

#: Up to this number of rows, a product reads the codes once. Beyond it, decoding the weight first
#: and multiplying by torch's own product is faster.
FEW_ROWS = 128


def _by_loop(x: Tensor, w: QuantizedTensor) -> Tensor | None:
    """The product by the loop in C++, or None: there is none for this device or these rows."""
    cast = w.config.weight
    has_loop = backend_of(x).host and x.dtype in _LOOPED and native.built()
    if not has_loop or torch.compiler.is_exporting():
        return None
    rows = x.shape[0]  # symbolic in a graph for any number of rows: then the operator decides
    if isinstance(rows, int) and rows > FEW_ROWS and not invariant.is_on():
        return None
    x = x.contiguous()
    if type(x) is Tensor and is_alone():
        ready = w.loop
        if ready is None or not ready.reads(w.qdata, w.scale):
            ready = w.loop = _prepared(w.qdata, w.scale, w.tensor_scale, cast, x.shape[1])
        if ready is not None:
            return ready(x)  # type: ignore[no-any-return]
    return coded_product(x, w.qdata, w.scale, w.tensor_scale, cast.spec)  # type: ignore[no-any-return]


_LOOPED = (torch.float32, torch.bfloat16)


verbs.LIBRARY.define(
    "coded_product(Tensor x, Tensor qdata, Tensor scale, Tensor whole, str cast) -> Tensor"
)
#: `x` (M, K) times the matrix (N, K) of packed codes, in the dtype of `x`.
coded_product = torch.ops.scaledtensor.coded_product.default


def _prepared(
    qdata: Tensor, scale: Tensor, whole: Tensor, how: Cast, terms: int
) -> products.Prepared | None:
    shape, (rows, block) = (qdata.shape[0], terms), how.block
    return products.prepared(
        *(qdata, how.format, scale, block, whole, shape),
        rows or (shape[0] if block else 1),
    )


def _coded_product(x: Tensor, qdata: Tensor, scale: Tensor, whole: Tensor, cast: str) -> Tensor:
    how = parsed_cast(cast)
    few = x.shape[0] <= FEW_ROWS or invariant.is_on()
    if few and type(x) in native.PLAIN:
        ready = _prepared(qdata, scale.contiguous(), whole, how, x.shape[1])
        if ready is not None:
            return ready(x.contiguous())
    shape = qdata.shape[0], x.shape[1]
    two = isinstance(how.scale, TwoLevel)
    coded = Coded(unpack(qdata, how.format, shape), scale, whole if two else None)
    return _by_torch(x, coded, how).to(x.dtype)


verbs.LIBRARY.impl("coded_product", _coded_product, "CompositeExplicitAutograd")


def _imagined(x: Tensor, qdata: Tensor, scale: Tensor, whole: Tensor, cast: str) -> Tensor:
    return x.new_empty(x.shape[0], qdata.shape[0])


torch.library.register_fake("scaledtensor::coded_product", _imagined, lib=verbs.LIBRARY)


def _linear_gradient(grad: Tensor, w: QuantizedTensor) -> Tensor:
    matrix = w.matrix(torch.float32)
    rows = grad.reshape(-1, grad.shape[-1])
    dx = torch.mm(rows.float(), matrix)
    if w.config.rotate:
        dx = turned_back(dx)
    if w.columns is not None:
        dx = dx / w.columns
    return dx.to(grad.dtype).view(*grad.shape[:-1], matrix.shape[-1])


def _weight_gradient(grad: Tensor, x: Tensor, w: QuantizedTensor) -> Tensor:
    held = entering(x.reshape(-1, x.shape[-1]), w)
    held = inputs.cast_values(held, w.config, w.input_scale, -1).float()
    of_matrix = torch.mm(grad.reshape(-1, grad.shape[-1]).float().mT, held)
    if w.config.rotate:
        of_matrix = turned_back(of_matrix)
    if w.columns is not None:
        of_matrix = of_matrix * w.columns
    return (of_matrix.mT if w.order == "columns" else of_matrix).to(w.dtype)


def _cast_input(x: Tensor, w: QuantizedTensor, dim: int) -> Tensor:
    held = inputs.cast_values(entering(x, w, dim), w.config, w.input_scale, dim)
    return leaving(held, w, dim).to(x.dtype)


def turned_back(x: Tensor) -> Tensor:
    """Undo `mixed` along the last dimension: its matrix is orthogonal."""
    groups = x.float().reshape(*x.shape[:-1], -1, HADAMARD)
    identity = mixed(torch.eye(HADAMARD, device=x.device, dtype=torch.float32), -1)
    return torch.matmul(groups, identity.mT).flatten(-2)


def _rows(w: QuantizedTensor, ids: Tensor, *of_gradients: Any) -> Tensor:
    """Decode the rows that are looked up, and no others."""
    how = w.config.weight
    if w.order != "rows" or w.columns is not None or w.config.rotate or how.block[0] > 1:
        return torch.nn.functional.embedding(ids, w.value_in(w.dtype))
    flat = ids.reshape(-1)
    scale = w.scale if w.scale.dim() == 0 else w.scale[flat]
    part = w.put_together(
        (w.qdata[flat], scale, w.tensor_scale),
        (flat.numel(), w.shape[1]),
        (*w.context[:-1], ()),
    )
    return part.value_in(w.dtype).view(*ids.shape, w.shape[1])


#: Operator of this module -> its computation on inner tensors.
OPERATORS: dict[Any, Callable[..., Any]] = {
    dequantize: lambda w: w.value_in(w.dtype),
    linear: _linear,
    linear_gradient: _linear_gradient,
    weight_gradient: _weight_gradient,
    cast_input: _cast_input,
    rows: _rows,
    torch.ops.aten.copy_.default: writing.copy_into,
}


def computation(func: Any) -> Callable[..., Any] | None:
    """The computation of an operator on inner tensors; None if the operator reads the value."""
    return OPERATORS.get(func) or shards.OPERATORS.get(func)
