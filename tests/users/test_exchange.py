"""Files of `sct.exchange`, decoded by the libraries whose layouts they have; and files of these
libraries, decoded here."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from assertions import assert_each
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import scaledtensor as sct
from scaledtensor.exchange import FORMATS, Layout
from scaledtensor.quantization.configs import Config, Dynamic, Static, WeightOnly

sys.path.append(str(Path(__file__).parents[1] / "exchange"))

from exchanged import INPUT_SCALE, plain_weight, weight

#: Package -> what `pip` installs for it.
PACKAGES = {
    "compressed-tensors": "compressed_tensors",
    "fine-grained-fp8": "transformers",
    "modelopt": "modelopt",
    "torchao": "torchao",
    "gguf": "gguf",
}


# --- how each library decodes a file ---------------------------------------------------------


def by_compressed_tensors(path: Path, layout: Layout) -> Tensor:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig

    told = json.loads((path / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(told)
    (scheme,) = config.config_groups.values()
    assert infer_module_format(torch.nn.Linear, scheme).value == layout.written == config.format
    compressor = BaseCompressor.get_value_from_registry(config.format)
    parts = {
        name.removeprefix("m."): x for name, x in load_file(path / "model.safetensors").items()
    }
    expected = {*compressor.compression_param_names(scheme), layout.input_scale} - {""}
    assert expected == parts.keys()
    decoded: Tensor = compressor.decompress(parts, scheme)["weight"]
    return decoded


def by_fine_grained(path: Path, layout: Layout) -> Tensor:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, FP8Linear

    told = json.loads((path / "config.json").read_text())["quantization_config"]
    config = FineGrainedFP8Config.from_dict(told)
    parts = {
        name.removeprefix("m."): x for name, x in load_file(path / "model.safetensors").items()
    }
    rows, columns = parts["weight"].shape
    size, kind = config.weight_block_size, config.activation_scheme
    module = FP8Linear(columns, rows, size, activation_scheme=kind, scale_fmt=config.scale_fmt)
    module.load_state_dict(parts)  # the shapes of the layer that transformers makes
    dtypes = {name: x.dtype for name, x in module.state_dict().items()}
    assert dtypes == {name: x.dtype for name, x in parts.items()}
    held = parts["weight_scale_inv"]
    decoded: Tensor = Fp8Dequantize(None)._dequantize_one(parts["weight"], held, torch.float32)
    return decoded


def by_modelopt(path: Path, layout: Layout, module: str = "m") -> Tensor:
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.export.quant_utils import from_quantized_weight
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    told = json.loads((path / "hf_quant_config.json").read_text())
    assert told["quantization"]["quant_algo"].upper() == layout.name
    convert_hf_quant_config_format(told)
    file = load_file(path / "model.safetensors")
    parts = {n.removeprefix(f"{module}."): x for n, x in file.items() if n.startswith(module)}
    codes, scale = parts["weight"], parts["weight_scale"]
    rows, columns = codes.shape
    shape = torch.Size((rows, columns * 2 if codes.dtype == torch.uint8 else columns))
    dtype = torch.float32
    match layout.name:
        case "NVFP4" | "W4A16_NVFP4":
            whole, sizes = parts["weight_scale_2"], {-1: 16}
            held = NVFP4QTensor(shape, dtype, codes)
            decoded = held.dequantize(scale=scale, double_scale=whole, block_sizes=sizes)
        case "MXFP8":
            decoded = MXFP8QTensor(shape, dtype, codes).dequantize(scale=scale)
        case "FP8_PB_WO":
            held, sizes = FP8QTensor(shape, dtype, codes), {-1: 128, -2: 128}
            decoded = held.dequantize(scale=scale[:, 0, :, 0], block_sizes=sizes)
        case "FP8_PER_CHANNEL_PER_TOKEN":
            held = FP8QTensor(shape, dtype, codes)
            decoded = held.dequantize(scale=scale[:, None], block_sizes={-1: shape[1]})
        case "FP8":
            decoded = from_quantized_weight(codes, scale, "fp8", dtype)
        case _:
            decoded = from_quantized_weight(codes, scale, "int8_wo", dtype)
    return decoded


def by_torchao(path: Path, layout: Layout) -> Tensor:
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
    from torchao.prototype.safetensors.safetensors_utils import is_metadata_torchao

    with safe_open(path / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert is_metadata_torchao(metadata)
    tensors, left = unflatten_tensor_state_dict(load_file(path / "model.safetensors"), metadata)
    assert not left
    assert type(tensors["m.weight"]).__name__ == layout.written
    assert tensors["m.weight"].dtype == torch.float32
    decoded: Tensor = tensors["m.weight"].dequantize()
    return decoded


def by_gguf(path: Path, layout: Layout) -> Tensor:
    import gguf

    (found,) = gguf.GGUFReader(path).tensors
    assert (found.name, found.tensor_type.name) == ("m.weight", layout.written)
    assert list(found.shape) == [384, 256]
    return torch.from_numpy(gguf.dequantize(found.data, found.tensor_type).copy())


DECODERS: dict[str, Callable[[Path, Layout], Tensor]] = {
    "compressed-tensors": by_compressed_tensors,
    "fine-grained-fp8": by_fine_grained,
    "modelopt": by_modelopt,
    "torchao": by_torchao,
    "gguf": by_gguf,
}


@pytest.mark.parametrize("family", FORMATS)
def test__its_library__decodes_the_values_that_were_saved(family: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES[family])

    def check(layout: Layout) -> None:
        path = tmp_path / layout.name.replace(" ", "_")
        path = path.with_suffix(".gguf") if family == "gguf" else path
        x = weight(layout.config)
        sct.exchange.save({"m.weight": x}, path, family)
        decoded = DECODERS[family](path, layout)
        loaded: Any = sct.exchange.load(path)["m.weight"]
        same_codes = torch.equal(loaded.qdata, x.qdata)
        assert same_codes, "codes"
        exact = x.value_in(torch.float64)
        # The table of docs/how_to/exchange.md bounds values that are saved and loaded ...
        bound = {"0": 0.0, "2": 2.0**-23}[layout.difference[:1]]
        bound = 2.0**-11 if "float16" in layout.difference else bound
        bound = 2.0**-23 if layout.reciprocal else bound
        assert worst(loaded.value_in(torch.float64), exact) <= bound
        # ... and values that the library decodes in its own precision.
        if layout.decoded == "0" or family == "gguf":
            ours = loaded.value_in(torch.float32).to(decoded.dtype)
            assert torch.equal(decoded, ours)
        else:
            allowed = 2.0**-8 if decoded.dtype == torch.bfloat16 else 2.0**-23
            assert worst(decoded.double(), exact) <= allowed

    assert_each(FORMATS[family].layouts, check, lambda layout: layout.name)


def worst(x: Tensor, expected: Tensor) -> float:
    """The largest relative difference."""
    difference = (x - expected).abs() / expected.abs().clamp_min(torch.finfo(torch.float64).tiny)
    return float(difference.amax())


@pytest.mark.parametrize("family", ["compressed-tensors", "gguf"])
def test__powers_of_two__make_inexact_layouts_exact(family: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES[family])
    for layout in FORMATS[family].layouts:
        if layout.difference == "0":
            continue
        path = tmp_path / (layout.name + (".gguf" if family == "gguf" else ""))
        if family == "gguf":
            fmt = layout.config.weight.format
            x = weight(WeightOnly(fmt, 32, "power_of_two"))
        else:
            held = weight(layout.config)
            levels = sct.formats.TwoLevelScale(held.scale, torch.tensor(2.0**-7))
            scale = None if held.input_scale is None else INPUT_SCALE
            x = sct.QuantizedTensor(held.codes, levels, held.config, input_scale=scale)
        sct.exchange.save({"m.weight": x}, path, family)
        loaded: Any = sct.exchange.load(path)["m.weight"]
        assert torch.equal(loaded.value_in(torch.float64), x.value_in(torch.float64))
        assert torch.equal(DECODERS[family](path, layout).double(), x.value_in(torch.float64))


# --- models of transformers ------------------------------------------------------------------


def llama(config: Config | dict[str, Config | None] | None, **more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes, **tokens, **more))
    if config is not None:
        sct.quantize_(made, config, lambda module, name: name != "lm_head")
    return made


IDS = torch.arange(1, 13).view(2, 6)


def values(model: Any) -> dict[str, Tensor]:
    found = {name: x.detach() for name, x in model.state_dict().items()}
    plain = (Tensor, torch.nn.Parameter)
    return {n: x if type(x) in plain else x.dequantize() for n, x in found.items()}  # type: ignore[comparison-overlap]


def assert_same_values(model: Any, expected: Any, rtol: float = 0) -> None:
    """The parameters that transformers' own model has are the same in both."""
    got, want = values(model), values(expected)
    for name in llama(None).state_dict():
        x = want[name].float()
        torch.testing.assert_close(got[name].float(), x, rtol=rtol, atol=0, msg=name)


