"""The dtype that matrix products are computed in.

Every value of an 8-bit format is a bfloat16 and a float32 value, and products of both accumulate in
float32. So the emulated product of two operands means the same in either dtype, and the machine
decides which one it multiplies fast:

    device                                              dtype      asked of
    CPU, x86, with AMX                                  bfloat16   torch.cpu.get_capabilities
    CPU, AMD, with AVX512_BF16                          bfloat16   torch.cpu.get_capabilities
    CPU, Intel, with AVX512_BF16 alone                  float32    torch.cpu.get_capabilities
    CPU, x86, of others, with AVX512_BF16 alone         measured   one product of each, once
    CPU, x86, with neither, or held below by the        float32    torch.cpu.get_capabilities
    environment
    other CPUs (ARM, Apple)                             measured   one product of each, once
    CUDA, compute capability 8.0 and later; ROCm        bfloat16   torch.cuda
    CUDA, earlier                                       float32    torch.cuda
    other devices                                       bfloat16

On an AVX2 CPU a bfloat16 product takes 6 to 60 times as long as a float32 one, on an EPYC with
AVX512_BF16 0.4 times as long (`python -m benchmarks.linear`). On a Xeon whose virtual machine shows
AVX512_BF16 and hides AMX it takes 1.9 times as long: AVX512_BF16 alone does not decide. A measured
product would, but beside other work it finds now one dtype and now the other, and the processes of
one training have to agree.

`products_in` and the environment variable SCALEDTENSOR_PRODUCTS override the choice. Float16
operands are always multiplied in float32, since sums of theirs leave the range of float16.
"""

import os
import threading
import time
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from scaledtensor.errors import HardwareError
from scaledtensor.setting import Setting

__all__ = ["Choice", "Name", "choice", "multiplied", "product_dtype", "products_in", "state"]

Name = Literal["auto", "bfloat16", "float32"]

#: The environment variable that overrides the choice.
VARIABLE = "SCALEDTENSOR_PRODUCTS"

#: Values of ONEDNN_MAX_CPU_ISA under which oneDNN multiplies without bfloat16 units.
_ISA_WITHOUT = (
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"),
    *("AVX512_CORE", "AVX512_CORE_VNNI"),
)


class Choice(NamedTuple):
    """What products of a device are computed in, and what that was decided by."""

    dtype: torch.dtype
    reason: str


class products_in(Setting):  # noqa: N801 - reads as a verb, like torch.no_grad
    """Which dtype emulated products are computed in: a setting, and a context manager that restores
    the one before.

    Args:
        name: "float32", "bfloat16", or "auto", which chooses by the device (`sct.hardware()`).

    Code that `torch.compile` has compiled keeps the dtype that it was compiled with.

    Raises:
        HardwareError: `name` is none of the three.
    """

    _now: Name = "auto"

    def __init__(self, name: Name) -> None:
        super().__init__(_checked(name, "products_in"))


def _checked(name: str, source: str) -> Name:
    for known in get_args(Name):
        if name == known:
            return known  # type: ignore[no-any-return]
    allowed = ", ".join(repr(known) for known in get_args(Name))
    raise HardwareError(f"{source} takes one of {allowed}; got {name!r}")


_choices: dict[tuple[str, int | None], Choice] = {}


def product_dtype(device: torch.device) -> torch.dtype:
    """The dtype of emulated products on `device`: torch.bfloat16 or torch.float32."""
    return choice(device).dtype


def choice(device: torch.device) -> Choice:
    """The same, and what it was decided by."""
    if products_in._now != "auto":
        return Choice(getattr(torch, products_in._now), "chosen by scaledtensor.products_in")
    key = (device.type, device.index)
    found = _choices.get(key)
    if found is None:
        found = _choices[key] = _chosen(device)
    return found


def state() -> str:
    """What compiled code on this machine depends on, for the keys of caches."""
    return str(product_dtype(torch.device("cpu")))


def multiplied(*operands: Tensor) -> tuple[Tensor, ...]:
    """Operands of one product, in the dtype that it is computed in: bfloat16 where all are and the
    device multiplies it fast, float32 elsewhere."""
    dtype = operands[0].dtype
    if dtype == torch.bfloat16 and product_dtype(operands[0].device) != torch.bfloat16:
        dtype = torch.float32
    for q in operands:
        if q.dtype is not dtype or dtype not in (torch.bfloat16, torch.float32):
            return tuple(q.float() for q in operands)
    return operands


