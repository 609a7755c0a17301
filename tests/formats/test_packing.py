"""Packed codes have their bits where the docstring says, and unpack to the same codes."""

import pytest
import torch
import torch._dynamo.testing
from blocks_oracle import packed as stream
from formats_oracle import ALL, all_codes, raw
from hypothesis import given
from hypothesis import strategies as st

from scaledtensor.errors import DTypeError, FormatError, ShapeError
from scaledtensor.formats import E2M1FN, E2M3FN, E3M2FN, E4M3FN, FORMATS, custom, pack, unpack
from scaledtensor.formats.layouts import packed_shape

OF_EVERY_WIDTH = [
    custom(1, 0, has_inf=False, has_nan=False),
    custom(2, 0, has_inf=False),
    custom(1, 2, has_inf=False, has_nan=False),
    custom(2, 2),
    custom(3, 3, signed_zero=False),
]
SHORT = [fmt for fmt in ALL if fmt.bits < 8] + OF_EVERY_WIDTH
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def test__the_first_element__is_in_the_lowest_bits():
    nibbles = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert pack(nibbles, E2M1FN).tolist() == [0x21, 0x03]
    sixes = torch.tensor([0b000001, 0b100010, 0b110011, 0b111111, 0b000001], dtype=torch.uint8)
    assert pack(sixes, E3M2FN).tolist() == [0b10000001, 0b00111000, 0b11111111, 0b00000001]


@pytest.mark.parametrize("fmt", SHORT, ids=repr)
def test__every_code_beside_every_code__comes_back(fmt):
    codes = torch.cartesian_prod(*[all_codes(fmt)] * 2)
    for rows in (codes, codes.t().contiguous(), codes.flatten()):
        packed = pack(rows, fmt)
        assert packed.dtype is torch.uint8
        assert torch.equal(unpack(packed, fmt, rows.shape), rows)


@pytest.mark.parametrize("fmt", SHORT, ids=repr)
@given(shape=shapes, seed=st.integers(0, 99))
def test__any_shape__packs_as_a_stream_of_bits(fmt, shape, seed):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.manual_seed(seed))
    packed = pack(codes, fmt)
    rows = codes.reshape(-1, codes.shape[-1]) if shape and codes.numel() else codes.view(-1, 1)
    if codes.numel():
        assert packed.view(-1, packed.shape[-1]).tolist() == [
            stream(row, fmt.bits) for row in rows.tolist()
        ]
    assert tuple(packed.shape) == packed_shape(fmt, shape)
    assert torch.equal(unpack(packed, fmt, shape), codes & (fmt.num_codes - 1))


@pytest.mark.parametrize("fmt", SHORT, ids=repr)
def test__strides_and_offsets__do_not_matter(fmt):
    codes = torch.randint(0, fmt.num_codes, (24, 40), dtype=torch.uint8)
    for view in (codes.t(), codes[1:, 3:], codes[::2, ::3], codes.flatten()[1:]):
        assert torch.equal(pack(view, fmt), pack(view.clone(), fmt))
        packed = torch.cat((torch.zeros(1, dtype=torch.uint8), pack(view, fmt).flatten()))[1:]
        packed = packed.view(packed_shape(fmt, view.shape))
        assert torch.equal(unpack(packed, fmt, view.shape), view)


@pytest.mark.parametrize("fmt", SHORT, ids=repr)
def test__a_large_tensor__packs_as_its_rows_do(fmt):
    codes = torch.randint(0, fmt.num_codes, (5, 1 << 16), dtype=torch.uint8)
    packed = pack(codes, fmt)
    assert torch.equal(packed, torch.stack([pack(row[: 1 << 16], fmt) for row in codes]))
    assert torch.equal(unpack(packed, fmt, codes.shape), codes)


@pytest.mark.parametrize("fmt", [fmt for fmt in ALL if fmt.bits >= 8], ids=repr)
def test__formats_without_unused_bits__pass_as_they_are(fmt):
    codes = torch.zeros(3, 5, dtype=fmt.storage_dtype)
    assert pack(codes, fmt) is codes
    assert unpack(codes, fmt, (3, 5)) is codes
    with pytest.raises(ShapeError):
        unpack(codes, fmt, (5, 3))


@pytest.mark.parametrize(
    "fmt",
    [E2M1FN, E3M2FN, *(pytest.param(fmt, marks=pytest.mark.slow) for fmt in OF_EVERY_WIDTH)],
    ids=repr,
)
def test__pack_and_unpack__eager_equals_compiled(fmt):
    torch._dynamo.reset()

    def run(codes, odd):
        packed, tail = pack(codes, fmt), pack(odd[1:], fmt)
        n = codes.shape[-1]
        return packed, tail, unpack(packed, fmt, (2, n)), unpack(tail, fmt, (odd.shape[0] - 1,))

    codes = torch.randint(0, 256, (2, 67), dtype=torch.uint8)
    compiled = torch.compile(run, fullgraph=True)
    for got, want in zip(compiled(codes, codes[1]), run(codes, codes[1]), strict=True):
        assert torch.equal(raw(got), raw(want))


def test__new_shapes__compile_once():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(pack, fullgraph=True, backend=counter, dynamic=True)
    for n in (16, 24, 400):
        compiled(torch.zeros(3, n, dtype=torch.uint8), E3M2FN)
    assert counter.frame_count == 1


def test__codes_of_another_dtype__are_refused():
    with pytest.raises(DTypeError, match=r"codes of E2M1FN are torch.uint8, got torch.float32"):
        pack(torch.zeros(4), E2M1FN)
    with pytest.raises(DTypeError, match="float8_e4m3fn"):
        pack(torch.zeros(4, dtype=torch.uint8), E4M3FN)
    with pytest.raises(DTypeError, match=r"packed codes of E2M3FN are torch.uint8"):
        unpack(torch.zeros(3, dtype=torch.int8), E2M3FN, (4,))


@pytest.mark.parametrize("size", [0, 1, 3])
def test__packed_sizes_that_do_not_fit__are_refused(size):
    with pytest.raises(ShapeError, match=r"packed in shape \(2,\); got"):
        unpack(torch.zeros(size, dtype=torch.uint8), E2M1FN, (3,))


def test__an_unknown_format__is_refused_with_the_known_ones():
    with pytest.raises(FormatError, match=", ".join(FORMATS)):
        pack(torch.zeros(3, dtype=torch.uint8), "e1m2")
    with pytest.raises(FormatError, match="unknown format None"):
        unpack(torch.zeros(3, dtype=torch.uint8), None, (6,))