def test__transformers__opens_folders_of_compressed_tensors_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    mixed = {"*.mlp.*": WeightOnly("int4", 64), "*": Dynamic("e4m3fn")}
    # Largest relative differences in a float32 model, and in a BF16 model that is decompressed by
    # its first forward pass or while it is loaded. A model in BF16 rounds float32 scales to BF16 in
    # the first way. The library decodes MX and NVFP4 to BF16, and multiplies by them in a model of
    # BF16 alone.
    cases: list[tuple[str, Any, float | None, float, float | None]] = [
        ("FP8_DYNAMIC", Dynamic("e4m3fn"), 0, 2.0**-7, 0),
        ("FP8_BLOCK", Dynamic("fp8_block"), 0, 2.0**-7, 0),
        ("W8A8", Dynamic("int8"), 0, 2.0**-7, 0),
        ("W4A16", WeightOnly("int4", 64), 0, 2.0**-7, 0),
        ("MXFP4A16", WeightOnly("mxfp4"), None, 0, 0),
        ("MXFP8A16", WeightOnly("mxfp8"), None, 0, 0),
        ("NVFP4A16", WeightOnly("nvfp4"), None, 2.0**-7, 2.0**-7),
        ("mixed", mixed, 0, 2.0**-7, None),
    ]

    def check(case: tuple[str, Any, float | None, float, float | None]) -> None:
        name, config, single, half, at_once = case
        for dtype, bound in ((torch.float32, single), (torch.bfloat16, half)):
            if bound is None:
                continue
            saved, folder = llama(config).to(dtype), tmp_path / f"{name}{dtype}"
            sct.exchange.save(saved, folder)
            opened = AutoModelForCausalLM.from_pretrained(folder)
            opened(IDS)  # the library decompresses in the first forward pass
            assert_same_values(opened, saved, bound)
            if at_once is not None:
                how = CompressedTensorsConfig(dequantize=True)
                plain = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how)
                assert_same_values(plain, saved, at_once)

    assert_each(cases, check, lambda case: case[0])


