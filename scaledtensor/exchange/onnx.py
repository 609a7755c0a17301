"""ONNX files of quantised models: weights in codes, with QuantizeLinear and DequantizeLinear.

    sct.exchange.export_onnx(model, (x,), "model.onnx", dynamic_shapes=({0: "batch"},))

torch's exporter translates the model (`torch.onnx.export`), and this module translates products
with quantised weights. A weight is an initializer of codes with its scales, and DequantizeLinear
gives its value:

    format                         type in the file                       opset
    e4m3fn, e5m2 and their fnuz    FLOAT8E4M3FN, FLOAT8E5M2, ...          19; blocks 21
    int8, mxint8                   INT8                                   19; blocks 21
    int4                           INT4                                   21
    e2m1fn                         UINT4 and a table of 16 numbers        21
                                   FLOAT4E2M1, with fp4="float4e2m1"      23
    e3m2fn, e2m3fn                 FLOAT8E4M3FN, which has their numbers  19; blocks 21

`Static` and `Dynamic` put QuantizeLinear and DequantizeLinear before the input of a product, too.
`Dynamic` measures amax by ONNX operators, since DynamicQuantizeLinear makes only uint8. Its scales
have the bits of eager code. QuantizeLinear rounds the quotient x / scale to
float32 before it rounds to the format. So a code is the other neighbour if x / scale is within
2^-24 of a tie, and only under scales that are no powers of two. ONNX saturates infinities.

In a file, blocks of several rows have one float32 scale for each row, and E8M0 scales are bytes
that index a table of 256 numbers. The values of weights have the bits of eager code. Sums of
products are in another order.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from os import PathLike
from typing import Any, Literal

import torch
from torch import nn

from scaledtensor.errors import (
    CheckpointError,
    ModelError,
    OptionError,
    QuantizationError,
)
from scaledtensor.exchange.onnx_forms import TYPES, Forms, check_config
from scaledtensor.exchange.onnx_graph import expand
from scaledtensor.quantization.tensor import QuantizedTensor
from scaledtensor.quantization.written import written_as
from scaledtensor.tensors.wrapper import is_wrapper

__all__ = ["export_onnx"]

#: Value of `fp4` -> the least opset that has the types.
_OPSETS = {"uint4": 21, "float4e2m1": 23}


def export_onnx(
    model: nn.Module,
    args: Sequence[Any] = (),
    path: str | PathLike[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset: int | None = None,
    fp4: Literal["uint4", "float4e2m1"] = "uint4",
) -> Any:
    """Write a quantised model as an ONNX file.

    Args:
        model: a model that `quantize_` converted. It stays as it is.
        args: example inputs of the model.
        path: the file to write. None writes none.
        kwargs: example inputs by name.
        dynamic_shapes: which sizes of inputs may change, as `torch.export.export` takes them, such
            as `({0: "batch"},)`.
        input_names, output_names: names in the file.
        opset: the version of ONNX's operators, from 21 on. None takes 21, or 23 for "float4e2m1".
        fp4: the type of E2M1 codes. "uint4" takes the codes as an index into a table of 16 numbers,
            which onnxruntime runs on a CPU. "float4e2m1" is ONNX's own type. onnxruntime 1.32 has
            no kernel for it on a CPU.

    Returns:
        torch's `ONNXProgram`: `program.save(path)`, `program.model_proto`.

    Raises:
        CheckpointError: onnx or onnxscript is not installed.
        ModelError: `model` is no module, or has ScaledTensors.
        QuantizationError: `model` has no quantised weight.
        UnsupportedError: ONNX has no type for a format, or no operators for a config.
        OptionError: `opset` or `fp4` is not one of the allowed.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"export_onnx takes an nn.Module; got {type(model).__name__}")
    if fp4 not in _OPSETS:
        raise OptionError(f"fp4 is one of {', '.join(map(repr, _OPSETS))}; got {fp4!r}")
    least = _OPSETS[fp4]
    opset = least if opset is None else opset
    if not isinstance(opset, int) or opset < least:
        raise OptionError(f"opset is a number from {least} on with fp4={fp4!r}; got {opset!r}")
    _check(model)
    _libraries()
    from torch import onnx

    native = frozenset(TYPES) | ({"e2m1fn"} if fp4 == "float4e2m1" else set())
    with _bytes_for_scales(model), written_as(Forms(native).table()):
        program: Any = onnx.export(
            model,
            tuple(args),
            kwargs=None if kwargs is None else dict(kwargs),
            dynamic_shapes=dynamic_shapes,
            input_names=input_names,
            output_names=output_names,
            opset_version=opset,
            dynamo=True,
            verbose=False,
        )
    expand(program.model, native, _names(model))
    if path is not None:
        program.save(path)
    return program


def _check(model: nn.Module) -> None:
    found = False
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(x, QuantizedTensor):
            found = True
            check_config(x.config)
        elif is_wrapper(x):
            raise ModelError(
                f"{name} is a {type(x).__name__}: unscale_model(model), which is exact, and "
                "quantize_(model, config) come before export_onnx"
            )
    if not found:
        raise QuantizationError(
            "the model has no quantised weight: quantize_(model, config) comes first, or "
            "torch.onnx.export writes the plain model"
        )


def _names(model: nn.Module) -> dict[str, str]:
    """The names in the file of the inner tensors of weights, by the names that torch gives them:
    "0.weight" for codes, "0.weight_scale", "0.weight_input_scale"."""
    found: dict[str, str] = {}
    for fqn, module in model.named_modules():
        prefix = f"{fqn}." if fqn else ""
        for name, x in module._parameters.items():
            if isinstance(x, QuantizedTensor):
                for i, part in enumerate(x.INNER):
                    own = prefix + name + (f"_{part}" if i else "")
                    found[f"{prefix}parametrizations.{name}.original{i}"] = own
    return found


@contextmanager
def _bytes_for_scales(model: nn.Module) -> Iterator[None]:
    """A context in which E8M0 scales of the weights are uint8: torch's exporter does not know the
    dtype of E8M0."""
    swapped: list[tuple[nn.Module, str, Any]] = []
    try:
        for module in model.modules():
            for name, x in module._parameters.items():
                if isinstance(x, QuantizedTensor) and x.scale.dtype == torch.float8_e8m0fnu:
                    inner = [getattr(x, part) for part in x.INNER]
                    inner[1] = inner[1].view(torch.uint8)
                    swapped.append((module, name, x))
                    module._parameters[name] = nn.Parameter(x.like(*inner), requires_grad=False)
        yield
    finally:
        for module, name, x in swapped:
            module._parameters[name] = x


def _libraries() -> None:
    for name in ("onnx", "onnxscript", "onnx_ir"):
        try:
            import_module(name)
        except ImportError as error:
            raise CheckpointError(
                f"{name} is not installed: pip install 'scaledtensor[onnx]'"
            ) from error
