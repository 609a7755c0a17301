"""Count the bytes that a training step sends, and calculate them by formula for models of any size.

    python -m benchmarks.traffic [--ranks 2 4] [--json FILE]
    python -m benchmarks.traffic --errors [--ranks 4]
    python -m benchmarks.traffic --model [--states 8]

The first command trains the demo's GPT (4 layers, d = 128) on this machine, in `--ranks` processes,
and counts the collectives of its third step with `count_traffic`. A row is a way to train in
parallel, one function below. Bytes are the bytes that one rank sends by textbook algorithms
(`scaledtensor/distributed/traffic.py`), scales included.

The second command reduces gradients with a known exact sum: Gaussian gradients, and gradients with
magnitudes spread as exp(t Gaussian), which have heavy tails. It prints |error| / |mean| of the mean
over ranks, and the share of elements that became zero, in the wire's format or by cancelling there.

The third command evaluates the formulas below for Llama 2 7B and Llama 3 70B and 405B. A model has
P parameters, b of them in blocks and r outside. On n ranks, with w and g bytes an element of
weights and gradients on the wire, on average:

    DDP      sends 2 (n-1)/n g P; a rank holds (4 + 4 + states) bytes a parameter
    FSDP2    sends (n-1)/n (2 w b + w' r + g P): blocks are gathered for forward and for backward,
             parameters outside of them once, with w' bytes; a rank holds (4 + 4 + states) / n

4 + 4 are float32 weights and gradients; states 8 for AdamW in float32. FP8 gradients have g = 1 +
1/128. An FP8 all-gather has 1 byte for weights of products, including the head, and 2 for other
weights, which are sent as bfloat16. Activations, and the blocks that are gathered at a time, need
memory in addition. `tests/distributed/test_traffic_benchmark.py` compares each formula with counts.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import scaledtensor as sct
from scaledtensor.apps.gpt import GPT, GPTConfig
from scaledtensor.distributed import (
    FP8State,
    Wire,
    count_traffic,
    fp8_all_reduce,
    fp8_all_reduce_hook,
    sent_bytes,
    use_fp8_reduce_scatter,
)

CONFIG = GPTConfig(vocab_size=64, block_size=64, n_layer=4, n_head=4, n_embd=128)
DEVICES = (8, 64, 512, 4096)
FP8 = 1 + 1 / 128  # a byte, and a scale for 128 of them

# --- counted --------------------------------------------------------------------------------------


def ddp(wire: Wire | Callable[..., Any] | None = None) -> Callable[[GPT], nn.Module]:
    def prepare(model: GPT) -> nn.Module:
        parallel = DistributedDataParallel(model)
        if isinstance(wire, Wire):
            parallel.register_comm_hook(FP8State(wire), fp8_all_reduce_hook)
        elif wire is not None:
            parallel.register_comm_hook(None, wire)
        return parallel

    return prepare


def bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook under another name. DDP refuses the hook's own name on backends that once were
    slow with bfloat16."""
    return bf16_compress_hook(state, bucket)


def fsdp(
    reduce: torch.dtype, wire: Wire | None = None, scaled: bool = False
) -> Callable[[GPT], nn.Module]:
    def prepare(model: GPT) -> nn.Module:
        if scaled:
            sct.scale_model(model)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        if wire is not None:
            use_fp8_reduce_scatter(model, wire)
        return model

    return prepare


#: The row of comparison, and the function that makes a model train in this way.
ROWS: dict[str, tuple[str, Callable[[GPT], nn.Module]]] = {
    "DDP, float32": ("DDP, bfloat16", ddp()),
    "DDP, bfloat16": ("DDP, bfloat16", ddp(bf16)),
    "DDP, FP8 by blocks": ("DDP, bfloat16", ddp(Wire())),
    "DDP, FP8 auto": ("DDP, bfloat16", ddp(Wire(scaling="auto"))),
    "DDP, FP8 by blocks, bfloat16 back": ("DDP, bfloat16", ddp(Wire(gather="bf16"))),
    "FSDP2, bfloat16": ("FSDP2, bfloat16", fsdp(torch.bfloat16)),
    "FSDP2, gradients in FP8": ("FSDP2, bfloat16", fsdp(torch.float32, Wire())),
    "FSDP2, gradients in FP8, auto": (
        "FSDP2, bfloat16",
        fsdp(torch.float32, Wire(scaling="auto")),
    ),
    "FSDP2, weights in FP8": ("FSDP2, bfloat16", fsdp(torch.bfloat16, scaled=True)),
    "FSDP2, both in FP8": ("FSDP2, bfloat16", fsdp(torch.float32, Wire(), scaled=True)),
}


class Count(NamedTuple):
    """The bytes that one rank sends in a step, and holds after it."""

    collectives: list[tuple[str, str, int, float]]
    """Name, dtype, calls and bytes sent."""
    weights: float
    """Bytes sent to gather weights."""
    gradients: float
    """Bytes sent to reduce gradients."""
    held: int
    """Bytes of weights, gradients and states on this rank."""
    parameters: int


