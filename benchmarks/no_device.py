"""Simulate a CUDA device, as far as torch and Triton ask for one while they generate code.

`stand_in(capability)` has to run before torch is imported. It compiles `no_device.cpp`, loads it
with libtorch, and answers in Python the questions that torch asks the driver. After that fake
tensors may be on "cuda", autograd and Inductor take them, and `triton.compile` makes PTX. Nothing
can be run.

Use a separate process for it: its replacements cannot be undone.
"""

import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["built", "capabilities", "stand_in", "target"]

#: compute capability -> properties that torch and Triton ask for (NVIDIA's data sheets)
_DEVICES: dict[tuple[int, int], dict[str, Any]] = {
    (9, 0): {"name": "NVIDIA H100", "multi_processor_count": 132},
    (10, 0): {"name": "NVIDIA B200", "multi_processor_count": 148},
}


def capabilities() -> list[tuple[int, int]]:
    return sorted(_DEVICES)


def stand_in(capability: tuple[int, int], kernels: bool = True) -> None:
    """Answer as a device of this compute capability; without `kernels`, for graphs alone.

    Raises:
        RuntimeError: torch is loaded already or is a CUDA build, or Triton, which writes the
            kernels, is not installed.
    """
    if "torch" in sys.modules:
        raise RuntimeError("stand_in() comes before the import of torch, whose hooks it registers")
    if kernels and importlib.util.find_spec("triton") is None:
        raise RuntimeError("Triton makes the kernels: pip install triton")
    _load_hooks()
    import torch

    if torch.backends.cuda.is_built():
        raise RuntimeError("this is a CUDA build of torch, which asks its driver; take a CPU build")
    _answer(torch, capability, kernels)


def target(capability: tuple[int, int]) -> Any:
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]

    major, minor = capability
    return GPUTarget("cuda", 10 * major + minor, 32)


def built(name: str, *options: str) -> Path:
    """Compile a C++ source of this folder with the headers of torch, and return the library."""
    found = importlib.util.find_spec("torch")
    torch = Path(str(found and found.origin)).parent
    made = Path(tempfile.mkdtemp(prefix=f"{name}-")) / f"{name}.so"
    headers = torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include"
    command = ["c++", "-shared", "-fPIC", "-std=c++20", *options, *(f"-I{x}" for x in headers)]
    libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    source = Path(__file__).with_name(f"{name}.cpp")
    subprocess.run([*command, str(source), "-o", str(made), *libraries], check=True)
    # The library of torch is loaded first, with names that ours can see.
    ctypes.CDLL(str(torch / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    return made


def _load_hooks() -> None:
    # torch asks for its hooks once, when it is imported.
    ctypes.CDLL(str(built("no_device")))


def _answer(torch: Any, capability: tuple[int, int], kernels: bool) -> None:
    about = SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        gcnArchName="",
        L2_cache_size=50 << 20,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=1 << 16,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10,
        total_memory=80 << 30,
        warp_size=32,
        **_DEVICES[capability],
    )
    state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": capability,
        "get_device_name": about.name,
        "get_device_properties": about,
        "get_rng_state": state,
        "set_rng_state": None,
        "is_current_stream_capturing": False,
        "set_device": None,
        "synchronize": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "_lazy_init": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **options: answer)
    torch.version.cuda = "12.8"
    if not kernels:
        return
    _quiet_inductor()

    import triton  # type: ignore[import-not-found]

    triton.runtime.driver.set_active(_Driver(torch, capability, about))


def _quiet_inductor() -> None:
    """Replace the functions that Inductor would run on the device: examples of patterns, constants,
    benchmarks."""
    from torch._inductor import config
    from torch._inductor.fx_passes import fuse_attention, pad_mm
    from torch._inductor.runtime import triton_helpers

    nothing: Any = lambda *args, **options: None  # noqa: E731
    fuse_attention._sfdp_init = nothing
    pad_mm._pad_mm_init = nothing
    triton_helpers.set_driver_to_gpu = nothing
    config.joint_graph_constant_folding = False
    config.force_disable_caches = True


class _Driver:
    """Answer the questions that Triton's NVIDIA driver asks libcuda."""

    def __init__(self, torch: Any, capability: tuple[int, int], about: Any) -> None:
        self.torch, self.capability = torch, capability
        asked = {
            "max_shared_mem": about.shared_memory_per_block_optin,
            "multiprocessor_count": about.multi_processor_count,
            "warpSize": about.warp_size,
            "max_num_regs": about.regs_per_multiprocessor,
        }
        self.utils = SimpleNamespace(get_device_properties=lambda device: asked)

    def get_current_target(self) -> Any:
        return target(self.capability)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        return self.torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return self.torch.cuda

    def is_active(self) -> bool:
        return True
