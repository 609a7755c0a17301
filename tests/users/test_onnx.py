"""onnxruntime's CPU kernels run the files of quantised models, and give the results of eager code.

pip install onnx onnxscript onnxruntime
"""

import copy
import importlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from assertions import assert_each
from pages import execute
from torch import nn

import scaledtensor as sct
from scaledtensor import Dynamic, QuantizedTensor, Static, WeightOnly
from scaledtensor.exchange import export_onnx
from scaledtensor.formats import FORMATS, Format
from scaledtensor.quantization.configs import Config

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
importlib.import_module("onnx.reference")

pytestmark = pytest.mark.users

#: Config -> the type of the codes in the file.
WEIGHTS = {
    WeightOnly("e4m3fn"): "FLOAT8E4M3FN",
    WeightOnly("e4m3fn", "tensor"): "FLOAT8E4M3FN",
    WeightOnly("e4m3fn", 48): "FLOAT8E4M3FN",  # the last block of 64 is shorter
    WeightOnly("e5m2"): "FLOAT8E5M2",
    WeightOnly("e4m3fnuz"): "FLOAT8E4M3FNUZ",
    WeightOnly("fp8_block"): "FLOAT8E4M3FN",
    WeightOnly("mxfp8"): "FLOAT8E4M3FN",
    WeightOnly("mxfp6"): "FLOAT8E4M3FN",
    WeightOnly("e2m3fn", 32): "FLOAT8E4M3FN",
    WeightOnly("int8"): "INT8",
    WeightOnly("mxint8", 32, "e8m0"): "INT8",
    WeightOnly("int4", 32): "INT4",
    WeightOnly("mxfp4"): "UINT4",
    WeightOnly("nvfp4"): "UINT4",
    WeightOnly("mxfp4", rotate=True): "UINT4",
}
INPUTS = [
    Dynamic("e4m3fn"),
    Dynamic("e5m2", input_granularity="tensor"),
    Dynamic("int8"),
    Dynamic("int8", input_scale="power_of_two"),
    Dynamic("mxfp8"),
    Dynamic("mxint8", 32, "e8m0", input_granularity=32, input_scale="e8m0"),
    Dynamic("nvfp4"),
    Dynamic("mxfp4"),
    Dynamic("fp8_block"),
    Dynamic("int4", 32, input_format="int8", input_granularity="token"),
]


class Each(nn.Module):
    """A product for each config."""

    def __init__(self, configs: Sequence[Config], width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, 48) for _ in configs)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)


def each(configs: Sequence[Config], **more: Any) -> nn.Module:
    named = {f"layers.{i}": config for i, config in enumerate(configs)}
    return sct.quantize_(Each(configs).eval(), named, **more)


def session(model: Any) -> Any:
    """A session that multiplies in float32. By default onnxruntime casts the inputs of products
    with INT8 and INT4 weights to 8 bits, also for a float32 input (`docs/how_to/onnx.md`)."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    given = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])


def run(file: Path, *args: torch.Tensor) -> list[torch.Tensor]:
    onnx.checker.check_model(str(file))
    held = session(file)
    named = {put.name: x.numpy() for put, x in zip(held.get_inputs(), args, strict=True)}
    return [torch.from_numpy(y) for y in held.run(None, named)]


def decoded(program: Any, name: str) -> torch.Tensor:
    """The values that onnxruntime decodes an initializer to, as a matrix in its stored order."""
    model = copy.deepcopy(program.model_proto)
    nodes = {node.output[0]: node for node in model.graph.node}
    (last,) = [
        node
        for node in model.graph.node
        if node.op_type == "DequantizeLinear" and name in sources(node, nodes)
    ]
    del model.graph.output[:]
    model.graph.output.append(
        onnx.helper.make_tensor_value_info(last.output[0], onnx.TensorProto.FLOAT, None)
    )
    needed = sources(last, nodes)
    kept = [node for node in model.graph.node if set(node.output) & needed or node is last]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    del model.graph.input[:]
    return torch.from_numpy(session(model).run(None, {})[0])


def sources(node: Any, nodes: dict[str, Any]) -> set[str]:
    found = set(node.input)
    for name in node.input:
        if name in nodes:
            found |= sources(nodes[name], nodes)
    return found


def assert_near(configs: Sequence[Config], got: Any, wanted: Any, by: Any = 1.0) -> None:
    """The results agree up to the rounding of float32 sums, relative to the sizes of the inputs."""

    def check(case: tuple[Config, torch.Tensor, torch.Tensor]) -> None:
        torch.testing.assert_close(case[1] / by, case[2] / by, rtol=0, atol=3e-6)

    assert_each(list(zip(configs, got, wanted, strict=True)), check)


def test__weights__decode_to_the_same_bits__and_products_are_near(tmp_path):
    x, more = torch.randn(4, 64), torch.randn(9, 64)
    configs, file = list(WEIGHTS), tmp_path / "model.onnx"
    model = each(configs)
    program = export_onnx(model, (x,), file, dynamic_shapes=({0: "batch"},))
    with torch.no_grad():
        for given in (x, more):
            assert_near(configs, run(file, given), model(given))
    types = {i.name: i.data_type for i in program.model_proto.graph.initializer}

    def check(case: tuple[int, Config]) -> None:
        i, config = case
        name, weight = f"layers.{i}.weight", model.layers[i].weight
        assert isinstance(weight, QuantizedTensor)  # the model is as it was
        assert onnx.TensorProto.DataType.Name(types[name]) == WEIGHTS[config]
        held, values = decoded(program, name), weight.matrix()
        held = held.mT if held.shape != values.shape else held
        if weight.scale.dtype == torch.float8_e4m3fn:
            held = held * weight.tensor_scale
        assert torch.equal(held, values)

    assert_each(list(enumerate(configs)), check)


def test__inputs__are_cast_as_in_eager_code(tmp_path):
    size = torch.tensor([1e-3, 1.0, 30.0, 1.0, 1e4, 1.0])[:, None]
    x = torch.randn(6, 64) * size
    x[3] = 0
    file = tmp_path / "model.onnx"
    model = each(INPUTS)
    export_onnx(model, (x[:2],), file, dynamic_shapes=({0: "batch"},))
    with torch.no_grad():
        wanted = model(x)
    whole = [config.input.block == (0, 0) for config in INPUTS]
    for tensor in (True, False):
        chosen = [i for i, w in enumerate(whole) if w is tensor]
        got = run(file, x)
        assert_near(
            [INPUTS[i] for i in chosen],
            [got[i] for i in chosen],
            [wanted[i] for i in chosen],
            1e4 if tensor else size,
        )


def test__static__inputs_have_one_scale_in_the_file(tmp_path):
    x = torch.randn(5, 64)
    configs = [Static("e4m3fn"), Static("int8", "channel")]
    model, file = each(configs, calibration=[x]), tmp_path / "model.onnx"
    program = export_onnx(model, (x,), file, dynamic_shapes=({0: "batch"},))
    with torch.no_grad():
        assert_near(configs, run(file, x), model(x))
    count = Counter(node.op_type for node in program.model_proto.graph.node)
    assert count["QuantizeLinear"] == 2  # and no operator that measures
    assert not {"ReduceMax", "Abs", "Div"} & set(count)


class Language(nn.Module):
    """An embedding whose table is the head, too, an encoder layer and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.mix = nn.Conv1d(32, 32, 3, padding=1)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.table(ids))
        return self.head(x + self.mix(x.mT).mT)


