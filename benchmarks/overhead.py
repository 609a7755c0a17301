"""Measure how much longer an eager operator takes on a small ScaledTensor than on a plain tensor.

    python -m benchmarks.overhead [--rounds 25]

Figures are microseconds a call beyond a call on the plain tensor of the same dtype, with 32 x 32
elements. A wrapper subclass that only unwraps and wraps is measured beside ours: the difference is
the cost of the rule. Calls have no gradients and run on one thread; figures are medians of
interleaved CPU times of 200 calls. A step of `torch.optim.AdamW` is for one such parameter, as a
loop and as the fused operator.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import scaledtensor as sct
from benchmarks.timing import interleaved
from scaledtensor import _torch

CALLS = 200
#: operator -> the largest allowed number of microseconds over the plain one
BARS = {"view": 5.0, "mm": 12.0}

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(1024),
    "t": lambda x: x.t(),
    "slice": lambda x: x[1:],
    "add": lambda x: x + x,
    "gelu": torch.nn.functional.gelu,
    "mm": lambda x: torch.mm(x, x),
}


#: form of AdamW -> its options
STEPS: dict[str, dict[str, bool]] = {"loop": {"foreach": False}, "fused": {"fused": True}}


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


def repeated(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS):
            function(x)

    return run


def stepped(x: Tensor, **form: bool) -> Callable[[], None]:
    """Return a function of `CALLS` steps, with many parameters in each optimizer, as in a model."""
    count = 20
    parameters = [x.detach().clone().requires_grad_() for _ in range(count)]
    for p in parameters:
        p.grad = x.detach().clone()
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, **form)

    def run() -> None:
        for _ in range(CALLS // count):
            optimizer.step()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain = {"fp32": torch.randn(32, 32), "bf16": torch.randn(32, 32, dtype=torch.bfloat16)}
    subjects = {
        (fmt, kind): build(x)
        for fmt, x in plain.items()
        for kind, build in (("plain", lambda x: x), ("wrapper", Wrapper), ("ours", sct.scaled))
    }
    steps = {
        (name, *which): repeated(function, x)
        for name, function in CASES.items()
        for which, x in subjects.items()
    }
    for form, options_of_form in STEPS.items():
        for kind, x in (("plain", plain["fp32"]), ("ours", sct.scaled(plain["fp32"]))):
            steps[form, "fp32", kind] = stepped(x, **options_of_form)
    with torch.no_grad():
        spent = interleaved(steps, options.rounds, torch.device("cpu"))
    print(f"torch {torch.__version__}, 32 x 32, one thread, medians of {options.rounds} rounds\n")
    print(f"{'microseconds':14}{'plain':>8}{'+ wrapper':>11}{'+ ours':>9}{'ours/wrapper':>14}")
    for name in CASES:
        for fmt in plain:
            base, wrapper, ours = (
                spent[name, fmt, kind] * 1e3 / CALLS for kind in ("plain", "wrapper", "ours")
            )
            verdict = ""
            if name in BARS:
                met = ours - base <= BARS[name]
                verdict = f"   <= {BARS[name]}: {'met' if met else 'NOT met'}"
            print(
                f"{name:6}{fmt:8}{base:8.1f}{wrapper - base:11.1f}{ours - base:9.1f}"
                f"{(ours - base) / (wrapper - base):14.2f}{verdict}"
            )
    for form in STEPS:
        base, ours = (spent[form, "fp32", kind] * 1e3 / CALLS for kind in ("plain", "ours"))
        print(f"AdamW, {form:7}{base:8.1f}{'':11}{ours - base:9.1f}")


if __name__ == "__main__":
    main()
