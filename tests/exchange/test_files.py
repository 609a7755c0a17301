"""Files in the layouts of other libraries: written, read back, put into models, and refused."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from assertions import assert_each
from exchanged import IDS, model, plain_weight, weight
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor.errors import CheckpointError, QuantizationError, UnsupportedError
from scaledtensor.exchange import FORMATS, Family, Layout
from scaledtensor.quantization.configs import Config, Dynamic, WeightOnly

W4 = WeightOnly("int4", 64)
FOLDERS = [f for f in FORMATS.values() if f.name != "gguf"]
ROWS = [(family, layout) for family in FOLDERS for layout in family.layouts]


def name_of(row: tuple[Family, Layout]) -> str:
    return f"{row[0].name} {row[1].name}"


def test__every_layout__returns_what_was_saved(tmp_path: Path) -> None:
    def check(row: tuple[Family, Layout]) -> None:
        family, layout = row
        folder = tmp_path / name_of(row).replace(" ", "_")
        x, bias = weight(layout.config), torch.randn(256).bfloat16()
        given = {"m.weight": x, "m.bias": bias, "norm.weight": torch.ones(3)}
        sct.exchange.save(given, folder, family.name)
        found = sct.exchange.load(folder)
        assert found.keys() == given.keys()
        y: Any = found["m.weight"]
        assert (y.config, y.shape, y.dtype) == (x.config, x.shape, torch.float32)
        assert torch.equal(x.qdata, y.qdata)
        assert torch.equal(x.scale.float(), y.scale.float())
        assert torch.equal(found["m.bias"], bias)
        assert (x.input_scale is None) == (y.input_scale is None)
        if x.input_scale is not None and y.input_scale is not None:
            assert x.input_scale == y.input_scale
        bound = 2.0**-23 if "2^-23" in layout.difference else 0
        torch.testing.assert_close(y.tensor_scale, x.tensor_scale, rtol=bound, atol=0)

    assert_each(ROWS, check, name_of)


def test__groups_of_other_sizes_and_odd_shapes__return_too(tmp_path: Path) -> None:
    cases: list[tuple[str, Config, tuple[int, int]]] = [
        ("compressed-tensors", WeightOnly("int4", 32), (3, 96)),
        ("compressed-tensors", WeightOnly("int4"), (3, 43)),
        ("compressed-tensors", WeightOnly("int8", 10), (1, 30)),
        ("compressed-tensors", WeightOnly("e4m3fn", 16), (5, 32)),
        ("compressed-tensors", Dynamic("fp8_block"), (130, 200)),
        ("compressed-tensors", WeightOnly("e2m3fn", 32, "e8m0"), (1, 32)),
        ("torchao", WeightOnly("int4", 16), (3, 48)),
        ("torchao", WeightOnly("e4m3fn", 8), (3, 48)),
    ]

    def check(case: tuple[str, Config, tuple[int, int]]) -> None:
        family, config, shape = case
        folder = tmp_path / f"{family}{config.to_json()}{shape}".replace("/", "")
        x = weight(config, plain_weight(*shape))
        sct.exchange.save({"weight": x} if family != "torchao" else {"m.weight": x}, folder, family)
        (y,) = sct.exchange.load(folder).values()
        assert isinstance(y, sct.QuantizedTensor)
        assert y.config == config
        assert torch.equal(x.value_in(torch.float64), y.value_in(torch.float64))

    assert_each(cases, check)


@pytest.mark.parametrize("family", FOLDERS, ids=lambda family: family.name)
def test__a_model__computes_the_same_after_load_into(family: Family, tmp_path: Path) -> None:
    configs = {
        "compressed-tensors": {
            "layers.0": Dynamic("fp8_block"),
            "layers.1": WeightOnly("int4", 64),
        },
        "fine-grained-fp8": {"*": Dynamic("fp8_block")},
        "modelopt": {"layers.0": Dynamic("e4m3fn"), "layers.1": WeightOnly("int8")},
        "torchao": {"layers.0": WeightOnly("int8"), "layers.1": WeightOnly("nvfp4")},
    }
    saved, fresh = model(configs[family.name]), model(seed=1).eval()
    sct.exchange.save(saved, tmp_path / "folder", family.name)
    sct.exchange.load_into(fresh, tmp_path / "folder")
    assert torch.equal(saved(IDS), fresh(IDS))
    assert "WeightOnly" in str(fresh) or "Dynamic" in str(fresh)
    assert not fresh.layers[0].weight.requires_grad
    assert type(fresh.head.weight) is nn.Parameter
    # It is an ordinary quantised model: it saves, compiles and becomes plain.
    again = model(configs[family.name], seed=2)
    again.load_state_dict(fresh.state_dict())
    assert torch.equal(again(IDS), fresh(IDS))
    compiled = torch.compile(fresh, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(IDS), fresh(IDS))
    sct.unscale_model(fresh)
    assert type(fresh.layers[0].weight) is nn.Parameter


def test__the_config__names_layers_and_leaves_plain_ones_out(tmp_path: Path) -> None:
    def entry(config: Any, family: str) -> dict[str, Any]:
        sct.exchange.save(model(config), tmp_path / "folder", family)
        told: dict[str, Any] = json.loads((tmp_path / "folder" / "config.json").read_text())
        assert told["dtype"] == "float32"
        found: dict[str, Any] = told["quantization_config"]
        return found

    one = entry(Dynamic("e4m3fn"), "compressed-tensors")
    assert one["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert one["ignore"] == ["head"]
    two = entry({"layers.0": WeightOnly("int4", 64), "layers.1": WeightOnly("int8")},
                "compressed-tensors")  # fmt: skip
    assert [g["targets"] for g in two["config_groups"].values()] == [["layers.0"], ["layers.1"]]
    assert two["format"] == "pack-quantized"
    assert entry(Dynamic("fp8_block"), "fine-grained-fp8") == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "float",
        "modules_to_not_convert": ["head"],
    }
    assert entry(WeightOnly("nvfp4"), "modelopt")["quant_algo"] == "W4A16_NVFP4"
    second = json.loads((tmp_path / "folder" / "hf_quant_config.json").read_text())
    assert second["quantization"] == {
        "quant_algo": "W4A16_NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": None,
        "exclude_modules": ["head", "table"],
    }
    # Another format in the same folder leaves no file of the old one.
    entry(Dynamic("e4m3fn"), "compressed-tensors")
    assert not (tmp_path / "folder" / "hf_quant_config.json").exists()


def test__nvfp4_with_inputs__is_saved_with_the_scale_of_inputs(tmp_path: Path) -> None:
    given = model(Dynamic("nvfp4"))
    expected = given(IDS)
    batches = [IDS, (IDS.flip(1),)]
    inputs = given.table(torch.stack([IDS, IDS.flip(1)])).abs().amax()
    for family in ("compressed-tensors", "modelopt"):
        sct.exchange.save(given, tmp_path / family, family, calibration=batches)
        held: Any = sct.exchange.load(tmp_path / family)["layers.0.weight"]
        torch.testing.assert_close(held.input_scale, inputs / (448 * 6), rtol=2.0**-22, atol=0)
    assert given.layers[0].weight.input_scale is None
    assert torch.equal(given(IDS), expected)
    told = json.loads((tmp_path / "compressed-tensors" / "config.json").read_text())
    group = told["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"]["dynamic"] == "local"
    wrong: list[tuple[Any, Any, str]] = [
        (given, [], "no batch"),
        (model(WeightOnly("nvfp4")), [IDS], "calibration is for"),
        (dict(given.state_dict()), [IDS], "calibration is for"),
    ]
    for source, data, words in wrong:
        with pytest.raises(QuantizationError, match=words):
            sct.exchange.save(source, tmp_path / "wrong", calibration=data)
    assert not (tmp_path / "wrong").exists()


def test__modelopt_s_own_file__is_enough(tmp_path: Path) -> None:
    sct.exchange.save(model(WeightOnly("nvfp4")), tmp_path, "modelopt")
    (tmp_path / "config.json").unlink()
    found = sct.exchange.load(tmp_path)
    assert found["layers.0.weight"].config == WeightOnly("nvfp4")  # type: ignore[attr-defined]


# --- bad input -------------------------------------------------------------------------------


def assert_refused(folder: Path, error: type[Exception], *words: str) -> None:
    """Loading raises `error`, whose message has these words, and changes no model."""
    fresh = model(seed=1)
    before = {name: x.clone() for name, x in fresh.state_dict().items()}
    with pytest.raises(error) as caught:
        sct.exchange.load_into(fresh, folder)
    for word in (str(folder), *words):
        assert word in str(caught.value), caught.value
    assert all(torch.equal(x, before[name]) for name, x in fresh.state_dict().items())
    assert all(type(p) is nn.Parameter for p in fresh.parameters())


def changed(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


Case = tuple[str, Config, Callable[[dict[str, Tensor]], Any], tuple[str, ...]]


def test__damaged_weights__are_refused_by_name(tmp_path: Path) -> None:
    fp8, nvfp4 = Dynamic("e4m3fn"), WeightOnly("nvfp4")
    one = "layers.1"

    def put(name: str, f: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
        return lambda t: t.update({f"{one}.{name}": f(t[f"{one}.{name}"]).contiguous()})

    def with_nan(x: Tensor) -> Tensor:
        held = x.clone().float()
        held.view(-1)[0] = float("nan")
        return held.to(x.dtype)

    scale, packed, whole = "weight_scale", "weight_packed", "weight_global_scale"

    def lost(name: str) -> Callable[[dict[str, Tensor]], Any]:
        return lambda t: t.pop(name)

    def gained(name: str, x: Tensor) -> Callable[[dict[str, Tensor]], Any]:
        return lambda t: t.update({name: x})

    cases: list[Case] = [
        ("no scale", fp8, lost(f"{one}.{scale}"), (f"{one} of", "has no weight_scale")),
        ("no second level", nvfp4, lost(f"{one}.{whole}"), (f"{one} of", f"has no {whole}")),
        ("no codes", nvfp4, lost(f"{one}.{packed}"), (f"{one} of", f"has no {packed}")),
        ("no shape", W4, lost(f"{one}.weight_shape"), (f"{one} of", "has no weight_shape")),
        ("another shape", fp8, put(scale, lambda x: x[:-1]), (scale, "(127, 1)", "(128, 1)")),
        ("another dtype", fp8, put(scale, lambda x: x.to(torch.int32)), (scale, "torch.int32")),
        ("float32 blocks", nvfp4, put(scale, lambda x: x.float()), (scale, "torch.float32")),
        ("NaN", fp8, put(scale, with_nan), (f".{scale}", "the scale nan")),
        ("NaN of a block", nvfp4, put(scale, with_nan), (f".{scale}", "the scale nan")),
        ("negative", fp8, put(scale, lambda x: -x), (f".{scale}", "the scale -")),
        ("zero", nvfp4, put(whole, lambda x: x * 0), (f".{whole}", "the scale 0.0")),
        ("plain codes", fp8, put("weight", lambda x: x.float()), (".weight is", "torch.float32")),
        ("another size", W4, put("weight_shape", lambda x: x + 64), (one, "does not hold")),
        ("another model", fp8, lost("norm.bias"), ("it has no norm.bias",)),
        ("a stranger", fp8, gained("x", torch.ones(2)), ("this model has no x",)),
        ("too many scales", fp8, gained(f"{one}.input_scale", torch.ones(1)), (one, "no place")),
        ("a plain layer", fp8, gained(f"head.{scale}", torch.ones(16, 1)), ("head of", "not say")),
    ]

    def check(case: Case) -> None:
        name, config, change, words = case
        folder = tmp_path / name.replace(" ", "_")
        sct.exchange.save(model(config), folder)
        changed(folder, change)
        assert_refused(folder, CheckpointError, *words)

    assert_each(cases, check, lambda case: case[0])


def test__schemes_without_a_layout__are_refused_by_name(tmp_path: Path) -> None:
    def group(told: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = told["config_groups"]["group_0"]
        return found

    def weights(**values: Any) -> Callable[[dict[str, Any]], None]:
        return lambda told: group(told)["weights"].update(values)

    ct, outputs = "compressed-tensors", {"output_activations": {"num_bits": 8}}
    cases: list[tuple[str, str, Any, tuple[str, ...]]] = [
        ("asymmetric", ct, weights(symmetric=False), ("asymmetric",)),
        ("actorder", ct, weights(actorder="group"), ("actorder='group'",)),
        ("bits", ct, weights(num_bits=3), ("3 bits",)),
        ("strategy", ct, weights(strategy="head"), ("'head'",)),
        ("format", ct, lambda told: group(told).update(format="marlin-24"), ("marlin-24",)),
        ("outputs", ct, lambda told: group(told).update(outputs), ("outputs",)),
        ("method", ct, lambda told: told.update(quant_method="awq"), ("'awq'",)),
        ("blocks", "fine-grained-fp8", lambda t: t.update(weight_block_size=[64, 64]), ("[64, 6",)),
        ("algorithm", "modelopt", lambda t: t.update(quant_algo="NVFP4_AWQ"), ("NVFP4_AWQ",)),
        ("groups", "modelopt", lambda t: t.update(quant_algo="NVFP4", group_size=32), ("32",)),
    ]
    configs = {"modelopt": Dynamic("e4m3fn"), "compressed-tensors": Dynamic("e4m3fn")}

    def check(case: tuple[str, str, Any, tuple[str, ...]]) -> None:
        name, family, change, words = case
        folder = tmp_path / name
        sct.exchange.save(model(configs.get(family, Dynamic("fp8_block"))), folder, family)
        told = json.loads((folder / "config.json").read_text())
        change(told["quantization_config"])
        (folder / "config.json").write_text(json.dumps(told))
        assert_refused(folder, UnsupportedError, *words)

    assert_each(cases, check, lambda case: case[0])


def test__zero_points_and_other_strangers__are_refused(tmp_path: Path) -> None:
    for name in ("weight_zero_point", "weight_g_idx"):
        sct.exchange.save(model(W4), tmp_path)
        stranger = {f"layers.0.{name}": torch.zeros(1, dtype=torch.int32)}
        changed(tmp_path, partial(dict.update, **stranger))
        assert_refused(tmp_path, UnsupportedError, name)


def test__files_that_are_cut_or_missing__are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        sct.exchange.load(tmp_path / "nothing")
    sct.exchange.save(model(Dynamic("e4m3fn")), tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    told, whole = config.read_text(), weights.read_bytes()
    for cut in (0, 7, 100, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        assert_refused(tmp_path, CheckpointError, "damaged")
    weights.write_bytes(whole)
    for damage in ("{", "[]", '{"quantization_config": 3}', told.replace("float32", "int3")):
        config.write_text(damage)
        assert_refused(tmp_path, CheckpointError, "config.json")
    config.write_text("{}")
    assert_refused(tmp_path, UnsupportedError, "quantization_config")


def test__a_model_that_is_quantised_already__is_not_loaded_into(tmp_path: Path) -> None:
    sct.exchange.save(model(Dynamic("e4m3fn")), tmp_path)
    held = model(WeightOnly("int8"))
    with pytest.raises(CheckpointError, match=r"layers\.0\.weight .* no plain tensor"):
        sct.exchange.load_into(held, tmp_path)
    assert isinstance(held.layers[0].weight, sct.QuantizedTensor)


def test__what_a_format_cannot_hold__is_refused_before_anything_is_written(tmp_path: Path) -> None:
    conv = sct.quantize_(nn.Sequential(nn.Conv2d(32, 8, 1)), WeightOnly("int8"))
    rotated = model(WeightOnly("int4", 64, rotate=True))
    tied = model()
    tied.head = nn.Linear(128, 16, bias=False)
    tied.table.weight = tied.head.weight
    sct.quantize_(tied, WeightOnly("int8", roles=("head", "embedding")))
    table = sct.quantize_(model(), WeightOnly("nvfp4", roles=("embedding",)))
    tall = nn.Sequential(nn.Linear(128, 192))
    two = {
        "layers.0": Dynamic("fp8_block"),
        "layers.1": Dynamic("e4m3fn", "tensor", input_granularity="tensor"),
    }
    ct, fine = "compressed-tensors", "fine-grained-fp8"
    cases: list[tuple[str, Any, str, str]] = [
        ("a format that does not exist", model(WeightOnly("int8")), "awq", ct),
        ("no quantised weight", model(), ct, "quantize_"),
        ("e5m2", model(WeightOnly("e5m2")), ct, "layers.0.weight"),
        ("int4 in FP8", model(WeightOnly("int4", 32)), fine, "torchao"),
        ("a convolution", conv, ct, "0"),
        ("a rotated weight", rotated, ct, "rotate"),
        ("a tied weight", tied, ct, "tie"),
        ("an embedding", table, "modelopt", "table"),
        ("inputs without a scale", model(Dynamic("nvfp4")), "modelopt", "no scale of its input"),
        ("shorter blocks", sct.quantize_(tall, Dynamic("fp8_block")), fine, "not whole"),
        ("two schemes", model(two), fine, "one layout"),
    ]

    def check(case: tuple[str, Any, str, str]) -> None:
        name, given, family, word = case
        folder = tmp_path / name.replace(" ", "_")
        with pytest.raises((UnsupportedError, CheckpointError), match=word):
            sct.exchange.save(given, folder, family)
        assert not folder.exists()

    assert_each(cases, check, lambda case: case[0])


def test__a_folder_of_several_files__is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json"):
        sct.exchange.save(model(WeightOnly("int8")), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors.index.json"]


def test__files_in_pieces__are_read(tmp_path: Path) -> None:
    saved = model(WeightOnly("nvfp4"))
    sct.exchange.save(saved, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    pieces = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in pieces.items():
        save_file({name: tensors[name] for name in own}, tmp_path / file)
    told = {"weight_map": {name: file for file, own in pieces.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(told))
    (tmp_path / "model.safetensors").unlink()
    fresh = model(seed=1)
    sct.exchange.load_into(fresh, tmp_path)
    assert torch.equal(fresh.layers[0].weight.qdata, saved.layers[0].weight.qdata)
