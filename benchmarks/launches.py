"""Count the graph nodes, kernels and calls of one compiled training step.

    python -m benchmarks.launches [--model gpt] [--layers 2] [--width 64] [--by-layer]
        [--only NAME ...] [--json FILE]

The step is forward and backward of the demo's GPT and its loss, for float32, bfloat16 (autocast),
bfloat16 with the casts of FP8 and no scales (`benchmarks.casts_alone`), and recipes of ours, on the
CPU back end. `--model cnn` takes a convolutional network. `--model llama` takes a Llama of
transformers (pip install transformers), which keeps a cache of keys and values.

"nodes" are the calls in AOTAutograd's two graphs. "0-dim" are the nodes that give 0-dim tensors,
such as scales. "opaque" are the nodes that call an operator of this library, which Inductor does
not write itself. "kernels" are the calls of kernels that Inductor wrote, and "sources" are the
kernels that the C++ compiler compiled. "extern" are the calls of other kernels, and "looks" are the
extern calls of the guard, which the nodes of casts make.

"compile s" and "own CPU s" are the time of the first call, cold, by the clock and by the CPU time
of the process. "step ms" is the least CPU time of five steps after it, "train ms" is the least of
twelve with a fused step of AdamW, and "eager ms" is the least of twelve uncompiled steps. Only
these five depend on the machine. Each row has a process of its own, so each first call loads the
compiler. With --by-layer each block is compiled by itself, as `block.compile()` does, and code that
blocks share counts once.
"""

import argparse
import copy
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule

import scaledtensor as sct
from benchmarks.casts_alone import CastsAlone, InAutocast
from benchmarks.step import Loss
from scaledtensor.apps.gpt import GPT, GPTConfig
from scaledtensor.scales import _inductor

#: row -> the loss of a model
ROWS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fp32": Loss,
    "bf16": lambda model: InAutocast(Loss(model)),
    "casts": lambda model: CastsAlone(Loss(model)),
    "unit": lambda model: Loss(sct.scale_model(model, "unit")),
    "current": lambda model: Loss(sct.scale_model(model, "current")),
}


class CNN(nn.Module):
    """Convolutions with batch norm and max pooling, with a gate, and with a mean over the image."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        sizes = [3, *[width] * layers]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in itertools.pairwise(sizes)
        )
        self.gate = nn.Conv2d(width, 2 * width, 1)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = F.max_pool2d(block(x), 2)
        a, b = self.gate(x).chunk(2, 1)
        x = F.adaptive_avg_pool2d(torch.sigmoid(a) * torch.tanh(b), 1)
        logits = self.head(x.flatten(1))
        return logits, F.cross_entropy(logits, y)


class Llama(nn.Module):
    """A Llama of transformers with two heads and one head of keys and values."""

    def __init__(self, layers: int, width: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            vocab_size=_CLASSES,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
        self.model = LlamaForCausalLM(config)

    @property
    def blocks(self) -> Any:
        return self.model.model.layers

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(input_ids=x, labels=y)
        return out.logits, out.loss


_CLASSES = 64

#: Name -> the model of some layers and some width, and its batch.
MODELS: dict[str, tuple[Callable[[int, int], nn.Module], Callable[[], Iterable[Tensor]]]] = {
    "gpt": (
        lambda layers, width: GPT(GPTConfig(_CLASSES, 32, layers, 2, width)),
        lambda: torch.randint(0, _CLASSES, (2, 4, 32)),
    ),
    "llama": (Llama, lambda: torch.randint(0, _CLASSES, (2, 4, 32))),
    "cnn": (CNN, lambda: (torch.randn(4, 3, 32, 32), torch.randint(0, _CLASSES, (4,)))),
}

_KERNEL = re.compile(r"^\s+cpp_fused\w*\(", re.MULTILINE)
_SOURCE = re.compile(r"^cpp_fused\w* = ", re.MULTILINE)
_LOOK = re.compile(r"^\s+torch\.ops\.scaledtensor\.look\.", re.MULTILINE)
_EXTERN = re.compile(r"^\s+(?:\w+ = )?(?:extern_kernels|torch\.ops\.\w+)\.", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--by-layer", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    size = options.model, options.layers, options.width, options.by_layer
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        report = {name: pool.submit(counted, *size, name).result() for name in options.only}
    print(
        f"torch {torch.__version__}, {options.model}, {options.layers} layers of width "
        f"{options.width}"
    )
    show(report, 12)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2))


def show(report: dict[str, dict[str, Any]], width: int) -> None:
    """Print a table with a line for each row of a report."""
    heads = list(next(iter(report.values())))
    print(f"{'row':9}" + "".join(f"{head:>{width}}" for head in heads))
    for name, row in report.items():
        print(f"{name:9}" + "".join(f"{row[head]:{width}g}" for head in heads))


def counted(kind: str, layers: int, width: int, by_layer: bool, name: str) -> dict[str, float]:
    """The figures of a row."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, batch = MODELS[kind]
    model, (x, y) = make(layers, width), batch()

    def fresh() -> nn.Module:
        return ROWS[name](copy.deepcopy(model))

    def step(loss_of: Callable[..., Any]) -> None:
        loss_of(x, y).backward()

    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
    )
    step(_compiled(fresh(), by_layer, backend=backend))
    calls = [n for graph in graphs for n in graph.graph.nodes if n.op == "call_function"]

    torch.compiler.reset()
    compiled = _compiled(fresh(), by_layer)
    wall, cpu = time.perf_counter(), time.process_time()
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(step, compiled)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    optimizer = torch.optim.AdamW(compiled.parameters(), fused=True)

    def train() -> None:
        optimizer.zero_grad()
        step(compiled)
        optimizer.step()

    alone, trained = least(5, lambda: step(compiled)), least(12, train)
    uncompiled = fresh()
    eager = least(12, lambda: step(uncompiled))
    bodies = [code.rpartition("def call(")[2] for code in codes]
    return {
        "nodes": len(calls),
        "0-dim": sum(is_single(n.meta.get("val")) for n in calls),
        "opaque": sum(is_opaque(n.target) for n in calls),
        "kernels": sum(len(_KERNEL.findall(body)) for body in bodies),
        "sources": sum(len(_SOURCE.findall(code)) for code in codes),
        "extern": sum(len(_EXTERN.findall(body)) for body in bodies),
        "looks": sum(len(_LOOK.findall(body)) for body in bodies),
        "compile s": round(wall, 1),
        "own CPU s": round(cpu, 1),
        "step ms": alone,
        "train ms": trained,
        "eager ms": eager,
    }


def least(times: int, function: Callable[[], None]) -> float:
    """The least CPU time of several calls, in milliseconds."""
    spent = []
    for _ in range(times):
        start = time.process_time()
        function()
        spent.append(time.process_time() - start)
    return round(1e3 * min(spent), 1)


def _compiled(model: nn.Module, by_layer: bool, **options: Any) -> Any:
    if not by_layer:
        return torch.compile(model, fullgraph=True, **options)
    blocks = next(
        module.blocks for module in model.modules() if isinstance(module, GPT | CNN | Llama)
    )
    for block in blocks:
        block.compile(fullgraph=True, **options)
    return model


def is_opaque(target: Any) -> bool:
    return str(target).startswith("scaledtensor.") and target not in _inductor.taught()


def is_single(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


if __name__ == "__main__":
    main()
