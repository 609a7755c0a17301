"""Time that `scaledtensor.batch_invariant` costs, as a ratio to torch's own kernels, on a CPU.

    python -m benchmarks.invariant [--width 256] [--layers 2] [--context 128]

A small GPT with a cache of keys and values: a prefill, one step of decoding, a training step.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scaledtensor as sct
from benchmarks.timing import device_name, interleaved

VOCABULARY, HEAD = 512, 32


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        if cache:
            k, v = (torch.cat(pair, 2) for pair in zip(cache, (k, v), strict=True))
        cache[:] = k, v
        y = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, [] if caches is None else caches[i])
        return self.head(x)  # type: ignore[no-any-return]


def jobs(model: GPT, context: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Return the runs that are timed, by name."""
    model.to(dtype)
    tokens = torch.randint(VOCABULARY, (4, context))
    caches: dict[int, list[list[Tensor]]] = {}
    with torch.no_grad():
        for batch in (1, 4):
            caches[batch] = [[] for _ in model.layers]
            model(tokens[:batch], caches[batch])

    @torch.no_grad()
    def prefill() -> None:
        model(tokens)

    @torch.no_grad()
    def decode(batch: int) -> None:
        for _ in range(8):  # each step reads the same cache
            model(tokens[:batch, :1], [list(cache) for cache in caches[batch]])

    def train() -> None:
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        model.zero_grad()

    return {
        f"prefill of 4 x {context} tokens": prefill,
        "decoding, batch 1": lambda: decode(1),
        "decoding, batch 4": lambda: decode(4),
        f"training step of 4 x {context} tokens": train,
    }


def measure(width: int, layers: int, context: int, rounds: int) -> dict[str, float]:
    """Return job -> time with the setting over time without it."""
    found: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        for name, run in jobs(GPT(width, layers), context, dtype).items():

            def invariant(run: Callable[[], object] = run) -> None:
                with sct.batch_invariant():
                    run()

            steps = {"ordinary": run, "invariant": invariant}
            times = interleaved(steps, rounds, torch.device("cpu"), warm_up=1)
            label = f"{name}, {str(dtype).removeprefix('torch.')}"
            found[label] = times["invariant"] / times["ordinary"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (("width", 256), ("layers", 2), ("context", 128), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(f"{device_name(torch.device('cpu'))}; time with the setting over time without it")
    for name, ratio in measure(**vars(options)).items():
        print(f"{ratio:6.2f}  {name}")


if __name__ == "__main__":
    main()
