"""Rounding by float32 sums and products equals `fake_quantize` at every mantissa, and keeps
infinities and NaNs."""

import pytest
import torch
from formats_oracle import every_16_bit

from scaledtensor.formats import E4M3FN, E4M3FNUZ, E5M2, Format, fake_quantize
from scaledtensor.formats.rounding import round_by_arithmetic

EIGHT_BITS = [E4M3FN, E5M2, E4M3FNUZ]


def rounded(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    return fake_quantize(x, fmt, overflow="saturate_finite")


@pytest.mark.parametrize("fmt", EIGHT_BITS, ids=str)
def test__every_mantissa__in_a_normal_a_subnormal_and_the_last_binade(fmt: Format) -> None:
    """Above the subnormals only the mantissa matters, so one binade proves all others."""
    mantissas = torch.arange(2**23, dtype=torch.int32)
    least = round(torch.tensor(fmt.min_normal).log2().item())
    most = round(torch.tensor(fmt.max).log2().floor().item())
    for exponent in (0, most, most + 1, least, least - 1, least - fmt.mantissa_bits - 1):
        x = (mantissas | (exponent + 127) << 23).view(torch.float32)
        assert torch.equal(round_by_arithmetic(x, fmt), rounded(x, fmt)), exponent


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", EIGHT_BITS, ids=str)
def test__every_16_bit_input(fmt: Format, dtype: torch.dtype) -> None:
    x = every_16_bit(dtype).float()
    torch.testing.assert_close(
        round_by_arithmetic(x, fmt), rounded(x, fmt), rtol=0, atol=0, equal_nan=True
    )
