"""Measure linear layers of a 7B Llama and a stack of GPT blocks on a CUDA device, by recipe.

    python -m benchmarks.gpu [--tokens 8192] [--layers 12] [--width 2048] [--rounds 20]
        [--rows bf16 unit current torchao] [--device cuda] [--json FILE]

Each row is compiled, forward and backward, with a Gaussian incoming gradient. Rows run interleaved
in one process, and figures are medians of event times. TFLOP/s counts the three products of a
layer, 6 tokens in out. Peak memory is the memory of one step of the row alone, above the memory
allocated before it. bf16 has bfloat16 parameters. Ours has float32 parameters and casts them in
every step, with bfloat16 activations in between. torchao (`convert_to_float8_training`, tensorwise)
has bfloat16 parameters, and is skipped with a message if it is not installed. docs/benchmarks.md
has the output on a device.
"""

import argparse
import copy
import json
import platform
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

import scaledtensor as sct
from benchmarks.peers import installed
from benchmarks.timing import Step, device_name, interleaved
from scaledtensor.apps.gpt import Block, GPTConfig

#: in, out of the layers of Llama-7B (Touvron et al., arXiv 2302.13971): attention, up, down
LAYERS = {"attention": (4096, 4096), "up": (4096, 11008), "down": (11008, 4096)}
ROWS = ("bf16", "unit", "current", "torchao")


def prepared(row: str, model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of `model` in a row's precision."""
    made = copy.deepcopy(model)
    if row == "bf16":
        return made.bfloat16()
    if row == "torchao":
        float8: Any = import_module("torchao.float8")
        config = float8.Float8LinearConfig(emulate=device.type != "cuda")
        converted: nn.Module = float8.convert_to_float8_training(made.bfloat16(), config=config)
        return converted
    return sct.scale_model(made, row)


def operands(row: str, *shapes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return inputs and gradients like those between the layers of that row's model."""
    plain = [torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in shapes]
    if row in ("bf16", "torchao"):
        return plain
    return [sct.scaled(x, dtype=torch.float32, recipe=row) for x in plain]


def step(row: str, model: nn.Module, shape_in: Sequence[int], shape_out: Sequence[int]) -> Step:
    device = next(model.parameters()).device
    x, dy = operands(row, shape_in, shape_out, device=device)
    x.requires_grad_()
    run = torch.compile(model, fullgraph=True, dynamic=False)

    def once() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        run(x).backward(dy)

    return once


def peak(run: Step, device: torch.device) -> int | None:
    """Return the peak of the bytes that a step allocates; None if the device does not count
    them."""
    if device.type != "cuda":
        return None
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def linears(
    rows: Sequence[str], tokens: int, rounds: int, device: torch.device, shrink: int = 1
) -> list[dict[str, Any]]:
    found = []
    for name, (fan_in, fan_out) in LAYERS.items():
        fan_in, fan_out = fan_in // shrink, fan_out // shrink
        torch._dynamo.reset()
        layer = nn.Linear(fan_in, fan_out, bias=False, device=device)
        steps = {
            row: step(row, prepared(row, layer, device), (tokens, fan_in), (tokens, fan_out))
            for row in rows
        }
        times = interleaved(steps, rounds, device)
        for row in rows:
            found.append(
                {
                    "what": f"{name} {fan_in}x{fan_out}",
                    "row": row,
                    "ms": times[row],
                    "tflops": 6 * tokens * fan_in * fan_out / times[row] / 1e9,
                    "peak": peak(steps[row], device),
                }
            )
    return found


def blocks(
    rows: Sequence[str], tokens: int, layers: int, width: int, rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    context = min(1024, tokens)
    torch._dynamo.reset()
    config = GPTConfig(256, context, layers, max(1, width // 64), width)
    stack = nn.Sequential(*(Block(config) for _ in range(layers))).to(device)
    shape = (max(1, tokens // context), context, width)
    steps = {row: step(row, prepared(row, stack, device), shape, shape) for row in rows}
    times = interleaved(steps, rounds, device)
    return [
        {
            "what": f"{layers} blocks, width {width}",
            "row": row,
            "ms": times[row],
            "tokens_per_second": 1e3 * shape[0] * context / times[row],
            "peak": peak(steps[row], device),
        }
        for row in rows
    ]


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| | row | ms | / bf16 | TFLOP/s | tokens/s | peak, MB |", "|---" * 7 + "|"]
    of_bf16 = {r["what"]: r["ms"] for r in found if r["row"] == "bf16"}
    for r in found:
        ratio = f"{r['ms'] / of_bf16[r['what']]:.2f}" if r["what"] in of_bf16 else ""
        cells = [r["what"], r["row"], f"{r['ms']:.2f}", ratio]
        cells += [f"{r['tflops']:.1f}" if "tflops" in r else ""]
        cells += [f"{r['tokens_per_second']:.0f}" if "tokens_per_second" in r else ""]
        cells += [f"{r['peak'] / 1e6:.0f}" if r["peak"] is not None else "not measured"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--shrink", type=int, default=1, help="divide the layers' sizes by this")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args(arguments)
    device = options.device
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is at hand; --device cpu runs the same at a small size")
    torch.manual_seed(0)
    rows = [row for row in options.rows if row != "torchao" or installed("torchao")]
    for row in set(options.rows) - set(rows):
        print(f"{row}: skipped, it is not installed")
    found = linears(rows, options.tokens, options.rounds, device, options.shrink)
    found += blocks(rows, options.tokens, options.layers, options.width, options.rounds, device)
    ao = f", torchao {version('torchao')}" if "torchao" in rows else ""
    print(f"{device_name(device)} ({platform.machine()}), torch {torch.__version__}{ao}")
    print(f"{options.tokens} tokens\n\n{table(found)}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
