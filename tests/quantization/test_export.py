"""Quantised models as programs: torch.export, its files, AOTInductor, and torch.compile."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import scaledtensor as sct
from scaledtensor import Dynamic, WeightOnly, native
from scaledtensor.errors import ModelError, OptionError, QuantizationError, UnsupportedError
from tests.assertions import assert_each

CONFIGS = [
    WeightOnly(),
    WeightOnly("int4", 32),
    WeightOnly("nvfp4", rotate=True),
    Dynamic("mxfp8"),
]


class Block(nn.Module):
    """Attention with two products, and sizes that may change."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def block(config, layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return sct.quantize_(nn.Sequential(*(Block() for _ in range(layers))).eval(), config)


def inputs(batch: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randn(batch, length, 64, generator=torch.Generator().manual_seed(1))


def exported(config) -> torch.export.ExportedProgram:
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    return torch.export.export(block(config), (inputs(),), dynamic_shapes=(sizes,))


def operators(program: torch.export.ExportedProgram) -> set[str]:
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return {target.namespace for target in targets if isinstance(target, torch._ops.OpOverload)}


READ = """
import sys
import torch
from pathlib import Path

folder = Path(sys.argv[1])
x, other, wanted, others, scaled = torch.load(folder / "wanted.pt")
for i in range(len(wanted)):
    model = torch.export.load(folder / f"plain{i}.pt2").module()
    torch.testing.assert_close(model(x), wanted[i], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(other), others[i], rtol=1e-5, atol=1e-5)
assert "scaledtensor" not in sys.modules

import scaledtensor as sct

for i in range(len(wanted)):
    program = torch.export.load(folder / f"codes{i}.pt2")
    held = program.state_dict["0.out.weight"]
    assert isinstance(held, sct.QuantizedTensor), type(held)
    model = program.module()
    with torch.no_grad():
        assert torch.equal(model(x), wanted[i]), i
        assert torch.equal(model(other), others[i]), i

model = torch.export.load(folder / "scaled.pt2").module()
assert torch.equal(model(x).dequantize(), scaled)
"""


def files_hold_e8m0() -> bool:
    """Whether files of torch.export hold float8_e8m0fnu. torch 2.11 refuses to write it."""
    from torch._export.serde.schema import ScalarType

    return hasattr(ScalarType, "FLOAT8E8M0FNU")


def test__exported__a_file_gives_the_same_bits_in_a_fresh_process(tmp_path):
    x, other, wanted, others = inputs(), inputs(3, 9), [], []
    saved = [c for c in CONFIGS if files_hold_e8m0() or c.scale != "e8m0"]
    for i, config in enumerate(saved):
        program = exported(config)
        with torch.no_grad():
            eager = block(config)
            wanted.append(eager(x))
            others.append(eager(other))
            assert torch.equal(program.module()(x), wanted[-1]), config
        assert "scaledtensor" in operators(program)
        torch.export.save(program, tmp_path / f"codes{i}.pt2")
        # Without this package: ATen's operators on codes.
        plain = program.run_decompositions()
        assert operators(plain) == {"aten"}, config
        torch.export.save(plain, tmp_path / f"plain{i}.pt2")
    model = sct.scale_model(Block().eval())
    program = torch.export.export(model, (x,))
    torch.export.save(program, tmp_path / "scaled.pt2")
    scaled = model(x).dequantize().detach()
    torch.save((x, other, wanted, others, scaled), tmp_path / "wanted.pt")
    run(READ, tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        *(WeightOnly("int4", size) for size in (32, 128)),
        *(WeightOnly(name) for name in ("fp8_block", "nvfp4", "mxfp4")),
        *(Dynamic(name) for name in ("fp8_block", "mxfp8")),
    ],
    ids=str,
)
def test__decomposed__blocks_that_do_not_divide_a_weight_leave_aten_only(config):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv1d(5, 6, 3), nn.Flatten(), nn.Linear(42, 200), nn.Linear(200, 9))
    model, x = sct.quantize_(plain.eval(), config), torch.randn(2, 5, 9)
    sizes = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(model, (x,), dynamic_shapes=sizes).run_decompositions()
    assert operators(program) == {"aten"}
    with torch.no_grad():
        for given in (x, torch.randn(3, 5, 9)):
            torch.testing.assert_close(program.module()(given), model(given), rtol=1e-5, atol=1e-5)


def run(code: str, *arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]


PACKAGE = """
import sys
import torch

x, other, wanted, others = torch.load(sys.argv[2])
model = torch._inductor.aoti_load_package(sys.argv[1])
torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
torch.testing.assert_close(model(other), others, rtol=1e-5, atol=1e-5)
assert "scaledtensor" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [WeightOnly(), Dynamic("mxfp8"), WeightOnly("int4", 48), WeightOnly("fp8_block")],
    ids=str,
)
def test__a_package_of_aotinductor__runs_without_this_library(config, tmp_path):
    x, other = inputs(), inputs(3, 9)
    with torch.no_grad():
        eager = block(config)
        torch.save((x, other, eager(x), eager(other)), tmp_path / "wanted.pt")
        path = torch._inductor.aoti_compile_and_package(
            exported(config), package_path=str(tmp_path / "model.pt2")
        )
    run(PACKAGE, path, tmp_path / "wanted.pt")


def test__compiled__one_graph_serves_all_sizes_and_layers():
    native.library()  # built, the loop in C++ takes up to 128 rows, and torch's product more
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = block(WeightOnly("mxfp8"), layers=3)
    eager = copy.deepcopy(model)
    for layer in model:
        layer.compile(backend=graphs, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for batch, length in ((2, 5), (3, 7), (4, 40), (30, 6)):
            x = inputs(batch, length)
            assert torch.equal(model(x), eager(x)), (batch, length)
    assert graphs.frame_count == 1


def test__onnx__bad_input_is_named():
    from scaledtensor.exchange.onnx import export_onnx

    model = block(WeightOnly())
    least = sct.quantize_(
        nn.Linear(32, 32), Dynamic(input_granularity="tensor", input_scale="least_error")
    )
    cases = [
        (ModelError, "nn.Module", lambda: export_onnx("model", (inputs(),))),
        (QuantizationError, "quantize_", lambda: export_onnx(nn.Linear(3, 3), (torch.ones(3),))),
        (OptionError, "uint4", lambda: export_onnx(model, (inputs(),), fp4="int4")),
        (OptionError, "21", lambda: export_onnx(model, (inputs(),), opset=18)),
        (UnsupportedError, "input_scale", lambda: export_onnx(least, (torch.ones(1, 32),))),
        (
            UnsupportedError,
            "e3m4",
            lambda: export_onnx(
                sct.quantize_(nn.Linear(32, 32), WeightOnly("e3m4")), (torch.ones(1, 32),)
            ),
        ),
        (
            ModelError,
            "unscale_model",
            lambda: export_onnx(sct.scale_model(nn.Linear(32, 32)), (torch.ones(1, 32),)),
        ),
    ]

    def check(case):
        kind, word, call = case
        with pytest.raises(kind, match=word):
            call()

    assert_each(cases, check)
