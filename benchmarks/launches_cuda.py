"""Generate the CUDA code of one compiled training step without a device, and count its launches.

    pip install triton
    python -m benchmarks.launches_cuda [--layers 2] [--width 2048] [--context 2048] [--batch 4]
        [--rows bf16 unit current torchao] [--capability 9.0] [--json FILE]

The step is forward and backward of the demo's GPT and its loss. It is traced on fake CUDA tensors
(`benchmarks/no_device.py`), and Inductor generates the source of its kernels, with the CPU build of
torch. Then Triton compiles every kernel to PTX and to machine code for compute capability 9.0 and
10.0, with the assembler in its package.

"nodes" counts the calls in AOTAutograd's two graphs, and "0-dim" counts those that give 0-dim
tensors. "triton" counts launches of generated kernels, and "extern" counts launches of others
(products, attention). "looks" counts calls of the guard, which launch nothing in nine steps of ten.
"GB" counts the bytes that the generated kernels read and write. "ms" is a prediction, not a
measurement: each launch takes at least 2 us; generated kernels move 80% of an H100's 3.35 TB/s;
products reach 70% of its 989 TFLOP/s (BF16) or 1,979 (FP8), attention 50%. Parameters are float32;
bf16 runs under autocast. Attention uses the flash kernel in each row: torch would ask the device
for the kernel, so this program names it. Settings that Inductor would choose by timing kernels on
the device keep their defaults.
"""

from benchmarks.no_device import capabilities, stand_in, target

if __name__ == "__main__":  # before torch is imported, since its hooks need this order
    import sys

    _named = sys.argv[sys.argv.index("--capability") + 1] if "--capability" in sys.argv else "9.0"
    stand_in((int(_named.split(".")[0]), int(_named.split(".")[1])))

import argparse
import copy
import importlib.util
import json
import re
import tempfile
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import graph as inductor_graph
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._subclasses import FakeTensorMode

import scaledtensor as sct
from benchmarks.launches import is_single, show
from benchmarks.peers import installed
from scaledtensor import ScaledTensor
from scaledtensor.apps.gpt import GPT, GPTConfig
from scaledtensor.tensors.memo import note

ROWS = ("bf16", "unit", "current", "torchao")

LAUNCH = 2e-6
BANDWIDTH = 0.8 * 3.35e12
SPEED = {"fp8": 0.7 * 1979e12, "bf16": 0.7 * 989e12, "attention": 0.5 * 989e12}

