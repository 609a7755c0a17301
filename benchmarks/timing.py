"""Medians of interleaved runs: a busy machine slows all variants alike, so ratios stay right."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import torch

Step = Callable[[], object]
Moment = tuple[float, float]
"""Seconds by the clock on the wall, and of CPU time."""
Name = TypeVar("Name", bound=Hashable)


def interleaved(
    steps: Mapping[Name, Step],
    rounds: int,
    device: torch.device,
    warm_up: int = 3,
    *,
    wall: bool = False,
) -> dict[Name, float]:
    """Return the median milliseconds of each step over `rounds`, after `warm_up` rounds that
    compile and warm up.

    The time is CPU time of this process on a CPU, and event time on a CUDA device. With `wall` it
    is wall time on a CPU, for threads that share the work.
    """
    clock = time.perf_counter if wall else time.process_time
    times: dict[Name, list[float]] = {name: [] for name in steps}
    for i in range(rounds + warm_up):
        for name, run in steps.items():
            spent = (
                cuda_milliseconds(run) if device.type == "cuda" else cpu_milliseconds(run, clock)
            )
            if i >= warm_up:
                times[name].append(spent)
    return {name: statistics.median(spent) for name, spent in times.items()}


def cpu_milliseconds(run: Step, clock: Callable[[], float] = time.process_time) -> float:
    start = clock()
    run()
    return 1e3 * (clock() - start)


def cuda_milliseconds(run: Step) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def now() -> Moment:
    """Return the wall time, and the CPU time of all threads of this process."""
    return time.perf_counter(), time.process_time()


def between(moments: Sequence[Moment]) -> list[Moment]:
    """Return the seconds from each moment to the next."""
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(moments)]


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has bfloat16 units. Without them a bfloat16 model takes 10 to 60 times as
    long as a float32 one on a CPU, and other bars apply."""
    return _product_dtype(device) == torch.bfloat16


def device_name(device: torch.device) -> str:
    """Return the name of a device for figures; for a CPU with its vectors and threads, which decide
    the speed."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    products = str(_product_dtype(device)).removeprefix("torch.")
    count = torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"cpu ({capability}, products in {products}), {count} thread{'s' * (count > 1)}"


def _product_dtype(device: torch.device) -> torch.dtype:
    # Loaded here: `benchmarks.imports` times programs that have not loaded the library.
    from scaledtensor.ops.products.dtype import product_dtype

    return product_dtype(device)
