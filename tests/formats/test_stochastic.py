"""Stochastic rounding has its exact expectation, from its documented random words."""

import contextlib
from fractions import Fraction
from unittest import mock

import pytest
import torch
from formats_oracle import OWN, SHORT, raw

from scaledtensor import native
from scaledtensor.errors import DTypeError, FormatError, UnsupportedError
from scaledtensor.formats import (
    BF16,
    E2M1FN,
    E4M3FN,
    E5M2,
    E8M0FNU,
    FP32,
    INT4,
    MXINT8,
    custom,
    decode,
    encode,
    fake_quantize,
    random_key,
)
from scaledtensor.formats.stochastic import random_words
from scaledtensor.testing.reference import ladder, reference_code

SMALL = custom(3, 2, has_inf=False, has_nan=False)


def stochastic(x, fmt, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return encode(x, fmt, rounding="stochastic", generator=generator, **options)


@contextlib.contextmanager
def every_word(bits):
    """A stand-in for the generator of the casts in Python. It gives all words of this many random
    bits, in order."""

    def words(key, shape, start, kept):
        del key, kept
        index = torch.arange(start, start + shape.numel(), dtype=torch.int64)
        return (index << (32 - bits)).to(torch.int32).view(shape)

    with (
        mock.patch("scaledtensor.formats.bits.random_words", words),
        native.left_out(),
    ):
        yield


@pytest.mark.parametrize("overflow", ["saturate", "saturate_finite", "ieee"])
@pytest.mark.parametrize("fmt", [SMALL, E2M1FN, E5M2, E4M3FN, INT4, MXINT8, OWN[2]], ids=repr)
def test__over_all_random_words__each_code_comes_as_often_as_it_should(fmt, overflow):
    """A draw with 5 bits has 32 words, and all are tried: the chance is the fraction, cut to 5
    bits."""
    values = [float(v) for v in ladder(fmt)[:: max(1, len(ladder(fmt)) // 8)]]
    shares = (0, 1 / 32, 1 / 3, 0.5, 31 / 32)
    steps = {v: min(float(u) for u in ladder(fmt) if u > v) - v for v in values if v < fmt.max}
    points = [v + s * step for v, step in steps.items() for s in shares]
    points += [fmt.max, fmt.max * 1.01, fmt.max * 4, fmt.min_subnormal / 32]
    for value in torch.tensor([*points, *(-p for p in points)]).tolist():
        with every_word(5):
            got = raw(stochastic(torch.full((32,), value), fmt, overflow=overflow))
        draws = [Fraction(draw, 32) for draw in range(32)]
        want = [reference_code(value, fmt, "stochastic", overflow, draw) for draw in draws]
        assert got.tolist() == want, value


def test__the_mean_over_all_words__is_the_number_itself():
    x = torch.tensor([0.3, 1.1, 5.7, 0.01, -2.6]) * 64
    x = x.round() / 64  # 8 random bits can tell these fractions apart in these binades.
    for value in x.tolist():
        with every_word(12):
            got = decode(stochastic(torch.full((4096,), value), SMALL), SMALL)
        assert got.double().mean().item() == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, BF16, E2M1FN, MXINT8, OWN[6]], ids=repr)
def test__on_many_elements__the_chance_is_the_fraction(fmt, dtype):
    """Each mean lies within 5 standard deviations of a coin that goes up with chance `share`."""
    count = 1 << 16
    for share in (0.125, 0.5, 0.8125):
        for base, step in ((1.0, fmt.eps), (0.0, fmt.min_subnormal)):
            x = torch.full((count,), base + share * step, dtype=torch.float64).to(dtype)
            share_of_x = (x[0].double().item() - base) / step
            if not 0 < share_of_x < 1:
                continue  # The fraction is too fine for this dtype.
            up = (decode(stochastic(x, fmt), fmt, torch.float64) - base) / step
            assert set(up.unique().tolist()) <= {0.0, 1.0}
            bound = 5 * (share_of_x * (1 - share_of_x) / count) ** 0.5
            assert abs(up.mean().item() - share_of_x) < bound, (share, base)


def test__float64__is_told_apart_below_the_last_place_of_float32():
    """A value 2^-30 of a step above 1 rounds up once in 2^30: never in a million draws, sometimes
    in all."""
    x = torch.full((1 << 20,), 1 + E4M3FN.eps * (1 - 2**-40), dtype=torch.float64)
    assert decode(stochastic(x, E4M3FN), E4M3FN).unique().tolist() == [1 + E4M3FN.eps]
    x = torch.full((1 << 20,), 1 + E4M3FN.eps * 2**-40, dtype=torch.float64)
    assert decode(stochastic(x, E4M3FN), E4M3FN).unique().tolist() == [1.0]


def test__deep_below_the_smallest__is_unbiased_to_the_stated_bound():
    x = torch.full((1 << 22,), E4M3FN.min_subnormal * 2**-10)
    up = stochastic(x, E4M3FN).view(torch.uint8).float()
    assert up.max() == 1
    bound = 5 * (2**-10 / x.numel()) ** 0.5
    assert abs(up.mean().item() - 2**-10) < bound
    nothing = torch.full((1 << 12,), E4M3FN.min_subnormal * 2**-40)
    assert not stochastic(nothing, E4M3FN).view(torch.uint8).any()


@pytest.mark.parametrize("fmt", [*SHORT, *OWN], ids=repr)
def test__values_of_the_format__stay(fmt):
    values = fmt.values()
    values = values[values.isfinite()]
    for dtype in (torch.float32, torch.float64):
        codes = stochastic(values.to(dtype), fmt, overflow="ieee")
        assert torch.equal(raw(codes), raw(encode(values, fmt)))
    assert torch.equal(stochastic(values, FP32), values)


@pytest.mark.parametrize("fmt", [E4M3FN, BF16, MXINT8, E8M0FNU, OWN[6]], ids=repr)
def test__every_result__is_a_neighbour(fmt):
    x = torch.randn(1 << 15).double() * torch.randn(1 << 15).exp()
    x = x.abs() if not fmt.signed else x
    low = decode(encode(x, fmt, rounding="toward_zero"), fmt, torch.float64)
    got = fake_quantize(x, fmt, rounding="stochastic")
    assert (got.abs() >= low.abs()).all()
    for dtype in (torch.float64, torch.float32):
        again = decode(stochastic(x.to(dtype), fmt), fmt, torch.float64)
        inner = x.abs() < fmt.max
        assert ((again - x).abs() <= (x - low).abs().maximum(x.abs() * fmt.eps))[inner].all() or (
            (again - low).abs()[inner] <= (low.abs() * fmt.eps + fmt.min_subnormal)[inner]
        ).all()


def test__fewer_random_bits__cut_the_chance():
    """With 1 bit, a fraction below a half never rounds up, and others round up every second
    time."""
    x = torch.tensor([1.49, 1.5, 1.99]).repeat_interleave(1 << 12) * E2M1FN.min_subnormal * 2
    up = decode(stochastic(x, E2M1FN, random_bits=1), E2M1FN).view(3, -1)
    share = ((up - up.amin()) / 0.5).clamp(0, 1).mean(1)
    assert share[0] == 0 or share[0] < 0.6  # 1.49 has its own half steps below
    x = torch.full((1 << 12,), 1 + 0.49 * E4M3FN.eps)
    assert (decode(stochastic(x, E4M3FN, random_bits=1), E4M3FN) == 1).all()
    x = torch.full((1 << 14,), 1 + 0.99 * E4M3FN.eps)
    up = (decode(stochastic(x, E4M3FN, random_bits=1), E4M3FN) > 1).float().mean()
    assert abs(up - 0.5) < 0.03
    wide = (decode(stochastic(x.double(), E4M3FN, random_bits=1), E4M3FN) > 1).float().mean()
    assert abs(wide - 0.5) < 0.03


# --- where the words come from ---------------------------------------------------------------


def test__a_generator__is_all_that_decides():
    x = torch.randn(3, 50, 7)
    first = raw(stochastic(x, E4M3FN, seed=3))
    assert torch.equal(first, raw(stochastic(x, E4M3FN, seed=3)))
    assert not torch.equal(first, raw(stochastic(x, E4M3FN, seed=4)))
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(first, raw(encode(x, E4M3FN, rounding="stochastic", generator=generator)))
    assert not torch.equal(
        first, raw(encode(x, E4M3FN, rounding="stochastic", generator=generator))
    )
    key = random_key(torch.Generator().manual_seed(3))
    assert torch.equal(first, raw(encode(x, E4M3FN, rounding="stochastic", generator=key)))
    torch.manual_seed(5)
    default = raw(encode(x, E4M3FN, rounding="stochastic"))
    assert not torch.equal(default, raw(encode(x, E4M3FN, rounding="stochastic")))
    torch.manual_seed(5)
    assert torch.equal(default, raw(encode(x, E4M3FN, rounding="stochastic")))


def test__the_other_roundings__draw_nothing():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    encode(torch.randn(4, generator=torch.Generator()), E4M3FN)
    assert torch.equal(before, torch.get_rng_state())


def test__strides_and_pieces__do_not_change_the_draws():
    x = torch.randn(40, 1 << 13)  # The tensor is more than one piece.
    want = raw(stochastic(x, E4M3FN))
    assert torch.equal(raw(stochastic(x.t().contiguous().t(), E4M3FN)), want)
    assert torch.equal(raw(stochastic(x.view(5, 8, -1), E4M3FN)).view(40, -1), want)
    assert torch.equal(raw(stochastic(x[:7], E4M3FN)), want[:7])
    assert torch.equal(raw(stochastic(x[0, 0], E4M3FN)), want[0, 0])


def test__compiled__draws_the_same_numbers():
    torch._dynamo.reset()
    x = torch.randn(33, 65)

    def run(x, key):
        own = [encode(x, f, rounding="stochastic", generator=key) for f in (E4M3FN, MXINT8)]
        few = encode(x, E5M2, rounding="stochastic", generator=key, random_bits=3)
        wide = encode(x.double(), E4M3FN, rounding="stochastic", generator=key)
        return [*own, few, wide, fake_quantize(x, E4M3FN, rounding="stochastic")]

    key = random_key(torch.Generator().manual_seed(7))
    torch.manual_seed(11)
    want = run(x, key)
    torch.manual_seed(11)
    for a, b in zip(torch.compile(run, fullgraph=True)(x, key), want, strict=True):
        assert torch.equal(raw(a), raw(b))


def test__two_draws_in_one_graph__differ():
    torch._dynamo.reset()
    x = torch.full((4096,), 1.05)

    @torch.compile(fullgraph=True)
    def twice(x):
        return [encode(x, E4M3FN, rounding="stochastic").view(torch.uint8) for _ in range(2)]

    first, second = twice(x)
    assert not torch.equal(first, second)


def words(seed, count, start=0):
    key = random_key(torch.Generator().manual_seed(seed))
    return random_words(key, torch.Size([count]), start, 32).long() & 0xFFFFFFFF


def test__words__are_uniform_in_every_bit_and_byte():
    count = 1 << 20
    for seed in (0, 1, 12345):
        sample = words(seed, count)
        assert sample.unique().numel() == count  # This is a permutation of the counters.
        for bit in range(32):
            ones = (sample >> bit & 1).sum().item()
            assert abs(ones - count / 2) < 5 * (count / 4) ** 0.5
        for shift in (0, 8, 16, 24):
            seen = torch.bincount(sample >> shift & 255, minlength=256).double()
            chi = ((seen - count / 256) ** 2 / (count / 256)).sum().item()
            assert 255 - 5 * 510**0.5 < chi < 255 + 5 * 510**0.5


def test__words__of_neighbours_and_of_other_keys_are_unrelated():
    count = 1 << 18
    sample = words(7, count).double()
    unit = (sample - sample.mean()) / sample.std()
    for lag in (1, 2, 3, 4, 16, 64, 1024, 4096):
        correlation = (unit[:-lag] * unit[lag:]).mean().item()
        assert abs(correlation) < 5 / count**0.5, lag
    pairs = (words(7, count) >> 28) * 16 + (words(7, count, 1) >> 28)
    seen = torch.bincount(pairs, minlength=256).double()
    chi = ((seen - count / 256) ** 2 / (count / 256)).sum().item()
    assert chi < 255 + 5 * 510**0.5
    key = random_key(torch.Generator().manual_seed(7))
    for flip in (torch.tensor([1, 0]), torch.tensor([0, 1]), torch.tensor([1 << 30, 0])):
        other = random_words(key ^ flip.int(), torch.Size([count]), 0, 32).long() & 0xFFFFFFFF
        bits = (words(7, count) ^ other)[:, None] >> torch.arange(32) & 1
        share = bits.double().mean(0)
        assert (share - 0.5).abs().max() < 5 / (2 * count**0.5)
        assert abs((unit * (other.double() - 2**31) / 2**31 * 3**0.5).mean()) < 5 / count**0.5


def test__a_flipped_counter_bit__flips_half_of_the_word():
    """Every input bit flips half of the output bits (avalanche), for counters from the whole
    range."""
    key = random_key(torch.Generator().manual_seed(0))
    one = torch.Size([1])
    base = torch.randint(0, 1 << 30, (256,), generator=torch.Generator().manual_seed(1))
    for bit in range(0, 31, 5):
        pairs = [
            (random_words(key, one, s, 32), random_words(key, one, s ^ 1 << bit, 32))
            for s in base.tolist()
        ]
        changed = torch.tensor([bin((a ^ b).item() & 0xFFFFFFFF).count("1") for a, b in pairs])
        assert abs(changed.double().mean() - 16) < 5 * (8 / 256) ** 0.5


def test__bad_sources__are_refused():
    x = torch.zeros(2)
    with pytest.raises(DTypeError, match=r"random_key\(\) \(two int32\), got a tensor of torch.fl"):
        encode(x, E4M3FN, rounding="stochastic", generator=torch.zeros(2))
    for bits in (0, 33, 2.0, True):
        with pytest.raises(FormatError, match="random_bits is 1 to 32, or None"):
            encode(x, E4M3FN, rounding="stochastic", random_bits=bits)
    with pytest.raises(UnsupportedError, match="cast at most 2\\^31 - 1 at a time"):
        encode(torch.empty(1, device="meta").expand(1 << 31), E4M3FN, rounding="stochastic")
