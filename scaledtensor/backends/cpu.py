"""CPUs.

Emulated products are computed in the dtype that the CPU multiplies fast:

    CPU                                                 dtype      decided by
    x86, with AMX                                       bfloat16   torch.cpu.get_capabilities
    AMD, with AVX512_BF16                               bfloat16   torch.cpu.get_capabilities
    Intel, with AVX512_BF16 alone                       float32    torch.cpu.get_capabilities
    x86 of other makers, with AVX512_BF16 alone         measured   one product of each, once
    x86, with neither, or limited by the environment    float32    torch.cpu.get_capabilities
    others (ARM, Apple)                                 measured   one product of each, once

On an AVX2 CPU a bfloat16 product takes 6 to 60 times as long as a float32 product, on an EPYC with
AVX512_BF16 0.4 times as long (`python -m benchmarks.linear`). On a Xeon whose virtual machine shows
AVX512_BF16 and hides AMX it takes 1.9 times as long, so AVX512_BF16 alone does not decide. A
measurement would decide, but beside other work it finds now one dtype and now the other, and all
processes of one training have to agree.
"""

import os
import threading
import time
from collections.abc import Mapping

import torch

from scaledtensor.backends.backend import Backend, Choice

__all__ = ["CPU"]

#: Values of ONEDNN_MAX_CPU_ISA under which oneDNN multiplies without bfloat16 units.
_ISA_WITHOUT = (
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"),
    *("AVX512_CORE", "AVX512_CORE_VNNI"),
)

_ALONE = "AVX512_BF16 without AMX"

#: The dtype that CPUs with AVX512_BF16 alone multiply faster, by the first word of their name.
_MAKERS = {"AMD": torch.bfloat16, "Intel": torch.float32}


def _products(device: torch.device) -> Choice:
    facts = torch.cpu.get_capabilities()
    if facts.get("architecture") not in ("x86_64", "amd64"):
        return _of_probe(*_probed())
    found = _of_x86(facts, torch.backends.cpu.get_cpu_capability(), os.environ)
    return found or _of_probe(*_probed(), f"the CPU has {_ALONE}, and ")


def _of_x86(
    facts: Mapping[str, object], capability: str, environment: Mapping[str, str]
) -> Choice | None:
    """Return the choice that the facts decide. It is None for AVX512_BF16 without AMX on a CPU of
    an unknown maker, where one product of each dtype has to be timed."""
    units = [name for name in ("amx_bf16", "avx512_bf16") if facts.get(name)]
    if not units:
        return Choice(torch.float32, "the CPU has neither AVX512_BF16 nor AMX")
    if not torch.backends.mkldnn.is_available():
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


def _of_probe(bfloat16: float, float32: float, facts: str = "") -> Choice:
    """Return the choice by the seconds that one product takes in each dtype."""
    dtype = torch.bfloat16 if bfloat16 < float32 else torch.float32
    ratio = bfloat16 / max(float32, 1e-9)
    took = f"a bfloat16 product took {ratio:.2g} times as long as a float32 one"
    return Choice(dtype, facts + took)


#: A product of this size takes a fraction of a millisecond in a dtype that has units, and 40 ms if
#: torch multiplies one number after another.
_PROBE, _ROUNDS = 256, 5


def _probed() -> tuple[float, float]:
    """Return the seconds of one product in bfloat16 and in float32: the least of some rounds,
    interleaved. They run in a thread of their own, because a tracer's modes belong to its thread.
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


def _describe(device: torch.device) -> str:
    facts = torch.cpu.get_capabilities()
    model = facts.get("cpu_name") or facts.get("architecture") or "CPU"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{model}, {capability}, {torch.get_num_threads()} threads"


CPU = Backend(
    "cpu",
    host=True,
    # Means over volumes, and antialiasing.
    lacks_bfloat16=frozenset(
        ("aten::avg_pool3d", "aten::_upsample_bilinear2d_aa", "aten::_upsample_bicubic2d_aa")
    ),
    # The bfloat16 backward takes 4 times as long at 64 tokens and 0.8 times at 1024 (measured), and
    # rounds more.
    float32_attention=True,
    mixed_norms=True,
    fused_rms_norm=False,
    flash=lambda device: "_scaled_dot_product_flash_attention_for_cpu",
    products=_products,
    writes_cpp=True,
    # Inductor's C++ has no vectors of 16-bit integers.
    compiled_casts=(torch.bfloat16, torch.float16),
    devices=lambda: (torch.device("cpu"),),
    describe=_describe,
)
