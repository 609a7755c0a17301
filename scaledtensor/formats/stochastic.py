"""Random bits for stochastic rounding: one 32-bit word per element, made in the kernel that rounds.

The generator is counter-based: a word is a keyed mixing of the element's index, in int32
arithmetic. So it needs no state in memory, fuses into the kernel that rounds, and is the same in
eager and compiled code. The mixing is the three-round hash `triple32` of C. Wellons, "Prospecting
for Hash Functions" (nullprogram.com/blog/2018/07/31), the hash of least bias found there. A second
key enters after its first round, so that two calls are not shifts of one sequence. For a fixed key
the mixing is a permutation of the 2^32 counters: each word appears exactly once in a period. It is
no cipher.

Each call draws one 64-bit key from the caller's `torch.Generator`, or from the default generator of
the device, and draws nothing else. So a result is reproducible from the generator, whatever the
shape and the strides.
"""

import math

import torch
from torch import Tensor

from scaledtensor.backends import backend_of
from scaledtensor.errors import DTypeError, FormatError, UnsupportedError

__all__ = [
    "Randomness",
    "checked_random_bits",
    "key_for",
    "random_double_words",
    "random_key",
    "random_words",
]

Randomness = torch.Generator | Tensor | None

#: Shift and odd factor of each round; the factors are int32.
_ROUNDS = ((17, 0xED5AD4BB - 2**32), (11, 0xAC4C1B51 - 2**32), (15, 0x31848BAB))
_LAST_SHIFT = 14
_ROW = 1 << 14
_SECOND_STREAM = 0x9E3779B9 - 2**32  # Weyl's constant: 2^32 / golden ratio


def random_key(
    generator: torch.Generator | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Draw the random key of one call of stochastic rounding: two random int32 on `device`.

    Pass the key as `generator=` to round the same way again, or inside torch.compile, which cannot
    trace a `torch.Generator`. Without `generator` the device's default generator draws it.
    """
    where = device if generator is None else generator.device
    words = torch.randint(
        -(2**31), 2**31, (2,), dtype=torch.int64, generator=generator, device=where
    )
    return words.to(device=device, dtype=torch.int32)


def key_for(x: Tensor, source: Randomness) -> Tensor:
    """The key for casting `x`: a new key, or the key that the caller drew."""
    if isinstance(source, Tensor):
        if source.dtype is not torch.int32 or source.shape != (2,):
            raise DTypeError(
                "generator is a torch.Generator or a random_key() (two int32), got a tensor of"
                f" {source.dtype} of shape {tuple(source.shape)}"
            )
        return source
    if source is None:
        key: Tensor = torch.ops.scaledtensor.random_key(x)
        return key
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "torch.compile cannot trace a torch.Generator; pass generator=random_key(generator),"
            " drawn outside the compiled function, or none to draw from the default generator"
        )
    return random_key(source, x.device)


def checked_random_bits(count: int | None) -> int:
    """The number of bits of a word that take part; None stands for all 32."""
    if count is None:
        return 32
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 32:
        raise FormatError(f"random_bits is 1 to 32, or None for all of them; got {count!r}")
    return count


def random_words(key: Tensor, shape: torch.Size, start: int, kept: int) -> Tensor:
    """One int32 word per element, for counters `start`, `start` + 1, ... in the order of `shape`.

    The `kept` high bits of each word are random; the others are zero.
    """
    words = _mix(_counters(key, shape, start), key[0], key[1])
    return words if kept == 32 else words & -(1 << (32 - kept))


def random_double_words(key: Tensor, shape: torch.Size, start: int, kept: int) -> Tensor:
    """Same as `random_words`, in int64: 64 random bits if all 32 are kept."""
    high = random_words(key, shape, start, kept).long() << 32
    if kept < 32:
        return high
    low = _mix(_counters(key, shape, start), key[0], key[1] + _SECOND_STREAM)
    return high | (low.long() & 0xFFFFFFFF)


def _counters(key: Tensor, shape: torch.Size, start: int) -> Tensor:
    count = math.prod(shape)  # `shape.numel()` would make a symbolic size a number
    if start + count >= 1 << 31:
        raise UnsupportedError(
            f"stochastic rounding of {start + count} elements in one call; cast at most 2^31 - 1"
            " at a time"
        )
    in_cpp = torch.compiler.is_compiling() and backend_of(key).writes_cpp
    if in_cpp and len(shape) > 1 and shape[-1] <= _ROW:
        # Inductor's C++ puts a vector of counters together element by element. `as_strided` makes
        # it write a row of counters first, so that a vector is one load from the cache.
        rows = torch.arange(start, start + count, shape[-1], dtype=torch.int32, device=key.device)
        columns = torch.arange(shape[-1], dtype=torch.int32, device=key.device)
        return (rows[:, None] + columns.as_strided(columns.shape, (1,))).view(shape)
    return torch.arange(start, start + count, dtype=torch.int32, device=key.device).view(shape)


def _mix(word: Tensor, first: Tensor, second: Tensor) -> Tensor:
    word = word + first
    for number, (shift, factor) in enumerate(_ROUNDS):
        word = (word ^ _shifted(word, shift)) * factor
        if number == 0:
            word = word + second
    return word ^ _shifted(word, _LAST_SHIFT)


def _shifted(word: Tensor, shift: int) -> Tensor:
    """A logical shift to the right, which torch lacks for int32."""
    return (word >> shift) & ((1 << (32 - shift)) - 1)


# This operator is opaque to torch.compile, so compiled code draws from the same generator as eager
# code.

_LIBRARY = torch.library.Library("scaledtensor", "FRAGMENT")
_LIBRARY.define("random_key(Tensor like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def _random_key_op(like: Tensor) -> Tensor:
    return random_key(None, like.device)


_LIBRARY.impl("random_key", _random_key_op, "CompositeExplicitAutograd")


@torch.library.register_fake("scaledtensor::random_key", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(like: Tensor) -> Tensor:
    return torch.empty(2, dtype=torch.int32, device=like.device)
