"""Run eager code on a CUDA device that is not there: with its rules, and the kernels of the CPU.

`start(capability)` has to run before torch is imported. After that a CPU build of torch takes
`device="cuda"`. Tensors there have their elements in ordinary memory, which `simulated_cuda.cpp`
shows to torch as the memory of a device. So every branch on the device is the one of CUDA, in this
library and in torch: products go to the FP8 units (`torch._scaled_mm`), attention to the flash
kernel, and a tensor of the CPU beside one of the device is an error.

`counted()` counts the kernels that a device would launch, and the times that the host would wait
for it. The CPU's kernels compute the results, so times and last digits say nothing about a device.

Use a separate process for it: its replacements cannot be undone. It has no sparse tensors, pickles,
streams, collectives and generated kernels (`no_device.py` generates those).
"""

import ctypes
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.no_device import built, stand_in

__all__ = ["Counts", "counted", "start"]

_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_WAITER = ctypes.CFUNCTYPE(None)


@dataclass(eq=False)
class Counts:
    """The work of a device."""

    kernels: Counter[str] = field(default_factory=Counter)
    """The launches of kernels, by the name of the ATen operator."""
    waits: int = 0
    """The times that the host read from the device."""

    @property
    def launches(self) -> int:
        return sum(self.kernels.values())


class _Device:
    """The library that was built, and who listens to it."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.heard: list[Counts] = []
        # Python must keep these objects as long as C++ may call them.
        self.callbacks = _LISTENER(self._kernel), _WAITER(self._wait)
        self.quiet = 0
        library.listen(*self.callbacks)

    def _kernel(self, name: bytes) -> None:
        if not self.quiet:
            for counts in self.heard:
                counts.kernels[name.decode()] += 1

    def _wait(self) -> None:
        if not self.quiet:
            for counts in self.heard:
                counts.waits += 1

    @contextmanager
    def one_kernel(self, name: str) -> Iterator[None]:
        """The operators inside count as one kernel."""
        self._kernel(name.encode())
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1


_started: list[_Device] = []


@contextmanager
def counted() -> Iterator[Counts]:
    """Count the work of the device inside the block."""
    (device,) = _started
    counts = Counts()
    device.heard.append(counts)
    try:
        yield counts
    finally:
        device.heard.remove(counts)


def start(capability: tuple[int, int] = (9, 0)) -> None:
    """Simulate a device of this compute capability.

    Raises:
        RuntimeError: torch is loaded already, or is a CUDA build.
        CalledProcessError: There is no C++ compiler `c++`, or it failed.
    """
    stand_in(capability, kernels=False)
    import torch

    device = _Device(_library())
    _started.append(device)
    _take_operators(torch, device.library)
    _attend(torch, device)
    torch.cuda.manual_seed_all = lambda seed: None
    torch.cuda.manual_seed = lambda seed: None


#: The variable by which the processes of one test run share the library that the first one built.
_BUILT = "SIMULATED_CUDA_LIBRARY"


def _library() -> Any:
    if _BUILT not in os.environ:
        os.environ[_BUILT] = str(built("simulated_cuda", "-w"))
    return ctypes.CDLL(os.environ[_BUILT])


#: Operators whose kernels `simulated_cuda.cpp` has itself.
_OWN = ("empty", "copy_", "resize_", "set_", "as_strided", "view", "unfold", "_reshape_alias")


def _take_operators(torch: Any, library: Any) -> None:
    """Run the CPU's kernel of operators that torch would compose of others without a kernel."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    kinds = ("ExplicitAutograd", "ExplicitAutogradNonFunctional", "ImplicitAutograd")
    names = [
        name.encode()
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and name.removeprefix("aten::").split(".")[0] not in _OWN
        and has(name, "CPU")
        and any(has(name, f"Composite{kind}") for kind in kinds)
    ]
    names += [b"aten::convolution", b"aten::convolution_backward"]
    library.take((ctypes.c_char_p * len(names))(*names), len(names))


def _attend(torch: Any, device: _Device) -> None:
    """Define the flash attention of CUDA, which a CPU build lacks, by its formulas."""
    library = torch.library.Library("aten", "IMPL", "CUDA")

    def probabilities(q: Any, k: Any, causal: bool, factor: float) -> Any:
        logits = (q.float() @ k.float().mT) * factor
        if causal:
            later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            logits = logits.masked_fill(later, -torch.inf)
        return torch.softmax(logits, -1), torch.logsumexp(logits, -1)

    def check(*tensors: Any) -> None:
        for x in tensors:
            if x.dtype not in (torch.bfloat16, torch.float16):
                raise RuntimeError(f"flash attention takes float16 and bfloat16, not {x.dtype}")

    def forward(
        q: Any, k: Any, v: Any, dropout: float = 0, causal: bool = False, *_: Any, scale: Any = None
    ) -> Any:
        check(q, k, v)
        with device.one_kernel("flash_attention"):
            shares, lse = probabilities(q, k, causal, scale or q.shape[-1] ** -0.5)
            nothing = torch.empty(0, dtype=torch.int64, device=q.device)
            seeds = nothing.new_zeros(2), nothing.new_zeros(())
            sizes = q.shape[2], k.shape[2]
            out = (shares @ v.float()).to(q.dtype)
            return out, lse, nothing, nothing, *sizes, *seeds, q.new_empty(0)

    def backward(grad: Any, q: Any, k: Any, v: Any, out: Any, *rest: Any, scale: Any = None) -> Any:
        check(grad, q, k, v, out)
        with device.one_kernel("flash_attention_backward"):
            factor, causal = scale or q.shape[-1] ** -0.5, rest[6]
            shares, _ = probabilities(q, k, causal, factor)
            g = grad.float()
            inner = (g * out.float()).sum(-1, keepdim=True)
            of_logits = shares * (g @ v.float().mT - inner) * factor
            made = of_logits @ k.float(), of_logits.mT @ q.float(), shares.mT @ g
            return tuple(x.to(q.dtype) for x in made)

    library.impl("_scaled_dot_product_flash_attention", forward)
    library.impl("_scaled_dot_product_flash_attention_backward", backward)
    device.kept = library  # type: ignore[attr-defined]  # the operators end with it
