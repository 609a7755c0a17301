"""Measure how much longer an eager operator takes on a small ScaledTensor than on a plain tensor.

    python -m benchmarks.overhead [--rounds 25]

Figures are microseconds a call beyond a call on the plain tensor of the same dtype, with 32 x 32
elements of RMS 1. "norm" is the RMS norm, which torch composes on a CPU. Two other wrapper
subclasses are measured beside ours. "wrapper" only unwraps and wraps. "floor" has unit scaling for
some of these operators in the fewest lines of Python: it calculates a scale, an RMS, and the ratio
by which the kernel's result is multiplied. It knows one format, no recipe and no compiler, and does
not check anything. So no library in Python is below it. Calls have no gradients and run on one
thread; figures are medians of interleaved CPU times of 200 calls. A step of an optimizer is for one
such parameter, and for one of 1024 x 1024 elements. All but the last run as loops over operators.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import scaledtensor as sct
from benchmarks.timing import interleaved
from scaledtensor import _torch

CALLS = 200
#: operator -> the largest allowed number of microseconds over the plain one
BARS = {"view": 5.0, "add": 15.0, "gelu": 20.0, "mm": 12.0}

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(1024),
    "t": lambda x: x.t(),
    "slice": lambda x: x[1:],
    "add": lambda x: x + x,
    "gelu": torch.nn.functional.gelu,
    "mm": lambda x: torch.mm(x, x),
    "tanh": torch.tanh,
    "amax": lambda x: x.amax(-1),
    "norm": lambda x: torch.nn.functional.rms_norm(x, (32,)),
}


Maker = Callable[[list[Tensor]], torch.optim.Optimizer]

#: name -> the optimizer
STEPS: dict[str, Maker] = {
    "SGD, momentum": lambda p: torch.optim.SGD(p, 1e-3, 0.9, weight_decay=1e-4, foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, foreach=False),
    "Adamax": lambda p: torch.optim.Adamax(p, foreach=False),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True, foreach=False),
    "AdamW, loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
}
#: edge of a square parameter -> (parameters, steps of each) in one call
SQUARES = {32: (20, 10), 1024: (1, 2)}


class Wrapper(Tensor):
    """The smallest wrapper subclass, in the fewest lines of Python."""

    inner: Tensor
    __torch_function__ = _torch.without_torch_function

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        self: Wrapper = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.inner if isinstance(a, Wrapper) else a for a in args]
        return Wrapper(op(*plain, **(kwargs or {})))


#: power of two -> its tensor, by which torch multiplies in less time than by a number
POWERS = {2.0**n: torch.tensor(2.0**n) for n in range(-126, 128)}


class Floor(Wrapper):
    """The smallest wrapper subclass whose operators calculate scales."""

    scale: float
    rms: float

    @staticmethod
    def __new__(cls, inner: Tensor, scale: float = 1.0, rms: float = 1.0) -> "Floor":
        self: Floor = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        self.inner, self.scale, self.rms = inner, scale, rms
        return self

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return RULES[op](*args, **(kwargs or {}))


def nearest(rms: float) -> float:
    significand, exponent = math.frexp(rms)
    return 2.0 ** (exponent if significand >= 0.5**0.5 else exponent - 1)


def moved(made: Tensor, scale: float, rms: float) -> Floor:
    """Return a new tensor under `scale` as a result under the scale nearest to its RMS."""
    to = nearest(rms)
    if scale != to:
        made.mul_(POWERS[scale / to])
    return Floor(made, to, rms)


def product(x: Floor, y: Floor) -> Floor:
    made = torch.mm(x.inner, y.inner)
    return moved(made, x.scale * y.scale, x.rms * y.rms * math.sqrt(x.shape[1]))


def total(x: Floor, y: Floor) -> Floor:
    rms = math.sqrt(x.rms * x.rms + y.rms * y.rms)
    to = nearest(rms)
    first = x.inner if x.scale == to else x.inner * POWERS[x.scale / to]
    return Floor(torch.add(first, y.inner, alpha=y.scale / to), to, rms)


def activated(x: Floor) -> Floor:
    value = x.inner if x.scale == 1 else x.inner * POWERS[x.scale]
    rms = x.rms * math.sqrt(0.5 - 0.25 / (1 + x.rms))  # any smooth form takes as long
    return moved(torch.nn.functional.gelu(value), 1.0, rms)


RULES: dict[Any, Callable[..., Floor]] = {
    torch.ops.aten.view.default: lambda x, shape: Floor(x.inner.view(shape), x.scale, x.rms),
    torch.ops.aten.t.default: lambda x: Floor(x.inner.t(), x.scale, x.rms),
    torch.ops.aten.slice.Tensor: lambda x, *a: Floor(
        torch.ops.aten.slice.Tensor(x.inner, *a), x.scale, x.rms
    ),
    torch.ops.aten.add.Tensor: total,
    torch.ops.aten.gelu.default: activated,
    torch.ops.aten.mm.default: product,
}


def has_floor(name: str) -> bool:
    return name not in ("tanh", "amax", "norm")


def repeated(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS):
            function(x)

    return run


def stepped(x: Tensor, make: Maker, count: int, times: int) -> Callable[[], None]:
    """Return a function of some steps, with many small parameters in an optimizer, as in a
    model."""
    parameters = [x.detach().clone().requires_grad_() for _ in range(count)]
    for p in parameters:
        p.grad = x.detach().clone()
    optimizer = make(parameters)

    def run() -> None:
        for _ in range(times):
            optimizer.step()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    drawn = torch.randn(32, 32)
    # With an RMS of exactly 1, sums and products of ours and of the floor have the same ratios.
    drawn /= drawn.square().mean().sqrt()
    plain = {"fp32": drawn, "bf16": drawn.bfloat16()}
    kinds = {"plain": lambda x: x, "wrapper": Wrapper, "floor": Floor, "ours": sct.scaled}
    subjects = {(fmt, kind): kinds[kind](x) for fmt, x in plain.items() for kind in kinds}
    steps = {
        (name, *which): repeated(function, x)
        for name, function in CASES.items()
        for which, x in subjects.items()
        if which[1] != "floor" or has_floor(name)
    }
    for edge, sizes in SQUARES.items():
        drawn = torch.randn(edge, edge)
        for name, make in STEPS.items():
            for kind, x in (("plain", drawn), ("ours", sct.scaled(drawn))):
                steps[name, str(edge), kind] = stepped(x, make, *sizes)
    with torch.no_grad():
        spent = interleaved(steps, options.rounds, torch.device("cpu"))
    print(f"torch {torch.__version__}, 32 x 32, one thread, medians of {options.rounds} rounds\n")
    print(
        f"{'microseconds':14}{'plain':>8}{'+ wrapper':>11}{'+ floor':>9}{'+ ours':>9}"
        f"{'ours/floor':>12}"
    )
    for name in CASES:
        for fmt in plain:
            took = {kind: spent.get((name, fmt, kind), math.nan) * 1e3 / CALLS for kind in kinds}
            base = took.pop("plain")
            wrapper, floor, ours = (time - base for time in took.values())
            verdict = ""
            if name in BARS:
                verdict = f"   <= {BARS[name]}: {'met' if ours <= BARS[name] else 'NOT met'}"
            least, ratio = f"{floor:9.1f}", f"{ours / floor:12.2f}"
            if not has_floor(name):
                least, ratio = f"{'-':>9}", f"{'-':>12}"
            print(f"{name:6}{fmt:8}{base:8.1f}{wrapper:11.1f}{least}{ours:9.1f}{ratio}{verdict}")
    print(f"\n{'step':16}" + "".join(f"{f'{n} x {n}':>14}{'+ ours':>8}{'x':>6}" for n in SQUARES))
    for name in STEPS:
        line = f"{name:16}"
        for edge, (count, times) in SQUARES.items():
            per = 1e3 / (count * times)
            base, ours = (spent[name, str(edge), kind] * per for kind in ("plain", "ours"))
            line += f"{base:14.1f}{ours - base:8.1f}{ours / base:6.1f}"
        print(line)


if __name__ == "__main__":
    main()
