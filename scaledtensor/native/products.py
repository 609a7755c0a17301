"""Products of float rows with rows of codes: the functions of `products.cpp`.

Every sum has one order of additions, which the source states. So an element of a result depends
on its two rows alone. It has the same bits for every number of rows, threads and CPU, in prefill
and in decoding, and for a weight in codes and the same values in float32.

The functions read memory, so they are for eager code. Under `torch.compile` a caller wraps them in
an operator of its own, whose fake result is `x.new_empty(*x.shape[:-1], N)`.
"""

import ctypes
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from scaledtensor import native
from scaledtensor.errors import ShapeError

__all__ = ["Prepared", "coded_product", "decoder_of", "dot_rows", "prepared"]


class Codes(Protocol):
    """The facts about a format that this module reads; `formats.Format` has them."""

    def __hash__(self) -> int: ...
    @property
    def bits(self) -> int: ...
    @property
    def exponent_bits(self) -> int: ...
    @property
    def mantissa_bits(self) -> int: ...
    @property
    def bias(self) -> int: ...
    @property
    def specials(self) -> Any: ...
    @property
    def storage_dtype(self) -> torch.dtype: ...
    def value(self, code: int, /) -> float: ...


class _Product(ctypes.Structure):
    """The struct `Product` of the source.

    `table` has the values of codes of at most 8 bits. `block` is 0 if a scale multiplies sums. The
    scales of the weight's row n start at `scale + n // rows * scale_row`.
    """

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scale", "table", "y")),
        *((name, ctypes.c_int64) for name in ("batches", "m", "n", "k")),
        *((name, ctypes.c_int64) for name in ("x_row", "x_batch", "w_row", "w_batch")),
        *((name, ctypes.c_int64) for name in ("block", "rows", "scale_row")),
        *((name, ctypes.c_int32) for name in ("kind", "bits", "half", "scale_kind")),
        ("whole", ctypes.c_float),
    )


_FP32, _BF16, _E4M3, _E5M2, _INT8, _FOUR, _E3M2, _E2M3, _TABLE = range(9)
_FLOATS = {torch.float32: _FP32, torch.bfloat16: _BF16}
#: (exponent bits, mantissa bits, bias, special values) of formats with a decoder of their own.
_KINDS = {
    (4, 3, 7, "nan_only"): _E4M3,
    (5, 2, 15, "ieee"): _E5M2,
    (0, 7, -6, "integer"): _INT8,
    (3, 2, 3, "none"): _E3M2,
    (2, 3, 1, "none"): _E2M3,
}
_SCALES = {torch.float32: 1, torch.float8_e8m0fnu: 2, torch.float8_e4m3fn: 3}
_SMALLEST_BLOCK = 16


def coded_product(
    x: Tensor,
    codes: Tensor,
    fmt: Codes,
    scale: Tensor | None = None,
    block: int = 0,
    whole: Tensor | float = 1.0,
    shape: tuple[int, int] | None = None,
    rows: int = 1,
) -> Tensor | None:
    """Return `x @ W.T` for a weight W of `shape` (N, K) with the values code * scale * whole.

    The sums are float32, in the order that `products.cpp` states. The result has no gradient.

    Args:
        x: (M, K), float32 or bfloat16, contiguous. The result is (M, N) in the same dtype.
        codes: The codes of W, row by row, as `formats.pack` stores them; contiguous.
        fmt: The format of the codes: FP32, BF16, or any format of at most 8 bits.
        scale: float32, float8_e8m0fnu or float8_e4m3fn, contiguous. With `block` 0, one number,
            or one for each row of W; it multiplies a sum: y = sum * (scale * whole). With a
            `block`, one number for each block, (N, ceil(K / block)); it multiplies the values:
            w = code * scale, rounded to float32, and y = sum * whole. None stands for 1.
        block: The number of consecutive elements of a row that share a scale: a power of two from
            16 on, or any number from K on. 0 if rows have one scale, or the tensor has one.
        whole: One more scale for the tensor, as NVFP4 has; one number.
        shape: (N, K). Defaults to the rows of `codes` and the columns of `x`.
        rows: The number of consecutive rows of W that share their scales; 128 for squares of 128.

    Returns:
        The product. None if there is no C++ library, or if a dtype, a device, a layout or
        `block` is none of these. The caller then multiplies by PyTorch's operators.

    Raises:
        ShapeError: The shapes of `x`, the codes and the scales contradict each other.
    """
    if not _reads(x, contiguous=True) or x.dtype not in _FLOATS:
        return None
    if shape is None:
        shape = codes.shape[0], x.shape[-1]
    made = prepared(codes, fmt, scale, block, whole, shape, rows)
    return None if made is None else made(x)