def count(row: str) -> Count:
    """Count the third step of a training, on this rank of the process group."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    parameters = sum(p.numel() for p in model.parameters())
    parallel = ROWS[row][1](model)
    optimizer = torch.optim.AdamW(parallel.parameters(), 1e-3)
    x = torch.randint(CONFIG.vocab_size, (2, CONFIG.block_size + 1))

    def step() -> None:
        parallel(x[:, :-1], x[:, 1:])[1].backward()
        optimizer.step()

    for _ in range(2):  # DDP settles its buckets after the first
        optimizer.zero_grad()
        step()
    optimizer.zero_grad()
    with count_traffic() as traffic:
        step()
    rows = [
        (c.name, str(c.dtype).removeprefix("torch."), c.calls, c.sent) for c in traffic.collectives
    ]
    gathers = row.startswith("FSDP")
    weights = sum(sent for name, _, _, sent in rows if gathers and name == "all-gather")
    tensors = [t for p in parallel.parameters() for t in (p, p.grad)]
    tensors += [t for s in optimizer.state.values() for t in s.values() if t.dim()]
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    held = sum(t.numel() * t.itemsize for t in local)  # elements; scales are a few bytes a tensor
    return Count(rows, weights, traffic.sent - weights, held, parameters)


def counts(ranks: int, rows: Sequence[str]) -> dict[str, Count]:
    """Start processes for each row and return rank 0's counts."""
    found = on_ranks(ranks, count, rows)
    return {row: Count(*fields) for row, fields in found.items()}


