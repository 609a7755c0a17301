"""The same casts in other libraries. Their results may differ in overflow and ties.

To install one next to torch: `pip install --no-deps gfloat array-api-compat more-itertools`, `pip
install --no-deps torchao`, `pip install --no-deps unit-scaling docstring-parser einops`.
"""

from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.timing import Step
from scaledtensor.formats import Format

#: library, cast, path, what to time, bytes read and written per element
Peer = tuple[str, str, str, Step, int]

_GFLOAT = {
    "e4m3fn": "ocp_e4m3",
    "e5m2": "ocp_e5m2",
    "e8m0fnu": "ocp_e8m0",
    "e3m2fn": "ocp_e3m2",
    "e2m3fn": "ocp_e2m3",
    "e2m1fn": "ocp_e2m1",
    "bf16": "bfloat16",
    "fp16": "binary16",
}


def installed(library: str) -> bool:
    return find_spec(library) is not None


def steps(fmt: Format, x: Tensor, casts: Collection[str], paths: Collection[str]) -> Iterator[Peer]:
    """Return the casts of the installed libraries for float32 `x` and `fmt`."""
    for library, found in LIBRARIES.items():
        if installed(library):
            for cast, path, run, traffic in found(fmt, x):
                if cast in casts and path in paths:
                    yield library, cast, path, run, traffic


Found = Iterator[tuple[str, str, Step, int]]


def _ml_dtypes(fmt: Format, x: Tensor) -> Found:
    """`astype`, which does not saturate, and does not round to integers; CPU only."""
    if not x.is_cpu or fmt.ml_dtype is None or fmt.is_integer:
        return
    values = x.numpy()
    codes: NDArray[Any] = values.astype(fmt.ml_dtype)
    yield "encode", "eager", lambda: values.astype(fmt.ml_dtype), 4 + codes.itemsize
    yield "decode", "eager", lambda: codes.astype(np.float32), 4 + codes.itemsize
    yield "fake_quantize", "eager", lambda: values.astype(fmt.ml_dtype).astype(np.float32), 8


def _unit_scaling(fmt: Format, x: Tensor) -> Found:
    """`FPFormat`: IEEE-like biases, clips, ties toward zero."""
    if not fmt.signed or fmt.exponent_bits < 2:
        return
    formats = import_module("unit_scaling.formats")
    simulated = formats.FPFormat(fmt.exponent_bits, fmt.mantissa_bits, rounding="nearest")
    yield "fake_quantize", "eager", lambda: simulated.quantise(x), 8
    yield "fake_quantize", "compiled", _compiled(lambda: simulated.quantise(x)), 8


def _torchao(fmt: Format, x: Tensor) -> Found:
    """The saturating cast of its FP8 training; for FP6 and FP4 the codes of its MX formats."""
    if fmt.storage_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        utils = import_module("torchao.float8.float8_utils")

        def encode() -> Any:
            return utils.to_fp8_saturated(x, fmt.storage_dtype)

        def decode(codes: Tensor) -> Any:
            return codes.float()

    elif fmt.exponent_bits and fmt.bits <= 6:
        utils = import_module("torchao.prototype.custom_fp_utils")

        def encode() -> Any:
            return utils._f32_to_floatx_unpacked(x, fmt.exponent_bits, fmt.mantissa_bits)

        def decode(codes: Tensor) -> Any:
            return utils._floatx_unpacked_to_f32(codes, fmt.exponent_bits, fmt.mantissa_bits)

    else:
        return
    codes = encode()
    for path in ("eager", "compiled"):
        wrap: Callable[[Step], Step] = _compiled if path == "compiled" else lambda run: run
        yield "encode", path, wrap(encode), 5
        yield "decode", path, wrap(lambda: decode(codes)), 5
        yield "fake_quantize", path, wrap(lambda: decode(encode())), 8


def _gfloat(fmt: Format, x: Tensor) -> Found:
    if fmt.name not in _GFLOAT:
        return
    gfloat = import_module("gfloat")
    info = getattr(import_module("gfloat.formats"), f"format_info_{_GFLOAT[fmt.name]}")

    def run() -> Any:
        return gfloat.round_ndarray(info, x, sat=True)

    yield "fake_quantize", "eager", run, 8
    yield "fake_quantize", "compiled", _compiled(run), 8


def _compiled(run: Step) -> Step:
    return torch.compile(run, dynamic=False)


LIBRARIES = {
    "ml_dtypes": _ml_dtypes,
    "unit_scaling": _unit_scaling,
    "torchao": _torchao,
    "gfloat": _gfloat,
}
