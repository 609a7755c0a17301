"""Writes samples.json: weights that other libraries quantised, wrote and decoded by themselves.

    python tests/exchange/write_samples.py     (in the environment of `make test-users`)

Each sample has the tensors of one module as the library wrote them, the config of the file, and the
values that the library decodes. `test_samples.py` reads them without these libraries.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = Path(__file__).with_name("samples.json")


def weight(rows: int = 2, columns: int = 32) -> Tensor:
    """Normal numbers with rows of different sizes, a zero block and an outlier."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 1, rows)[:, None]
    x[0, :16] = 0
    x[-1, -1] = 40.0
    return x


def told(x: Tensor) -> dict[str, Any]:
    """A tensor as JSON has it: dtype, shape and bytes."""
    raw = x.detach().contiguous().reshape(-1).view(torch.uint8)
    return {
        "dtype": str(x.dtype).removeprefix("torch."),
        "shape": list(x.shape),
        "bytes": bytes(raw.tolist()).hex(),
    }


def sample(parts: dict[str, Tensor], entry: Any, decoded: Tensor, **more: Any) -> dict[str, Any]:
    tensors = {name: told(x) for name, x in parts.items() if name != "bias"}
    return {"parts": tensors, "entry": entry, "decoded": told(decoded.float()), **more}


def of_compressed_tensors(name: str, size: int | None = None) -> dict[str, Any]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import (
        QuantizationConfig,
        initialize_module_for_quantization,
    )
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    w = weight(2, 128) if name == "FP8_BLOCK" else weight()
    scheme = preset_name_to_scheme(name, ["Linear"])
    if size is not None:
        scheme.weights.group_size = size
    module = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    module.weight.data = w
    initialize_module_for_quantization(module, scheme)
    shape, size = module.weight_scale.shape, scheme.weights.group_size
    blocks = w.reshape(1, -1) if shape.numel() == 1 else w.reshape(shape.numel(), -1)
    low, high = blocks.amin(-1).reshape(shape), blocks.amax(-1).reshape(shape)
    whole = None
    if hasattr(module, "weight_global_scale"):
        whole = generate_gparam(w.amin(), w.amax())
        module.weight_global_scale.data.copy_(whole)
    scale, _ = calculate_qparams(low, high, scheme.weights, global_scale=whole)
    module.weight_scale.data = scale.float()
    for own in ("input_scale", "input_global_scale"):
        if hasattr(module, own):
            getattr(module, own).data.fill_(0.375)
    scheme.format = infer_module_format(torch.nn.Linear, scheme).value
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    parts = compressor.compress(dict(module.state_dict()), scheme)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=scheme.format,
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    decoded = compressor.decompress(dict(parts), scheme)["weight"]
    return sample(parts, config.model_dump(mode="json"), decoded)


def of_fine_grained(scale_fmt: str) -> dict[str, Any]:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    class Quantizer:
        quantization_config = FineGrainedFP8Config(scale_fmt=scale_fmt)

    w = weight(4, 4).repeat_interleave(32, 0).repeat_interleave(32, 1)  # a square of 128
    parts = Fp8Quantize(Quantizer()).convert({"m.weight": w})
    parts = {name.rpartition(".")[2]: x for name, x in parts.items()}
    decoded = Fp8Dequantize(None)._dequantize_one(*parts.values(), torch.float32)
    entry = Quantizer.quantization_config.to_dict()
    # All rows and columns repeat 32 times, so the file keeps one of each.
    few = {"weight": parts["weight"].view(torch.uint8)[::32, ::32].view(torch.float8_e4m3fn)}
    return sample(parts | few, entry, decoded[::32, ::32], repeated=32)


def of_modelopt(name: str) -> dict[str, Any]:
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    w, entry = weight(), {"quant_method": "modelopt", "quant_algo": name, "ignore": ["lm_head"]}
    if "NVFP4" in name:
        held, scale, whole = NVFP4QTensor.quantize(w, 16)
        parts = {"weight": held._quantized_data, "weight_scale": scale, "weight_scale_2": whole}
        decoded = held.dequantize(scale=scale, double_scale=whole, block_sizes={-1: 16})
    elif name == "MXFP8":
        held, scale = MXFP8QTensor.quantize(w)
        parts = {"weight": held._quantized_data, "weight_scale": scale}
        decoded = held.dequantize(scale=scale)
    else:
        held, scale = FP8QTensor.quantize(w, axis=None)
        parts = {"weight": held._quantized_data, "weight_scale": scale.reshape(())}
        decoded = held.dequantize(scale=scale)
    if name in ("FP8", "NVFP4"):
        parts["input_scale"] = torch.tensor(0.375)
    return sample(parts, entry, decoded)