def _chosen(device: torch.device) -> Choice:
    named = os.environ.get(VARIABLE)
    if named is not None and _checked(named, f"the environment variable {VARIABLE}") != "auto":
        return Choice(getattr(torch, named), f"chosen by {VARIABLE}")
    if device.type == "cuda":
        return _of_cuda(device)
    if device.type != "cpu":
        return Choice(torch.bfloat16, f"what {device.type} devices multiply is not asked")
    facts = torch.cpu.get_capabilities()
    if facts.get("architecture") not in ("x86_64", "amd64"):
        return _of_probe(*_probed())
    found = _of_x86(facts, torch.backends.cpu.get_cpu_capability(), os.environ)
    return found or _of_probe(*_probed(), f"the CPU has {_ALONE}, and ")


def _of_cuda(device: torch.device) -> Choice:
    if torch.version.hip is not None:
        return Choice(torch.bfloat16, "ROCm devices multiply bfloat16")
    major, minor = torch.cuda.get_device_capability(device)
    has = "has" if major >= 8 else "has no"
    dtype = torch.bfloat16 if major >= 8 else torch.float32
    return Choice(dtype, f"compute capability {major}.{minor} {has} bfloat16 units")


def _of_x86(
    facts: Mapping[str, object], capability: str, environment: Mapping[str, str]
) -> Choice | None:
    """The choice that the facts decide. It is None for AVX512_BF16 without AMX on a CPU of unknown
    make: there one product of each dtype has to be timed."""
    units = [name for name in ("amx_bf16", "avx512_bf16") if facts.get(name)]
    if not units:
        return Choice(torch.float32, "the CPU has neither AVX512_BF16 nor AMX")
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return Choice(torch.float32, "this build of torch has no oneDNN, which uses bfloat16 units")
    limit = environment.get("ONEDNN_MAX_CPU_ISA", environment.get("DNNL_MAX_CPU_ISA", "ALL"))
    if limit.upper() in _ISA_WITHOUT:
        return Choice(torch.float32, f"ONEDNN_MAX_CPU_ISA={limit} leaves the bfloat16 units out")
    if not capability.startswith(("AVX512", "AMX")):
        return Choice(torch.float32, f"torch runs with the CPU capability {capability}")
    if "amx_bf16" in units:
        return Choice(torch.bfloat16, "the CPU has AMX")
    maker = str(facts.get("cpu_name", "")).partition(" ")[0]
    dtype = _MAKERS.get(maker)
    return None if dtype is None else Choice(dtype, f"an {maker} CPU that has {_ALONE}")


_ALONE = "AVX512_BF16 without AMX"

#: What CPUs with AVX512_BF16 alone multiply faster, by the first word of torch's name for them.
_MAKERS = {"AMD": torch.bfloat16, "Intel": torch.float32}


def _of_probe(bfloat16: float, float32: float, facts: str = "") -> Choice:
    """From the seconds that one product takes in each."""
    dtype = torch.bfloat16 if bfloat16 < float32 else torch.float32
    ratio = bfloat16 / max(float32, 1e-9)
    took = f"a bfloat16 product took {ratio:.2g} times as long as a float32 one"
    return Choice(dtype, facts + took)


#: A product of this size takes a fraction of a millisecond where the dtype has units, and 40 ms
#: where torch multiplies one number after another.
_PROBE, _ROUNDS = 256, 5


def _probed() -> tuple[float, float]:
    """Seconds of one product in bfloat16 and in float32: the least of some rounds, interleaved.

    In a thread of its own: modes, as of a tracer that asks, are a thread's.
    """
    least = {torch.bfloat16: float("inf"), torch.float32: float("inf")}

    def measure() -> None:
        with torch.inference_mode():
            operands = {dtype: torch.ones(_PROBE, _PROBE, dtype=dtype) for dtype in least}
            for _ in range(_ROUNDS):
                for dtype, x in operands.items():
                    start = time.perf_counter()
                    x @ x
                    least[dtype] = min(least[dtype], time.perf_counter() - start)

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    return least[torch.bfloat16], least[torch.float32]
