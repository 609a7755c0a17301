"""Measure the bytes per parameter of a training: weights, gradients, and the optimizer's tensors.

    python -m benchmarks.memory [--models demo gpt2] [--markdown FILE]

The program sums the storages of the tensors of each kind after one step. Each storage counts once,
so a view adds nothing to its base. "demo" is the GPT of the demo. "gpt2" has the shape of GPT-2
small (124 M parameters, the readout tied to the embedding). Both have random weights. torchao's
rows are `torchao.optim.AdamW8bit` and `AdamWFp8`, on the CPU; they are skipped with a message if
torchao is not installed. The exit status is 1 if the two states of `e4m3fn` take more than 2.2
bytes.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor.apps.gpt import GPT, GPTConfig

BAR = ("fp32 parameters, e4m3fn states", 2.2)

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def gpt2() -> nn.Module:
    model = GPT(GPTConfig(50257, 1024, 12, 12, 768))
    model.head.weight = model.token_embedding.weight
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "demo": lambda: GPT(GPTConfig(65, 64, 4, 4, 128)),
    "gpt2": gpt2,
}


def _ours(**options: Any) -> Make:
    return lambda parameters: sct.optim.AdamW(parameters, compiled=False, **options)


def peer(name: str) -> Make:
    """Return one of torchao's optimizers."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        import torchao.optim

        made: torch.optim.Optimizer = getattr(torchao.optim, name)(parameters)
        return made

    return make


#: The measured rows: (dtype of the parameters, the optimizer).
ROWS: dict[str, tuple[torch.dtype, Make]] = {
    "torch AdamW, fp32 parameters": (torch.float32, torch.optim.AdamW),
    "torch AdamW, bf16 parameters": (torch.bfloat16, torch.optim.AdamW),
    "torchao AdamW8bit, fp32 parameters": (torch.float32, peer("AdamW8bit")),
    "torchao AdamWFp8, fp32 parameters": (torch.float32, peer("AdamWFp8")),
    **{
        f"fp32 parameters, {fmt} states": (torch.float32, _ours(state_format=fmt))
        for fmt in ("bf16", "fp16", "e4m3fn", "e5m2", "int8")
    },
    **{
        f"bf16 parameters, {master} master, {fmt} states": (
            torch.bfloat16,
            _ours(state_format=fmt, master_format=master),
        )
        for master in ("fp32", "bf16+16", "fp16", "bf16")
        for fmt in ("fp32", "e4m3fn")
    },
}


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of every plain tensor in `tensors`, by address."""
    found: dict[int, int] = {}
    for t in tensors:
        if hasattr(t, "__tensor_flatten__"):
            found |= storages(getattr(t, name) for name in t.__tensor_flatten__()[0])
        else:
            storage = t.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def measure(make_model: Callable[[], nn.Module], dtype: torch.dtype, make: Make) -> list[float]:
    """Return the bytes per parameter of weights, gradients, and states with masters."""
    torch.manual_seed(0)
    model = make_model().to(dtype)
    parameters = list(model.parameters())
    optimizer = make(parameters)
    for p in parameters:
        p.grad = torch.randn_like(p) * 1e-3
    optimizer.step()
    states = [
        x
        for state in optimizer.state.values()
        for x in state.values()
        if isinstance(x, Tensor) and x.dim()
    ]
    count = sum(p.numel() for p in parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    return [sum(storages(held).values()) / count for held in (parameters, grads, states)]


def table(name: str) -> tuple[str, dict[str, list[float]]]:
    with torch.device("meta"):
        count = sum(p.numel() for p in MODELS[name]().parameters())
    lines = [
        f"`{name}`, {count:,} parameters:\n",
        "| | weights | gradients | states and masters | sum |",
        "|---" * 5 + "|",
    ]
    found = {}
    for row, (dtype, make) in ROWS.items():
        if row.startswith("torchao") and find_spec("torchao") is None:
            lines.append(f"| {row} | torchao is not installed | | | |")
            continue
        bytes_ = found[row] = measure(MODELS[name], dtype, make)
        cells = " | ".join(f"{b:.2f}" for b in (*bytes_, sum(bytes_)))
        lines.append(f"| {row} | {cells} |")
    return "\n".join(lines), found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--markdown", type=Path, help="write the tables there too")
    options = parser.parse_args(arguments)
    written, good = [], True
    for name in options.models:
        text, found = table(name)
        row, bar = BAR
        met = found[row][2] <= bar
        text += f"\n\n{row}: {found[row][2]:.3f} bytes, bar {bar} {'met' if met else 'NOT met'}"
        good &= met
        print(text + "\n", flush=True)
        written.append(text)
    if options.markdown is not None:
        options.markdown.write_text("\n\n".join(written) + "\n")
    sys.exit(not good)


if __name__ == "__main__":
    main()
