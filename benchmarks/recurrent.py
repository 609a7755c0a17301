"""Time recurrent layers, forward and backward, in eager code: ours, float32 and bfloat16.

    python -m benchmarks.recurrent [--widths 32 256 512] [--kinds LSTM GRU RNN] [--rounds 9]
        [--operators]

The layer is `torch.nn.LSTM`, `GRU` or `RNN` of one width on a batch of 16 sequences of 64 steps,
with a Gaussian incoming gradient. All rows run interleaved in one process; a figure is the median
of their CPU times on one thread. Ours has float32 parameters, casts them again in each step, and
gives them float32 gradients. With `--operators`, one more row runs under a mode that sees the
operators, so that each step of the layer runs as operators on ScaledTensors.
"""

import argparse
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import scaledtensor as sct
from benchmarks.timing import Step, device_name, interleaved

KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
SEQUENCES, STEPS = 16, 64


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--widths", type=int, nargs="+", default=(32, 256, 512), metavar="N")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=tuple(KINDS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--operators", action="store_true", help="a row of single operators")
    options = parser.parse_args(arguments)
    cpu = torch.device("cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{device_name(cpu)}; torch {torch.__version__}; milliseconds a step, ratio to float32")
    for kind in options.kinds:
        for width in options.widths:
            times = interleaved(rows(kind, width, options.operators), options.rounds, cpu)
            shown = (f"{name} {t:.1f} ({t / times['fp32']:.1f})" for name, t in times.items())
            print(f"{kind} {width}: {', '.join(shown)}")


def rows(kind: str, width: int, operators: bool) -> dict[str, Step]:
    """Return the timed functions by name."""
    net = KINDS[kind](width, width, batch_first=True)
    x = torch.randn(SEQUENCES, STEPS, width)
    gradient = torch.randn(SEQUENCES, STEPS, width)
    ours = sct.scale_model(copy.deepcopy(net))
    scaled = sct.scaled(gradient, "bf16")
    steps: dict[str, Step] = {
        "fp32": lambda: _trained(net, x, gradient),
        "unit": lambda: _trained(ours, x, scaled),
    }
    half, half_x = copy.deepcopy(net).bfloat16(), x.bfloat16()
    steps["bf16"] = lambda: _trained(half, half_x, gradient.bfloat16())
    if operators:
        steps["unit, operators"] = lambda: _watched(ours, x, scaled)
    return steps


def _trained(net: nn.Module, x: Tensor, gradient: Tensor) -> None:
    net.zero_grad()
    net(x)[0].backward(gradient)


class _Seen(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def _watched(net: nn.Module, x: Tensor, gradient: Tensor) -> None:
    with _Seen():
        _trained(net, x, gradient)


if __name__ == "__main__":
    main()