def test__transformers__opens_folders_of_fine_grained_fp8_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")  # transformers asks for it before it reads such a folder
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    configs = [layout.config for layout in FORMATS["fine-grained-fp8"].layouts]
    for i, config in enumerate(configs):
        if config.static:
            continue
        saved, folder = llama(config), tmp_path / str(i)
        sct.exchange.save(saved, folder, "fine-grained-fp8")
        how = FineGrainedFP8Config(dequantize=True)
        opened = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how)
        assert_same_values(opened, saved)
        assert_same_values(AutoModelForCausalLM.from_pretrained(folder), saved)


def test__transformers__opens_folders_of_torchao_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from transformers import AutoModelForCausalLM

    for i, config in enumerate((WeightOnly("e4m3fn"), WeightOnly("int8"), WeightOnly("int4", 32))):
        saved, folder = llama(config), tmp_path / str(i)
        sct.exchange.save(saved, folder, "torchao")
        opened = AutoModelForCausalLM.from_pretrained(folder)
        assert "torchao" in type(opened.model.layers[0].mlp.up_proj.weight).__module__
        assert_same_values(opened, saved)


# --- files that these libraries write --------------------------------------------------------


def test__checkpoints_that_compressed_tensors_writes__are_read(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    for name, config in {
        "FP8_DYNAMIC": Dynamic("e4m3fn"),
        "W4A16": WeightOnly("int4", 128),
        "MXFP4A16": WeightOnly("mxfp4"),
    }.items():
        made = llama(None).bfloat16()
        scheme = preset_name_to_scheme(name, ["Linear"])
        told = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
        apply_quantization_config(made, told)
        for module in made.modules():
            if hasattr(module, "weight_scale"):
                module.weight_scale.data.fill_(2.0**-6)
        compressor = ModelCompressor.from_pretrained_model(made)
        compressor.compress_model(made)
        made.save_pretrained(tmp_path / name)
        compressor.update_config(tmp_path / name)
        opened = llama(None).bfloat16()
        sct.exchange.load_into(opened, tmp_path / name)
        assert opened.model.layers[0].mlp.up_proj.weight.config == config
        made(IDS)  # decompresses
        assert_same_values(opened, made)


def test__checkpoints_that_modelopt_exports__are_read(tmp_path: Path) -> None:
    pytest.importorskip("modelopt")
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    for name, config in {
        "FP8_DEFAULT_CFG": Static("e4m3fn"),
        "FP8_PER_CHANNEL_PER_TOKEN_CFG": Dynamic("e4m3fn"),
        "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": WeightOnly("fp8_block"),
        "INT8_WEIGHT_ONLY_CFG": WeightOnly("int8"),
    }.items():
        made = llama(None, architectures=["LlamaForCausalLM"]).bfloat16()
        mtq.quantize(made, getattr(mtq, name), lambda model: model(IDS))
        export_hf_checkpoint(made, export_dir=tmp_path / name)
        opened = llama(None).bfloat16()
        sct.exchange.load_into(opened, tmp_path / name)
        held = opened.model.layers[0].mlp.up_proj.weight
        assert held.config == config
        layout = next(a for a in FORMATS["modelopt"].layouts if a.fits(config))
        theirs = by_modelopt(tmp_path / name, layout, "model.layers.0.mlp.up_proj")
        assert torch.equal(held.value_in(torch.float32), theirs)
        assert opened(IDS).logits.isfinite().all()


def test__files_that_torchao_and_gguf_write__are_read(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    gguf = pytest.importorskip("gguf")
    from safetensors.torch import save_file
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    made = torch.nn.Sequential(torch.nn.Linear(64, 32))
    quantize_(made, Int8WeightOnlyConfig())
    tensors, metadata = flatten_tensor_state_dict(made.state_dict())
    save_file(tensors, tmp_path / "torchao.safetensors", metadata)
    found: Any = sct.exchange.load(tmp_path / "torchao.safetensors")
    assert torch.equal(found["0.weight"].dequantize(), made[0].weight.dequantize())
    assert torch.equal(found["0.bias"], made[0].bias)

    given, expected = plain_weight(8, 64), {}
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "test")
    for name in ("Q8_0", "Q4_0", "MXFP4"):
        kind = gguf.GGMLQuantizationType[name]
        held = gguf.quantize(given.numpy(), kind)
        expected[name] = torch.from_numpy(gguf.dequantize(held, kind))
        writer.add_tensor(name, held, raw_dtype=kind)
    writer.add_tensor("plain", given.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = sct.exchange.load(tmp_path / "a.gguf")
    assert torch.equal(found.pop("plain"), given)
    for name, x in found.items():
        assert torch.equal(x.value_in(torch.float32), expected[name]), name


def test__a_file_of_gguf_that_is_cut_or_holds_other_types__is_refused(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from scaledtensor.errors import CheckpointError, UnsupportedError

    path = tmp_path / "a.gguf"
    given = {"m.weight": weight(WeightOnly("int8", 32)), "m.bias": torch.ones(256).bfloat16()}
    sct.exchange.save(given, path, "gguf")
    assert torch.equal(sct.exchange.load(path)["m.bias"], given["m.bias"])
    whole = path.read_bytes()
    for cut in (0, 3, 40, 200, len(whole) - 512):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"a\.gguf"):
            sct.exchange.load(path)
    writer = gguf.GGUFWriter(path, "test")
    kind = gguf.GGMLQuantizationType.Q5_0
    writer.add_tensor("x", gguf.quantize(plain_weight(8, 64).numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="Q5_0"):
        sct.exchange.load(path)
    with pytest.raises(CheckpointError, match=r"\.gguf"):
        sct.exchange.save(given, tmp_path / "a folder", "gguf")
    small = weight(WeightOnly("int8", 32), plain_weight() * 1e-4)
    with pytest.raises(UnsupportedError, match="2\\^-14"):
        sct.exchange.save({"m.weight": small}, tmp_path / "b.gguf", "gguf")
    assert not (tmp_path / "b.gguf").exists()