def test__a_language_model__of_any_batch_and_length(tmp_path):
    roles = ("linear", "convolution", "head", "embedding")
    ids, more = torch.randint(0, 50, (2, 7)), torch.randint(0, 50, (3, 11))
    torch.manual_seed(0)
    plain = Language().eval()

    def check(config: Config) -> None:
        model = sct.quantize_(copy.deepcopy(plain), config)
        with torch.no_grad():
            wanted = model(more)
        file = tmp_path / "model.onnx"
        export_onnx(model, (ids,), file, dynamic_shapes=({0: "batch", 1: "length"},))
        torch.testing.assert_close(run(file, more)[0], wanted, rtol=0, atol=2e-5)

    assert_each([WeightOnly("int4", 16, roles=roles), Dynamic("e4m3fn", roles=roles)], check)


def test__fp4__in_its_own_type__is_a_valid_file(tmp_path):
    x = torch.randn(4, 64)
    configs = [WeightOnly("mxfp4"), WeightOnly("nvfp4")]
    model, file = each(configs), tmp_path / "model.onnx"
    export_onnx(model, (x,), file, fp4="float4e2m1")
    onnx.checker.check_model(str(file))
    # onnx's own evaluator stands for a runtime that has the type.
    evaluator = onnx.reference.ReferenceEvaluator(str(file))
    got = evaluator.run(None, {evaluator.input_names[0]: x.numpy()})
    with torch.no_grad():
        assert_near(configs, map(torch.from_numpy, got), model(x))


def test__the_page__runs_as_printed(tmp_path, monkeypatch, capsys):
    page = Path(__file__).parents[2] / "docs" / "how_to" / "onnx.md"
    monkeypatch.chdir(tmp_path)
    execute(page, tmp_path, capsys)


def test__every_format__has_a_type_or_an_error():
    def check(fmt: Format) -> None:
        from scaledtensor.errors import UnsupportedError
        from scaledtensor.exchange.onnx_forms import TYPES, WITHIN_E4M3FN

        model = sct.quantize_(nn.Linear(32, 32), WeightOnly(fmt))
        if fmt.name not in (*TYPES, *WITHIN_E4M3FN):
            with pytest.raises(UnsupportedError, match=fmt.name):
                export_onnx(model, (torch.ones(1, 32),))

    assert_each([f for f in FORMATS.values() if f.bits <= 8 and f.has_zero], check)


def test__torch_onnx_export__is_an_error_that_names_export_onnx():
    model, x = (
        sct.quantize_(nn.Sequential(nn.Linear(64, 8)).eval(), WeightOnly()),
        torch.ones(2, 64),
    )
    for given in (model, torch.export.export(model, (x,))):
        with pytest.raises(Exception, match=r"exchange\.export_onnx"):
            torch.onnx.export(given, (x,), dynamo=True, verbose=False)
