"""Medians of interleaved runs: a busy machine shifts all variants alike, so their ratios stand."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

Step = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)


def interleaved(
    steps: Mapping[Name, Step], rounds: int, device: torch.device, warm_up: int = 3
) -> dict[Name, float]:
    """Median milliseconds of each step over `rounds`, after `warm_up` that compile and warm up.

    CPU time of this process on a CPU; event time on a CUDA device.
    """
    times: dict[Name, list[float]] = {name: [] for name in steps}
    for i in range(rounds + warm_up):
        for name, run in steps.items():
            spent = cuda_milliseconds(run) if device.type == "cuda" else cpu_milliseconds(run)
            if i >= warm_up:
                times[name].append(spent)
    return {name: statistics.median(spent) for name, spent in times.items()}


def cpu_milliseconds(run: Step) -> float:
    start = time.process_time()
    run()
    return 1e3 * (time.process_time() - start)


def cuda_milliseconds(run: Step) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, 1 thread"
