"""Rounding by float32 sums and products equals `fake_quantize` at every mantissa, and keeps
infinities and NaNs. Compiled C++ gives the same bits, in vectors and one by one."""

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


def compiled(x: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    def cast(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.ops.scaledtensor.rounded(x, [], "", fmt.name, dtype)
        return made

    torch._dynamo.reset()
    made: torch.Tensor = torch.compile(cast, fullgraph=True, dynamic=False)(x)
    return made


@pytest.mark.parametrize("fmt", EIGHT_BITS, ids=str)
def test__compiled__every_16_bit_input(fmt: Format) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = every_16_bit(dtype)
        wide = torch.cat([x.float(), x[:3].float()])  # three elements remain after the vectors
        for given in (x, wide, wide[:5]):
            found = compiled(given, fmt, torch.float32)
            wanted = round_by_arithmetic(given, fmt)
            assert torch.equal(found.isnan(), wanted.isnan())
            assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("fmt", EIGHT_BITS, ids=str)
def test__compiled__mantissas_of_a_normal_and_of_a_subnormal_binade(fmt: Format) -> None:
    mantissas = torch.arange(0, 2**23, 7, dtype=torch.int32)
    least = round(torch.tensor(fmt.min_normal).log2().item())
    for exponent in (0, least - 1):
        x = (mantissas | (exponent + 127) << 23).view(torch.float32)
        assert torch.equal(compiled(x, fmt, torch.bfloat16), rounded(x, fmt).bfloat16())