def on_ranks(ranks: int, job: Callable[[str], Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the result of `job` for each name on rank 0 of `ranks` processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (ranks, job, tuple(names), folder), ranks)
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    return found


def _rank(
    rank: int, ranks: int, job: Callable[[str], Any], names: Sequence[str], folder: str
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    found = {name: job(name) for name in names}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def table_of_counts(found: dict[int, dict[str, Count]]) -> str:
    """Return Markdown: bytes a parameter, and bytes of gradients over the row of comparison."""
    lines = [
        "| ranks | row | weights | gradients | of bfloat16's gradients | collectives |",
        "|---|---|---|---|---|---|",
    ]
    for ranks, rows in found.items():
        for row, c in rows.items():
            other = rows.get(ROWS[row][0])
            ratio = f"{c.gradients / other.gradients:.3f}" if other else ""
            calls = ", ".join(f"{n} {name} {dtype}" for name, dtype, n, _ in c.collectives)
            sent = (f"{n / c.parameters:.3f}" if n else "" for n in (c.weights, c.gradients))
            lines.append(f"| {ranks} | {row} | {' | '.join(sent)} | {ratio} | {calls} |")
    return "\n".join(lines)


# --- errors ---------------------------------------------------------------------------------------

TAILS = (0.0, 1.0, 2.0, 3.0)
ELEMENTS = 1 << 18
WIRES: dict[str, Wire | torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "E4M3FN by blocks": Wire(),
    "E4M3FN by blocks, bfloat16 back": Wire(gather="bf16"),
    "E4M3FN by blocks, stochastic": Wire(rounding="stochastic"),
    "E4M3FN auto": Wire(scaling="auto"),
    "E5M2 by blocks": Wire("e5m2"),
    "E5M2 auto": Wire("e5m2", "auto"),
}


def gradient(rank: int, tail: float) -> torch.Tensor:
    """Gaussian, with magnitudes spread as exp(tail * Gaussian)."""
    generator = torch.Generator().manual_seed(rank)
    x, spread = (torch.randn(ELEMENTS, generator=generator) for _ in range(2))
    return x * (tail * spread).exp()


def errors(name: str) -> list[tuple[float, float]]:
    """Return the relative error of the mean over ranks and the share of zeros for each tail."""
    wire, ranks, found = WIRES[name], dist.get_world_size(), []
    torch.manual_seed(0)
    for tail in TAILS:
        truth = sum(gradient(rank, tail).double() for rank in range(ranks)) / ranks
        own = gradient(dist.get_rank(), tail)
        if isinstance(wire, Wire):
            fp8_all_reduce(own, op=dist.ReduceOp.AVG, wire=wire)
        else:
            own = own.to(wire) / ranks
            dist.all_reduce(own)
        lost = (own == 0).double().mean().item()
        found.append(((own - truth).norm().item() / truth.norm().item(), lost))
    return found


def table_of_errors(found: dict[str, list[tuple[float, float]]]) -> str:
    lines = [
        "| wire | Gaussian | " + " | ".join(f"t = {tail:g}" for tail in TAILS[1:]) + " |",
        "|---" * (1 + len(TAILS)) + "|",
    ]
    for name, of_tails in found.items():
        cells = [f"{error:.4f}, {100 * lost:.2f}%" for error, lost in of_tails]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


# --- by formula -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A model's parameters: weights of products and others, in blocks and outside of them."""

    name: str
    products: int
    rest: int
    head: int
    outside: int

    @property
    def parameters(self) -> int:
        return self.products + self.rest + self.head + self.outside


def llama(name: str, layers: int, d: int, hidden: int, queries_per_key: int, vocab: int) -> Shape:
    """Sizes of a model with grouped-query attention, a gated MLP, two norms, embedding and head."""
    attention = 2 * d * d + 2 * d * d // queries_per_key
    return Shape(
        name, layers * (attention + 3 * d * hidden), layers * 2 * d, vocab * d, vocab * d + d
    )


LLAMAS = (
    llama("Llama 2 7B", 32, 4096, 11008, 1, 32000),
    llama("Llama 3 70B", 80, 8192, 28672, 8, 128256),
    llama("Llama 3 405B", 126, 16384, 53248, 16, 128256),
)


def shape_of(model: GPT) -> Shape:
    """Return the sizes of the demo's GPT."""
    blocks = [p.numel() for p in model.blocks.parameters()]
    products = sum(p.numel() for p in model.blocks.parameters() if p.dim() > 1)
    head = model.head.weight.numel()
    outside = sum(p.numel() for p in model.parameters()) - sum(blocks) - head
    return Shape("demo", products, sum(blocks) - products, head, outside)


def ddp_sent(shape: Shape, ranks: int, gradient: float) -> float:
    """Bytes that a rank sends in a step, with `gradient` bytes an element."""
    return sent_bytes("all-reduce", gradient * shape.parameters, ranks)


def fsdp_sent(
    shape: Shape, ranks: int, product: float, rest: float, gradient: float
) -> tuple[float, float]:
    """Bytes that a rank sends in a step, for weights and for gradients."""
    blocks = product * shape.products + rest * shape.rest
    gathered = 2 * blocks + product * shape.head + rest * shape.outside
    return (
        sent_bytes("all-gather", gathered, ranks),
        sent_bytes("reduce-scatter", gradient * shape.parameters, ranks),
    )


def held(ranks: int, states: float, sharded: bool) -> float:
    """Bytes a parameter of float32 weights and gradients, and of states, on a rank."""
    return (4 + 4 + states) / (ranks if sharded else 1)


#: Name, sharded or not, and bytes of a product's weight, of other weights and of gradients.
WAYS = (
    ("DDP, float32", False, 0, 0, 4),
    ("DDP, bfloat16", False, 0, 0, 2),
    ("DDP, FP8", False, 0, 0, FP8),
    ("FSDP2, bfloat16", True, 2, 2, 2),
    ("FSDP2, gradients in FP8", True, 2, 2, FP8),
    ("FSDP2, weights in FP8", True, 1, 2, 2),
    ("FSDP2, both in FP8", True, 1, 2, FP8),
)


def table_of_sent() -> str:
    """Return Markdown: the GB that a device sends in a step."""
    lines = [
        "| model | way | " + " | ".join(f"{n} devices" for n in DEVICES) + " |",
        "|---" * (2 + len(DEVICES)) + "|",
    ]
    for shape in LLAMAS:
        for way, sharded, product, rest, gradient in WAYS:
            sent = [
                sum(fsdp_sent(shape, n, product, rest, gradient))
                if sharded
                else ddp_sent(shape, n, gradient)
                for n in DEVICES
            ]
            lines.append(f"| {shape.name} | {way} | {' | '.join(f'{s / 1e9:.1f}' for s in sent)} |")
    return "\n".join(lines)


def table_of_held(states: float) -> str:
    """Return Markdown: bytes a parameter, and the GB of each model, that a device holds."""
    lines = [
        "| | DDP | " + " | ".join(f"FSDP2, {n} devices" for n in DEVICES) + " |",
        "|---" * (2 + len(DEVICES)) + "|",
    ]
    each = [held(1, states, False), *(held(n, states, True) for n in DEVICES)]
    lines.append(f"| bytes a parameter | {' | '.join(f'{b:.3g}' for b in each)} |")
    for shape in LLAMAS:
        sizes = (b * shape.parameters / 1e9 for b in each)
        cells = (f"{gb:.1f}" if gb >= 10 else f"{gb:.2g}" for gb in sizes)
        size = f"{shape.name}, {shape.parameters / 1e9:.2f}e9 parameters: GB"
        lines.append(f"| {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there too")
    parser.add_argument("--model", action="store_true", help="print the formulas' tables instead")
    parser.add_argument("--errors", action="store_true", help="print errors of reductions instead")
    parser.add_argument(
        "--states", type=float, default=8.0, help="bytes a parameter of states (default: 8)"
    )
    options = parser.parse_args(arguments)
    if options.model:
        print(f"{table_of_sent()}\n\n{table_of_held(options.states)}")
        return 0
    if options.errors:
        print(table_of_errors(on_ranks(options.ranks[-1], errors, list(WIRES))))
        return 0
    found = {n: counts(n, list(ROWS)) for n in options.ranks}
    print(table_of_counts(found))
    if options.json:
        data = {n: {row: c._asdict() for row, c in rows.items()} for n, rows in found.items()}
        options.json.write_text(json.dumps(data, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
