"""Measure how far one spike in a gradient moves the other parameters of its group.

    python -m benchmarks.spikes [--spike 1e6] [--steps 12]

A parameter of 128 elements, one group, gets Gaussian gradients. At the fourth step its first
element gets the spike. A number is the largest difference of the other 127 from the float32 run, at
any step; "no spike" is the same with a gradient of 1 for that element.
"""

import argparse

import torch
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor.optim.states import STATE_FORMATS

OPTIMIZERS = {
    "SGD, momentum": (sct.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (sct.optim.AdamW, {"lr": 1e-2}),
}


def others(name: str, state_format: str, spike: float, steps: int) -> Tensor:
    """Return the 127 parameters after each step."""
    make, options = OPTIMIZERS[name]
    p = nn.Parameter(torch.zeros(128))
    optimizer = make([p], state_format=state_format, **options)
    rng = torch.Generator().manual_seed(0)
    found = []
    for step in range(steps):
        p.grad = torch.randn(128, generator=rng)
        if step == 3:
            p.grad[0] = spike
        optimizer.step()
        found.append(p.detach()[1:].clone())
    return torch.stack(found)


def distance(name: str, state_format: str, spike: float, steps: int) -> float:
    wanted = others(name, "fp32", spike, steps)
    return float((others(name, state_format, spike, steps) - wanted).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--spike", type=float, default=1e6)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    for name in OPTIMIZERS:
        way = others(name, "fp32", options.spike, options.steps).abs().max()
        print(f"{name}: they go up to {float(way):.3f}")
    heads = " | ".join(f"{name} | no spike" for name in OPTIMIZERS)
    print(f"\n| `state_format` | {heads} |\n" + "|---" * (1 + 2 * len(OPTIMIZERS)) + "|")
    for fmt in STATE_FORMATS[1:]:
        cells = [
            f"{distance(name, fmt, spike, options.steps):.4f}"
            for name in OPTIMIZERS
            for spike in (options.spike, 1.0)
        ]
        print(f'| `"{fmt}"` | ' + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