def of_torchao(name: str) -> dict[str, Any]:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8Tensor,
        Int8Tensor,
        IntxWeightOnlyConfig,
        PerGroup,
        PerRow,
        PerTensor,
        quantize_,
    )
    from torchao.quantization.quantize_.workflows import (
        QuantizeTensorToFloat8Kwargs,
        QuantizeTensorToInt8Kwargs,
    )

    w = weight()
    match name:
        case "Float8Tensor":
            x = Float8Tensor.from_hp(w, granularity=PerRow())
        case "Float8Tensor per tensor":
            x = Float8Tensor.from_hp(w, granularity=PerTensor())
        case "Float8Tensor dynamic":
            inputs = QuantizeTensorToFloat8Kwargs()
            x = Float8Tensor.from_hp(w, granularity=PerRow(), act_quant_kwargs=inputs)
        case "Int8Tensor":
            x = Int8Tensor.from_hp(w, PerRow())
        case "Int8Tensor dynamic":
            x = Int8Tensor.from_hp(
                w, PerRow(), act_quant_kwargs=QuantizeTensorToInt8Kwargs(PerRow())
            )
        case "IntxUnpackedToInt8Tensor":
            module = torch.nn.Linear(*w.shape[::-1], bias=False)
            module.weight.data = w
            quantize_(module, IntxWeightOnlyConfig(torch.int4, PerGroup(32)))
            x = module.weight.data
        case "MXTensor FP8":
            x = MXTensor.to_mx(w, torch.float8_e4m3fn, 32)
        case "MXTensor FP4":
            x = MXTensor.to_mx(w, torch.float4_e2m1fn_x2, 32)
        case _:
            x = NVFP4Tensor.to_nvfp4(w, per_tensor_scale=w.abs().amax() / (448 * 6))
    parts, metadata = flatten_tensor_state_dict({"m.weight": x})
    parts = {key.removeprefix("m."): t for key, t in parts.items()}
    return sample(parts, metadata["m.weight"], x.dequantize())


def of_gguf(name: str) -> dict[str, Any]:
    import gguf

    kind = gguf.GGMLQuantizationType[name]
    held = gguf.quantize(weight().numpy(), kind)
    decoded = torch.from_numpy(gguf.dequantize(held, kind))
    return sample({"": torch.from_numpy(held)}, name, decoded)


SAMPLES: dict[str, dict[str, Any]] = {
    "compressed-tensors": {
        name: (of_compressed_tensors, name)
        for name in (
            *("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "MXFP4", "MXFP4A16", "MXFP6A16"),
            *("MXFP8", "MXFP8A16", "NVFP4", "NVFP4A16"),
        )
    }
    | {name: (of_compressed_tensors, name, 16) for name in ("W8A16", "W4A16")},
    "fine-grained-fp8": {
        "128 x 128": (of_fine_grained, "float"),
        "128 x 128 UE8M0": (of_fine_grained, "ue8m0"),
    },
    "modelopt": {name: (of_modelopt, name) for name in ("FP8", "NVFP4", "W4A16_NVFP4", "MXFP8")},
    "torchao": {
        name: (of_torchao, name)
        for name in (
            *("Float8Tensor", "Float8Tensor per tensor", "Float8Tensor dynamic", "Int8Tensor"),
            *("Int8Tensor dynamic", "IntxUnpackedToInt8Tensor", "MXTensor FP8", "MXTensor FP4"),
            "NVFP4Tensor",
        )
    },
    "gguf": {name: (of_gguf, name) for name in ("Q8_0", "Q4_0", "MXFP4")},
}


def main() -> None:
    warnings.simplefilter("ignore")
    found = {
        family: {name: make(*arguments) for name, (make, *arguments) in own.items()}
        for family, own in SAMPLES.items()
    }
    lines = [
        f"  {json.dumps(family)}: {{\n"
        + ",\n".join(f"    {json.dumps(name)}: {json.dumps(s)}" for name, s in own.items())
        + "\n  }"
        for family, own in found.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