_KERNEL = re.compile(r"\w+ = async_compile\.triton\('(\w+)', '''(.*?)''', device_str", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--capability", default="9.0", help="of the simulated device")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    torch.manual_seed(0)
    heads = max(options.width // 128, 1)
    config = GPTConfig(4096, options.context, options.layers, heads, options.width)
    model = GPT(config)
    found: dict[str, dict[str, Any]] = {}
    for row in options.rows:
        if row == "torchao" and not installed("torchao"):
            print("torchao is not installed: its row is left out")
            continue
        found[row] = counted(row, model, (options.batch, options.context))
    shape = f"{options.layers} layers of width {options.width}, {options.batch} x {options.context}"
    print(f"torch {torch.__version__}, compute capability {options.capability}, {shape}")
    show(found, 9)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


def counted(row: str, model: nn.Module, shape: tuple[int, int]) -> dict[str, Any]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made = _on_device(_prepared(row, copy.deepcopy(model)), mode)
    graphs: list[Any] = []
    codes: list[str] = []
    work: list[tuple[str, float, float]] = []

    def generated(self: Any) -> Any:
        """Replace the loaded code by its text, and by a call that gives fake results."""
        code, _ = self.codegen()
        codes.append(code.value)
        graphs.append(self.orig_gm)
        work.extend(filter(None, map(_work, self.scheduler.nodes)))

        def call(args: list[Any]) -> Any:
            given = list(args)
            args.clear()
            with mode:
                return list(self.orig_gm(*given))

        return SimpleNamespace(call=call, __file__=__file__)

    before = inductor_graph.GraphLowering.compile_to_module
    inductor_graph.GraphLowering.compile_to_module = generated  # type: ignore[method-assign]
    try:
        torch.compiler.reset()
        with mode, _flash_in_plain_rows(row):
            x, y = (torch.empty(shape, dtype=torch.int64, device="cuda") for _ in range(2))
            compiled = torch.compile(lambda x, y: made(x, y)[1], fullgraph=True)
            autocast = torch.autocast("cuda", torch.bfloat16)
            with autocast if row in ("bf16", "torchao") else nullcontext():
                loss = compiled(x, y)
            loss.backward()
    finally:
        inductor_graph.GraphLowering.compile_to_module = before  # type: ignore[method-assign]
    calls = [n for graph in graphs for n in graph.graph.nodes if n.op == "call_function"]
    bodies = [code.rpartition("def call(")[2] for code in codes]
    extern = [w for w in work if w[0] != "triton"]
    kernels = {kernel for code in codes for kernel in _KERNEL.findall(code)}
    return {
        "nodes": len(calls),
        "0-dim": sum(is_single(n.meta.get("val")) for n in calls),
        "triton": sum(body.count(".run(") for body in bodies),
        "extern": sum(kind != "look" for kind, *_ in extern),
        "looks": sum(kind == "look" for kind, *_ in extern),
        "GB": round(sum(size for kind, size, _ in work if kind == "triton") / 1e9, 2),
        "ms": round(1e3 * sum(map(_seconds, work)), 2),
        **{f"sm_{10 * a + b}": compiled_to_ptx(kernels, (a, b)) for a, b in capabilities()},
    }


def _prepared(row: str, model: nn.Module) -> nn.Module:
    if row == "bf16":
        return model
    if row == "torchao":
        float8: Any = import_module("torchao.float8")
        converted: nn.Module = float8.convert_to_float8_training(model)
        return converted
    return sct.scale_model(model, row)


def _on_device(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return the model with fake parameters and buffers on "cuda"."""

    def fake(x: Tensor) -> Tensor:
        with mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

    def moved(p: Any) -> Any:
        if not isinstance(p, ScaledTensor):
            return nn.Parameter(fake(p.detach()), p.requires_grad)
        inner = (fake(x) for x in (p.qdata.detach(), p.scale, p.rms))
        qdata, scale, rms = inner
        made = ScaledTensor.make(qdata, scale, rms, p.format, p.dtype, p.recipe)
        made.site = p.site
        lent = p.lent
        note(made, traced_lent=None if lent is None else fake(lent))
        return made.requires_grad_(p.requires_grad)

    for module in model.modules():
        for name, p in module._parameters.items():
            module._parameters[name] = None if p is None else moved(p)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else fake(buffer)
    return model


class _flash_in_plain_rows:  # noqa: N801 - reads as a verb
    """torch's function asks the device for its kernel. This function chooses by the elements."""

    def __init__(self, row: str) -> None:
        self.plain = row in ("bf16", "torchao")

    def __enter__(self) -> None:
        self.function = torch.nn.functional.scaled_dot_product_attention
        if self.plain:
            torch.nn.functional.scaled_dot_product_attention = _flash

    def __exit__(self, *error: object) -> None:
        torch.nn.functional.scaled_dot_product_attention = self.function


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool) -> Tensor:
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    out: Tensor = attend(q, k, v, dropout_p, is_causal)[0]
    return out


def _work(node: Any) -> tuple[str, float, float] | None:
    """Return the kind of a launch, the bytes that it moves, and its FLOPs."""
    if not isinstance(node, ExternKernelSchedulerNode):
        return ("triton", node.get_read_write_buffers_sizes(), 0.0)
    if type(node.node).__name__ == "MultiOutput":
        return None
    name = str(getattr(node.node, "op_overload", None) or node.node.get_kernel_name())
    if "look" in name:
        return ("look", 0.0, 0.0)
    kind = "attention" if "attention" in name else "fp8" if "scaled_mm" in name else "bf16"
    return (kind, node.get_read_write_buffers_sizes(), float(node.estimate_flops() or 0))


def _seconds(work: tuple[str, float, float]) -> float:
    kind, size, operations = work
    if kind == "look":
        return 0.0
    return max(LAUNCH, size / BANDWIDTH, operations / SPEED.get(kind, 1.0))


def compiled_to_ptx(kernels: set[tuple[str, str]], capability: tuple[int, int]) -> int:
    """Compile these kernels with Triton for a compute capability and return their number. An error
    names a kernel that does not compile."""
    import triton  # type: ignore[import-not-found]

    done = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, text in sorted(kernels):
            path = Path(folder) / f"{name}_{done}.py"
            path.write_text(text)
            found = importlib.util.spec_from_file_location(path.stem, path)
            loader: Any = found and found.loader
            module = importlib.util.module_from_spec(found)  # type: ignore[arg-type]
            loader.exec_module(module)
            tuner = getattr(module, name)
            config, about = tuner.configs[0], tuner.triton_meta
            constants = {**about.get("constants", {}), **config.kwargs}
            arguments = tuner.fn.arg_names
            signature = {
                a: "constexpr" if a in constants else about["signature"].get(a, "constexpr")
                for a in arguments
            }
            source = triton.compiler.ASTSource(
                fn=tuner.fn,
                signature=signature,
                constexprs={
                    (arguments.index(a),): constants[a] for a in arguments if a in constants
                },
                attrs=about["configs"][0],
            )
            sizes = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            made = triton.compile(source, target=target(capability), options=sizes)
            done += bool(made.asm["ptx"] and made.asm["cubin"])
    return done


if __name__ == "__main__":
    main()