class Prepared:
    """A weight of `coded_product` whose arguments are checked: a call has only the input to check.

    It reads the memory of the codes and the scales, so it is valid as long as they are there
    (`reads`), and as long as `whole` has the same value.
    """

    def __init__(self, call: "_Product", held: tuple[Tensor, ...]) -> None:
        self._call = call
        self._held = held  # keeps the memory
        self._places = tuple(t.data_ptr() for t in held)

    def reads(self, *held: Tensor | None) -> bool:
        """Whether it reads these codes and these scales."""
        return self._places == tuple(t.data_ptr() for t in held if t is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """The product with `x`, (M, K) in float32 or bfloat16, contiguous, of this process.

        Raises:
            ShapeError: `x` is of another shape.
        """
        call = _Product.from_buffer_copy(self._call)
        if x.dim() != 2 or x.shape[1] != call.k:
            raise ShapeError(
                f"a product with a weight of shape {(call.n, call.k)} takes x of shape "
                f"(M, {call.k}); got {tuple(x.shape)}"
            )
        y = torch.empty(x.shape[0], call.n, dtype=x.dtype, device="cpu")
        call.x, call.y, call.m = x.data_ptr(), y.data_ptr(), x.shape[0]
        call.half = x.dtype is torch.bfloat16
        _run(call, y)
        return y


def prepared(
    codes: Tensor,
    fmt: Codes,
    scale: Tensor | None,
    block: int,
    whole: Tensor | float,
    shape: tuple[int, int],
    rows: int = 1,
) -> Prepared | None:
    """Check the weight of a `coded_product` once for many calls. The arguments, and the reasons
    for None and for errors, are as `coded_product` has them."""
    if not _reads(codes, contiguous=True) or codes.dtype not in _dtypes(fmt):
        return None
    if native.library() is None:
        return None
    n, k = shape
    row = -(-k * fmt.bits // 8)
    if codes.numel() * codes.element_size() != n * row:
        raise ShapeError(
            f"a product takes {n * row} bytes of codes for a weight of shape {(n, k)}; got "
            f"{codes.numel() * codes.element_size()} bytes"
        )
    blocks = -(-k // block) if block else 1
    if block and blocks > 1 and (block < _SMALLEST_BLOCK or block & (block - 1)):
        return None
    if block and scale is not None and fmt.bits > 8:
        return None
    kind_of_scale = scale_row = 0
    if scale is not None:
        if not _reads(scale, contiguous=True) or scale.dtype not in _SCALES:
            return None
        kind_of_scale = _SCALES[scale.dtype]
        of_tensor = not block and scale.numel() == 1
        wanted = 1 if of_tensor else -(-n // rows) * blocks
        if scale.numel() != wanted:
            raise ShapeError(
                f"a weight of shape {(n, k)} with blocks of {(rows, block or k)} elements has "
                f"{wanted} scales; got shape {tuple(scale.shape)}"
            )
        scale_row = 0 if of_tensor else blocks
    kind, table = decoder_of(fmt)
    call = _Product(
        *(None, codes.data_ptr(), None if scale is None else scale.data_ptr(), table, None),
        *(1, 0, n, k),
        *(k, 0, row, 0),
        *(0 if scale is None else block, rows, scale_row),
        *(kind, fmt.bits, False, kind_of_scale),
        float(whole),
    )
    return Prepared(call, (codes,) if scale is None else (codes, scale))


def dot_rows(a: Tensor, b: Tensor) -> Tensor | None:
    """Return `a @ b.mT` with the order of additions of `coded_product`.

    Args:
        a: (B, M, K), float32 or bfloat16. The elements of a row are adjacent in memory. The
            result is (B, M, N) in the same dtype; its sums are float32.
        b: (B, N, K), as `a`.

    Returns:
        The product. None if there is no C++ library, or for a dtype, a device or a layout that is
        none of these. The result has no gradient.

    Raises:
        ShapeError: `a` and `b` are not two such stacks of matrices.
    """
    if not (_reads(a) and _reads(b)) or a.dtype not in _FLOATS or b.dtype not in _FLOATS:
        return None
    if a.dim() != 3 or b.dim() != 3 or a.shape[::2] != b.shape[::2]:
        raise ShapeError(
            f"dot_rows takes (B, M, K) and (B, N, K); got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    (batches, m, k), n = a.shape, b.shape[1]
    if not all(x.stride(2) == 1 or k <= 1 for x in (a, b)) or native.library() is None:
        return None
    y = torch.empty(batches, m, n, dtype=a.dtype, device="cpu")
    size = b.element_size()
    call = _Product(
        *(a.data_ptr(), b.data_ptr(), None, None, y.data_ptr()),
        *(batches, m, n, k),
        *(a.stride(1), a.stride(0), b.stride(1) * size, b.stride(0) * size),
        *(0, 1, 0),
        *(_FLOATS[b.dtype], 8 * size, a.dtype is torch.bfloat16, 0),
        1.0,
    )
    _run(call, y)
    return y


def _run(call: _Product, y: Tensor) -> None:
    if y.numel():
        native.library().scaledtensor_product(ctypes.byref(call), torch.get_num_threads())


def _reads(x: Tensor, contiguous: bool = False) -> bool:
    """Whether `x` is memory of this process. Its size does not count: results keep their bits
    whether the library was built before or not."""
    return native.is_memory(x) and (not contiguous or x.is_contiguous())


def _dtypes(fmt: Codes) -> tuple[torch.dtype, ...]:
    if fmt.bits < 8:
        return (torch.uint8,)
    if fmt.bits == 8 or fmt.storage_dtype in _FLOATS:
        return (fmt.storage_dtype,)
    return ()


@cache
def decoder_of(fmt: Codes) -> tuple[int, int | None]:
    """The decoder of a format, and the address of the values of its codes."""
    if fmt.storage_dtype in _FLOATS:
        return _FLOATS[fmt.storage_dtype], None
    facts = fmt.exponent_bits, fmt.mantissa_bits, fmt.bias, fmt.specials.value
    kind = _KINDS.get(facts, _FOUR if fmt.bits == 4 else _TABLE)
    values = (ctypes.c_float * (1 << fmt.bits))(*map(fmt.value, range(1 << fmt.bits)))
    _TABLES.append(values)
    return kind, ctypes.addressof(values)


_TABLES: list[ctypes.Array[ctypes.c_float]] = []
"""The tables of `decoder_of`, which stay in memory."""
