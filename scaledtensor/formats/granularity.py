"""Which elements of a tensor share a scale.

A granularity is a frozen record. What follows from it for a tensor of some shape are pure
functions: the shape of its scales, the scales expanded to its elements, and the tensor seen block
by block.

Every granularity cuts each dimension into equal blocks, of which the last may be ragged:

                        blocks                          shape of the scales
    PerTensor()         one                             ()
    PerAxis(dim)        one for each index of `dim`     1 except in `dim`: they broadcast
    PerBlock((1, 32))   over the last dimensions        ceil(size / block) in each dimension
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import register_constant

from scaledtensor.errors import ShapeError


@dataclass(frozen=True)
class PerTensor:
    """One scale for the tensor."""


@dataclass(frozen=True)
class PerAxis:
    """One scale for each index of dimension `dim`, which may count from the end.

    Of a matrix, PerAxis(0) gives one scale per row and PerAxis(1) one per column.
    """

    dim: int

    def __post_init__(self) -> None:
        if not _is_int(self.dim):
            raise ShapeError(f"PerAxis takes one dimension, an int; got {self.dim!r}")


@dataclass(frozen=True)
class PerBlock:
    """One scale for each block of the last `len(block)` dimensions; the others are cut into ones.

    (1, 32) or (32,) are the blocks of OCP MX, (128, 128) square ones, (1, -1) rows: -1 is all of a
    dimension. The last block of a dimension may be shorter. A tensor of fewer dimensions has, to
    its blocks, leading dimensions of size 1.
    """

    block: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.block, tuple | list):
            raise ShapeError(f"PerBlock takes a tuple of sizes, as (1, 32); got {self.block!r}")
        object.__setattr__(self, "block", tuple(self.block))
        if not self.block or not all(_is_int(n) and (n > 0 or n == -1) for n in self.block):
            raise ShapeError(
                "a block has one or more sizes, positive ints or -1 for all of a dimension; got "
                f"{self.block!r}"
            )


Granularity = PerTensor | PerAxis | PerBlock

# To torch.compile they are constants, not sources of symbolic integers.
for _record in (PerTensor, PerAxis, PerBlock):
    register_constant(_record)


def as_granularity(given: "Granularity | int | Sequence[int]") -> Granularity:
    """A granularity as it is; a block size, or the sizes of a block, as `PerBlock`.

    Raises:
        ShapeError: it is none of these.
    """
    if isinstance(given, Granularity):
        return given
    if isinstance(given, tuple | list):
        return PerBlock(tuple(given))
    if isinstance(given, int) and _is_int(given) and given > 0:
        return PerBlock((given,))
    raise ShapeError(
        "a granularity is PerTensor(), PerAxis(dim) or PerBlock(sizes), a block size as 32 or the"
        f" sizes of a block as (1, 32); got {given!r}"
    )


def scale_shape(granularity: Granularity, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales of a tensor of `shape`.

    Raises:
        ShapeError: the tensor has no such dimension.
    """
    if isinstance(granularity, PerTensor):
        return ()
    return tuple(count for count, _ in _cuts(granularity, shape))


def expand_scale(scale: Tensor, granularity: Granularity, shape: Sequence[int]) -> Tensor:
    """The scale of each element, of the given `shape`; a view where broadcasting is enough.

    Raises:
        ShapeError: `scale` does not have the shape of the scales of such a tensor.
    """
    check_scale_shape(scale, granularity, shape)
    if not isinstance(granularity, PerBlock):
        return scale.expand(tuple(shape))
    cuts = _cuts(granularity, shape)
    blocks = beside_blocks(scale, granularity, shape).expand(_interleaved(cuts))
    return from_blocks(blocks, granularity, shape)


def check_scale_shape(scale: Tensor, granularity: Granularity, shape: Sequence[int]) -> None:
    """Raises ShapeError unless `scale` has the shape of the scales of a tensor of `shape`."""
    wanted = scale_shape(granularity, shape)
    if tuple(scale.shape) != wanted:
        raise ShapeError(
            f"the scales of a tensor of shape {tuple(shape)}, {granularity}, have shape {wanted};"
            f" got {tuple(scale.shape)}"
        )


def to_blocks(x: Tensor, granularity: Granularity) -> Tensor:
    """`x` with each dimension cut in two, [blocks, elements of a block]; zeros fill ragged ones.

    A view of `x` where no block is ragged.
    """
    cuts = _cuts(granularity, x.shape)
    missing = [count * size - n for (count, size), n in zip(cuts, x.shape, strict=True)]
    if any(missing):
        x = F.pad(x, [side for n in reversed(missing) for side in (0, n)])
    return x.view(_interleaved(cuts))


def from_blocks(blocks: Tensor, granularity: Granularity, shape: Sequence[int]) -> Tensor:
    """The tensor of `shape` of which `to_blocks` made `blocks`."""
    whole = blocks.reshape([count * size for count, size in _cuts(granularity, shape)])
    if tuple(whole.shape) == tuple(shape):
        return whole
    if torch.compiler.is_compiling() and whole.is_cpu:
        cropped: Tensor = torch.ops.scaledtensor.crop(whole, shape)
        return cropped
    return _crop(whole, shape)


def _crop(x: Tensor, shape: Sequence[int]) -> Tensor:
    for dim, n in enumerate(shape):
        x = x.narrow(dim, 0, n)
    return x.clone(memory_format=torch.contiguous_format)


def beside_blocks(scale: Tensor, granularity: Granularity, shape: Sequence[int]) -> Tensor:
    """`scale`, in the shape of `scale_shape`, so that it broadcasts against `to_blocks`."""
    return scale.view(_interleaved([(count, 1) for count, _ in _cuts(granularity, shape)]))


def block_dims(blocks: Tensor) -> list[int]:
    """The dimensions of `to_blocks` that run over the elements of a block."""
    return list(range(1, blocks.dim(), 2))


def _cuts(granularity: Granularity, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Of each dimension, the number of blocks and the size of one."""
    if isinstance(granularity, PerTensor):
        return [(1, n) for n in shape]
    if isinstance(granularity, PerAxis):
        dim = _dimension(granularity, shape)
        return [(n, 1) if i == dim else (1, n) for i, n in enumerate(shape)]
    sizes = (1,) * (len(shape) - len(granularity.block)) + granularity.block
    sizes = sizes[len(sizes) - len(shape) :]
    return [
        (1, n) if size == -1 else (-(-n // size), size)
        for n, size in zip(shape, sizes, strict=True)
    ]


def _dimension(granularity: PerAxis, shape: Sequence[int]) -> int:
    dims = len(shape)
    if not -dims <= granularity.dim < dims:
        allowed = f"{-dims} to {dims - 1}" if dims else "none, since it is 0-dim"
        raise ShapeError(
            f"{granularity} of a tensor of shape {tuple(shape)}: its dimensions are {allowed}"
        )
    return granularity.dim % dims


def _interleaved(cuts: Sequence[tuple[int, int]]) -> list[int]:
    return [n for cut in cuts for n in cut]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# Opaque to Inductor: where it fuses a crop with what is read once a block, its C++ (torch 2.13,
# `try_loop_split`) walks over whole blocks only and leaves the rest of the elements unwritten.
_LIBRARY = torch.library.Library("scaledtensor", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("crop(Tensor x, SymInt[] shape) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.impl("crop", _crop, "CPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("scaledtensor::crop", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.new_empty(shape)
