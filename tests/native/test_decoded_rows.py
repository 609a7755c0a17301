"""The rows of a cache are decoded in one pass, to the bits of PyTorch's operators."""

from typing import Any

import pytest
import torch
from assertions import assert_each
from torch import Tensor

import scaledtensor as sct
from scaledtensor import native
from scaledtensor.quantization import cache_codes

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.status())

FORMATS = ("fp32", "bf16", "fp16", "e4m3fn", "e4m3fnuz", "e5m2", "int8", "e3m2fn", "e2m3fn",
           "e2m1fn", "int4")  # fmt: skip


def bits(x: Tensor) -> Tensor:
    """The bits of the numbers; every NaN counts as the same NaN."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.where(x.isnan(), torch.nan, x).view(kind)


def results(
    options: dict[str, Any], dim: int, dtype: torch.dtype, special: bool, batch: int
) -> list[Tensor]:
    """The results of a prompt, of steps, and after a new order, removed tokens, and reads."""
    rng = torch.Generator().manual_seed(dim)
    k, v = (torch.randn(batch, 3, 90, dim, generator=rng) for _ in "kv")
    if special:
        for x in (k, v):
            x[0, 0, 7, 3], x[0, 1, 60, 2], x[-1, 2, 80, 1] = float("nan"), float("inf"), -1e30
            x[:, 1, 20:50] = 0
    k, v = k.to(dtype), v.to(dtype)
    cache, found = sct.KVCache(**options), []
    for a, b in ((0, 65), (65, 66), (66, 67), (67, 80)):
        found += cache.update(0, k[:, :, a:b], v[:, :, a:b])
    cache.reorder(torch.arange(batch).flip(0))
    cache.crop(-3)
    found += cache.update(0, k[:, :, 80:81], v[:, :, 80:81])
    layer = cache.layers[0]
    return [*found, *(x for x in (layer.keys, layer.values) if x is not None)]


def test__rows__have_the_bits_of_operators() -> None:
    def check(case: tuple[dict[str, Any], int, torch.dtype, bool, int]) -> None:
        got = results(*case)
        with native.left_out():
            want = results(*case)
        assert len(got) == 12
        for x, y in zip(got, want, strict=True):
            assert x.dtype is case[2]
            assert x.is_contiguous()
            assert int((bits(x) != bits(y)).sum()) == 0

    limits: list[dict[str, Any]] = [{}, {"max_tokens": 90}, {"window": 30}]
    cases = [
        ({"format": f} | limit, dim, torch.float32, dim == 64, 2)
        for f in FORMATS
        for limit in limits
        for dim in (64, 24)
    ]
    for f in ("e4m3fn", "int8", "e2m1fn"):
        more = [{"format": f, "scale": s} for s in ("unit", "amax", 0.37)]
        cases += [(options, 80, torch.bfloat16, True, 1) for options in more]
        cases += [({"format": f}, 40, t, False, 3) for t in (torch.float16, torch.float64)]
        cases += [({"format": f, "scale": "amax", "block": 4}, 64, torch.float32, True, 2)]
    assert_each(cases, check)


def test__an_update__takes_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these formats goes through PyTorch's operators."""

    def fail(*_: Any) -> None:
        raise AssertionError("decoded by operators")

    monkeypatch.setattr(cache_codes.Store, "_decode", fail)
    x = torch.randn(1, 2, 40, 64)
    for f in FORMATS:
        if f != "fp16":
            for limit in ({}, {"max_tokens": 60}, {"window": 20}):
                cache = sct.KVCache(f, **limit)
                for _ in range(2):
                    cache.update(0, x[:, :, :20], x[:, :, :20])
