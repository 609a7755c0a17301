"""The operators of `exchange/onnx_forms.py` in ONNX's own operators, in the graph of a file.

Decode(qdata, scale) becomes DequantizeLinear of an initializer of codes. If all its readers
transpose it, the codes are transposed: onnxruntime's fusions expect a weight (K, N). RoundTrip
becomes QuantizeLinear and DequantizeLinear.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scaledtensor.exchange.onnx_forms import DOMAIN, TYPES, WITHIN_E4M3FN
from scaledtensor.formats import E4M3FN, E8M0FNU, Format, decode, encode, unpack
from scaledtensor.formats import get as get_format

__all__ = ["expand"]


def expand(model: Any, native: frozenset[str], names: Mapping[str, str]) -> None:
    """Write the operators of `onnx_forms` in a model of onnx_ir as ONNX's own operators, in place.

    Args:
        model: an `onnx_ir.Model`.
        native: the formats whose codes have a type in the file.
        names: the names of the inner tensors of weights, by the names that torch gives them.
    """
    _Expansion(model, native, names).run()


class _Expansion:
    def __init__(self, model: Any, native: frozenset[str], names: Mapping[str, str]) -> None:
        import onnx_ir

        self.ir, self.graph, self.native, self.names = onnx_ir, model.graph, native, names
        self.made: dict[Any, Any] = {}
        """The initializers that are made, by their contents."""

    def run(self) -> None:
        for node in list(self.graph):
            node.metadata_props.clear()  # stack traces, which are larger than small models
            if node.domain != DOMAIN:
                continue
            if node.op_type == "Decode":
                self._decode(node)
            else:
                self._round_trip(node)
        for name, value in list(self.graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                del self.graph.initializers[name]
            elif name in self.names:
                value.name = self.names[name]
        self.graph.opset_imports.pop(DOMAIN, None)

    # --- nodes -------------------------------------------------------------------------------

    def _node(self, before: Any, op: str, *inputs: Any, like: Any = None, **attributes: Any) -> Any:
        """A new node before another; returns its result, which has name and type of `like`."""
        made = self.ir.node(op, list(inputs), attributes=attributes or None)
        (value,) = made.outputs
        if like is not None:
            value.type, value.shape = like.type, like.shape
        self.graph.insert_before(before, made)
        return value

    def _replace(self, node: Any, value: Any) -> None:
        (old,) = node.outputs
        outputs = self.graph.outputs
        for i, output in enumerate(outputs):
            if output is old:
                outputs[i] = value
        name = old.name
        self.ir.convenience.replace_all_uses_with(old, value)
        self.graph.remove(node, safe=True)
        value.name = name

    def _round_trip(self, node: Any) -> None:
        x, scale = node.inputs
        fmt = get_format(node.attributes.get_string("format"))
        group = node.attributes.get_int("group")
        blocks = {"axis": len(x.shape) - 1, "block_size": group} if group else {}
        kind = self._type(fmt)
        codes = self._node(node, "QuantizeLinear", x, scale, output_dtype=int(kind), **blocks)
        like = node.outputs[0]
        self._replace(node, self._node(node, "DequantizeLinear", codes, scale, like=like, **blocks))

    def _decode(self, node: Any) -> None:
        qdata, scale = (self._source(x) for x in node.inputs)
        fmt = get_format(node.attributes.get_string("format"))
        block, shape = (tuple(node.attributes.get_ints(n)) for n in ("block", "shape"))
        (value,) = node.outputs
        transposes = [user for user, _ in value.uses()]
        turned = len(shape) == 2 and not value.is_graph_output() and bool(transposes)
        turned = turned and all(_swaps(user) for user in transposes)
        codes = self._codes(node, qdata, fmt, shape, turned)
        scales, how = self._scales(node, scale, fmt, block, shape, turned)
        like = transposes[0].outputs[0] if turned else value
        made = self._node(node, "DequantizeLinear", codes, scales, like=like, **how)
        if not turned:
            self._replace(node, made)
            return
        for user in transposes:
            self._replace(user, made)
        self.graph.remove(node, safe=True)

    # --- initializers ------------------------------------------------------------------------

    def _source(self, value: Any) -> Any:
        """The initializer that a value is."""
        while value.const_value is None:
            value = value.producer().inputs[0]
        return value

    def _codes(
        self, node: Any, qdata: Any, fmt: Format, shape: tuple[int, ...], turned: bool
    ) -> Any:
        name = self._named(qdata) + ("_transposed" if turned and self._twice(qdata) else "")
        key = (qdata.name, turned)
        made = self.made.get(key)
        if made is None:
            codes = unpack(_tensor(qdata), fmt, shape)
            codes = codes.mT.contiguous() if turned else codes
            if fmt.name not in self.native and fmt.name in WITHIN_E4M3FN and fmt.bits > 4:
                codes = encode(decode(codes, fmt), E4M3FN)
            made = self.made[key] = self._initializer(name, self._array(codes, fmt), fmt)
        if fmt.name in self.native or fmt.bits > 4:
            return made
        index = self._node(node, "Cast", made, to=int(self.ir.DataType.INT32))
        numbers = self._node(node, "Gather", self._table(fmt), index)
        return self._node(node, "Cast", numbers, to=int(self.ir.DataType.FLOAT8E4M3FN))

    def _named(self, inner: Any) -> str:
        return self.names.get(inner.name, inner.name)

    def _twice(self, qdata: Any) -> bool:
        """Whether a weight is in the file as it is and transposed."""
        return (qdata.name, False) in self.made

    def _type(self, fmt: Format) -> Any:
        types = self.ir.DataType
        if fmt.name in self.native:
            return types[TYPES.get(fmt.name, "FLOAT4E2M1")]
        return types.UINT4 if fmt.bits == 4 else types.FLOAT8E4M3FN

    def _array(self, codes: Tensor, fmt: Format) -> "np.ndarray[Any, Any]":
        """Codes as an array of the dtype that `_type` has in NumPy."""
        array = codes.view(torch.uint8).numpy()
        if fmt.name == "int4":
            array = (array << 4).view(np.int8) >> 4
            return array.astype(self.ir.DataType.INT4.numpy())
        kind = self._type(fmt).numpy()
        return array.view(kind) if kind.itemsize == 1 and fmt.bits > 4 else self._short(array, kind)

    def _short(self, array: "np.ndarray[Any, Any]", kind: Any) -> "np.ndarray[Any, Any]":
        """4-bit codes in a dtype of 4 bits, one a byte."""
        return array.view(kind) if kind.kind == "V" and array.dtype != kind else array.astype(kind)

    def _initializer(self, name: str, array: "np.ndarray[Any, Any]", fmt: Format | None) -> Any:
        kind = self.ir.DataType.from_numpy(array.dtype) if fmt is None else self._type(fmt)
        tensor = self.ir.Tensor(array, dtype=kind, name=name)
        taken = self.graph.initializers
        if name in taken:
            if taken[name].uses():
                taken[name].name = name + "_packed"
            else:
                del taken[name]
        value = self.ir.Value(
            name=name,
            type=self.ir.TensorType(kind),
            shape=self.ir.Shape(array.shape),
            const_value=tensor,
        )
        self.graph.register_initializer(value)
        return value

    def _table(self, fmt: Format) -> Any:
        """The numbers of a format by code. Gather takes no 8-bit floats, so they are float32."""
        made = self.made.get(fmt.name)
        if made is None:
            numbers = decode(
                torch.arange(fmt.num_codes).to(torch.uint8).view(fmt.storage_dtype), fmt
            )
            made = self.made[fmt.name] = self._initializer(
                f"{fmt.name}_numbers", numbers.numpy(), None
            )
        return made

    def _scales(
        self,
        node: Any,
        scale: Any,
        fmt: Format,
        block: tuple[int, ...],
        shape: tuple[int, ...],
        turned: bool,
    ) -> tuple[Any, dict[str, int]]:
        """The float32 scales of a matrix of codes, and the attributes that spread them."""
        across, along = block
        held = _tensor(scale)
        kind = getattr(torch, node.attributes.get_string("scale"))
        held = held if held.dtype == kind else held.view(kind)
        axis = len(shape) - 1
        how: dict[str, int] = {}
        if held.dim():
            if across != 1:  # ONNX has blocks of one dimension
                held = held.repeat_interleave(across or shape[-2], -2).narrow(-2, 0, shape[-2])
            how = {"axis": axis, "block_size": along or shape[-1]}
            if held.shape[-1] == 1 and len(shape) == 2:
                held, how = held.squeeze(-1), {"axis": 0}
            if turned:
                held = held.mT if held.dim() == 2 else held
                how["axis"] = 1 - how["axis"]
        key = (scale.name, "scale", turned)
        made = self.made.get(key)
        if made is None:
            name = self._named(scale)
            name += "_transposed" if (scale.name, "scale", not turned) in self.made else ""
            if held.dtype == torch.float32 and fmt.name == "mxint8":
                held = held * fmt.min_subnormal
            array = _bytes(held.contiguous())
            made = self.made[key] = self._initializer(name, array, None)
        if held.dtype == torch.float32:
            return made, how
        if held.dtype == torch.float8_e4m3fn:
            return self._node(node, "Cast", made, to=int(self.ir.DataType.FLOAT)), how
        index = self._node(node, "Cast", made, to=int(self.ir.DataType.INT32))
        found = self._node(node, "Gather", self._table(E8M0FNU), index)
        if fmt.name == "mxint8":
            step = self._initializer("mxint8_step", np.array(fmt.min_subnormal, np.float32), None)
            found = self._node(node, "Mul", found, step)
        return found, how


def _swaps(node: Any) -> bool:
    """Whether a node transposes a matrix."""
    if node.op_type != "Transpose" or node.domain or node.outputs[0].is_graph_output():
        return False
    perm = node.attributes.get("perm")
    return perm is None or tuple(perm.as_ints()) == (1, 0)


def _tensor(value: Any) -> Tensor:
    """The torch tensor of an initializer."""
    held = value.const_value
    raw = getattr(held, "raw", None)
    if isinstance(raw, Tensor):
        return raw.detach().cpu()
    array = np.ascontiguousarray(held.numpy())
    if array.dtype.itemsize > 1 or array.dtype == np.uint8:
        return torch.from_numpy(array)
    named = {"float8_e8m0fnu": torch.float8_e8m0fnu, "float8_e4m3fn": torch.float8_e4m3fn}
    kind = named.get(array.dtype.name) or getattr(torch, array.dtype.name)
    return torch.from_numpy(array.view(np.uint8)).view(kind)


def _bytes(x: Tensor) -> "np.ndarray[Any, Any]":
    """Scales as an array: float32, E4M3FN, or the bytes of E8M0."""
    import ml_dtypes

    if x.dtype == torch.float32:
        return x.numpy()
    array = x.view(torch.uint8).numpy()
    return array.view(ml_dtypes.float8_e4m3fn) if x.dtype == torch.float8_e4m3fn else array
