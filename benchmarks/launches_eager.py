"""Count the kernels that eager training launches on a CUDA device, and its waits, without a device.

    python -m benchmarks.launches_eager [--layers 2] [--width 64] [--rows fp32 bf16 unit current]
        [--json FILE]

The step is forward, backward and `torch.optim.AdamW` of the demo's GPT, the third of a training, on
the simulated device of `benchmarks/simulated_cuda.py` (compute capability 9.0). "forward",
"backward" and "step" count the kernels, and "waits" the times that the host reads a number from the
device. Each launch takes the host about 5 us of an eager program, a wait about 15. bf16 runs under
autocast. The counts do not depend on the machine.
"""

from benchmarks.simulated_cuda import counted, start

if __name__ == "__main__":  # before torch is imported
    start()

import argparse
import json
from pathlib import Path

import torch

import scaledtensor as sct
from benchmarks.launches import show
from scaledtensor.apps.gpt import GPT, GPTConfig

ROWS = ("fp32", "bf16", "unit", "current")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    found = {row: steps(row, options.layers, options.width)[-1] for row in options.rows}
    show(found, 10)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2))


def steps(row: str, layers: int = 2, width: int = 64, count: int = 3) -> list[dict[str, float]]:
    """Train a GPT, and return for each step its kernels, its waits and its loss."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(64, 64, layers, 2, width)).cuda()
    if row in ("unit", "current"):
        model = sct.scale_model(model, row)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(64, (4, 64), device="cpu").cuda()
    found = []
    for _ in range(count):
        with counted() as all_of_it:
            narrow = torch.autocast("cuda", torch.bfloat16, enabled=row == "bf16")
            with counted() as forward, narrow:
                loss = model(tokens, tokens)[1]
            with counted() as backward:
                loss.backward()
            with counted() as step:
                optimizer.step()
                optimizer.zero_grad()
        of = {"forward": forward, "backward": backward, "step": step}
        launches = {name: counts.launches for name, counts in of.items()}
        found.append(launches | {"waits": all_of_it.waits, "loss": loss.item()})
    return found


if __name__ == "__main__":
    main()
