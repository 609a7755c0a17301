"""One layer of a `KVCache`: its keys and its values, and which of their tokens are held."""

from typing import Any

import torch
from torch import Tensor

from scaledtensor.backends import backend_of
from scaledtensor.errors import DTypeError, ShapeError
from scaledtensor.quantization.cache_codes import (
    Fixed,
    Grouped,
    PerToken,
    Plan,
    Position,
    Store,
    has_range,
)

__all__ = ["Layer"]

#: Tokens for which a growing cache has memory at first, and the least number it grows by.
STEP = 64
#: Tokens that a growing cache keeps beyond its window, so that `crop` can remove some.
SPARE = 64


class _Through(torch.autograd.Function):
    """Decoded tokens. The gradient of their rows from `at` on is the gradient of the new tokens.

    The codes have no graph, so a cache keeps no graph of an older call in memory.
    """

    @staticmethod
    def forward(ctx: Any, new: Tensor, decoded: Tensor, at: Position) -> Tensor:
        ctx.rows = new.shape[2]
        ctx.at = at if isinstance(at, int) else None
        if isinstance(at, Tensor):
            ctx.save_for_backward(at)
        # Autograd would return an input itself as a view, which nobody may change in place.
        return decoded.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.at is not None:
            return grad.narrow(2, ctx.at, ctx.rows), None, None
        (at,) = ctx.saved_tensors
        return grad.index_select(2, torch.arange(ctx.rows, device=grad.device) + at), None, None


class Layer:
    """The keys and values of one layer.

    `length` tokens were seen, and row 0 of the stores is the token `first`. `length` is a tensor if
    the memory is fixed, so that a compiled graph serves every length.
    """

    def __init__(
        self, key_plan: Plan, value_plan: Plan, max_tokens: int | None, window: int | None
    ) -> None:
        self.plans = key_plan, value_plan
        self.max_tokens, self.window = max_tokens, window
        self.key_store: Store | None = None
        self.value_store: Store | None = None
        self.length: Position = 0
        self.first = 0

    def stores(self) -> tuple[Store, ...]:
        if self.key_store is None or self.value_store is None:
            return ()
        return self.key_store, self.value_store

    @property
    def keys(self) -> Tensor | None:
        """The decoded keys that the last token saw; with `max_tokens`, so many rows. The result is
        None before the first update. Models of transformers read the keys of their encoder here."""
        return self._decoded(self.key_store)

    @property
    def values(self) -> Tensor | None:
        """The decoded values, as `keys`."""
        return self._decoded(self.value_store)

    def _decoded(self, store: Store | None) -> Tensor | None:
        if store is None:
            return None
        if self.max_tokens is not None:
            return store.read(0, self.max_tokens, self.length)
        length = int(self.length)
        oldest = 0 if self.window is None else length - self.window
        end = length - self.first
        return store.read(max(oldest - self.first, 0), end, end)

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens, and return those that their queries see, with gradients straight to the
        new ones."""
        self._check(keys, values, keys.shape[2])
        given = keys, values
        through = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        if self.max_tokens is None:
            k, v = self._update(keys.detach(), values.detach())
            at: Position = k.shape[2] - keys.shape[2]
        else:
            k, v = self._update_fixed(keys.detach(), values.detach(), self.max_tokens)
            at = self.length - keys.shape[2] if through else 0
        if not through:
            return k, v
        k, v = (_Through.apply(x, y, at) for x, y in zip(given, (k, v), strict=True))  # type: ignore[no-untyped-call]
        return k, v

    def _update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        count, length = keys.shape[2], int(self.length)
        seen = length if self.window is None else min(self.window - 1, length)
        self._make_room(keys, values, length, count)
        for store, x in zip(self.stores(), (keys, values), strict=True):
            store.write(x, length - self.first)
        self.length = end = length + count
        start, stop = length - seen - self.first, end - self.first
        k, v = (store.read(start, stop, stop) for store in self.stores())
        if self.window is not None:
            self._shrink(end)
        return k, v

    def _update_fixed(self, keys: Tensor, values: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        length = self.length
        if not isinstance(length, Tensor):
            self._allocate(keys, values, rows)
            self.length = length = torch.zeros((), dtype=torch.int64, device=keys.device)
        for store, x in zip(self.stores(), (keys, values), strict=True):
            store.write(x, length)
        end = length.add_(keys.shape[2])
        k, v = (store.read(0, rows, end) for store in self.stores())
        return k, v

    def _allocate(self, keys: Tensor, values: Tensor, rows: int) -> None:
        plan, other = self.plans
        kind = Fixed if has_range(plan.fmt) or not isinstance(plan.scale, str) else Grouped
        group = plan.block or 1
        # A write into a fixed memory touches one group more than the tokens need at most.
        spare = group if self.max_tokens is not None else 0
        whole = -(-rows // group) * group + spare if kind is Grouped else rows
        made = kind(plan, keys, whole)
        self.value_store = (Fixed if not isinstance(other.scale, str) else PerToken)(
            other, values, rows
        )
        self.key_store = made

    def _make_room(self, keys: Tensor, values: Tensor, length: int, count: int) -> None:
        """See that `count` rows are free, and forget tokens before the window."""
        if self.value_store is None:
            self._allocate(keys, values, self._grown(count))
        elif length - self.first + count > self.value_store.rows:
            oldest = self._oldest(length)
            rows = max(self._grown(length - oldest + count), self.value_store.rows)
            self._move(oldest, length, rows)

    def _shrink(self, length: int) -> None:
        """Return memory after an update of many more tokens than the window."""
        oldest = self._oldest(length)
        rows = self._grown(length - oldest)
        if self.value_store is not None and self.value_store.rows > 2 * rows:
            self._move(oldest, length, rows)

    def _move(self, oldest: int, length: int, rows: int) -> None:
        for store in self.stores():
            store.move(oldest - self.first, length - self.first, rows)
        self.first = oldest

    def _oldest(self, length: int) -> int:
        """The first token that has to stay, at the start of a group."""
        group = self.plans[0].block or 1
        kept = length if self.window is None else self.window - 1 + SPARE
        return max(max(length - kept, 0) // group * group, self.first)

    def _grown(self, tokens: int) -> int:
        """Rows for `tokens` tokens and a quarter more, in whole groups."""
        group = self.plans[0].block or 1
        wanted = tokens + max(STEP, tokens // 4)
        return -(-wanted // group) * group

    def reset(self) -> None:
        if isinstance(self.length, Tensor):
            self.length.zero_()
            for store in self.stores():
                store.reset()
        else:
            self.key_store = self.value_store = None
            self.length = self.first = 0

    def check_crop(self, tokens: int) -> None:
        length, stop = int(self.length), self._stop(tokens)
        if stop < 0:
            raise ShapeError(f"cannot remove {-tokens} tokens: the cache has {length}")
        oldest = 0 if self.window is None else max(stop - self.window + 1, 0)
        if stop < length and oldest < self.first:
            raise ShapeError(
                f"cannot go back from {length} tokens to {stop}: with a window of {self.window} a "
                f"cache keeps {SPARE} tokens more than the window; remove fewer"
            )

    def crop(self, tokens: int) -> None:
        length, stop = int(self.length), self._stop(tokens)
        if stop == length:
            return
        for store in self.stores():
            store.crop(stop - self.first, length - self.first)
        if isinstance(self.length, Tensor):
            self.length.fill_(stop)
        else:
            self.length = stop

    def _stop(self, tokens: int) -> int:
        """The number of tokens after `crop(tokens)`."""
        length = int(self.length)
        return min(tokens, length) if tokens > 0 else length + tokens

    def _check(self, keys: Tensor, values: Tensor, count: int) -> None:
        if self.key_store is not None and self.value_store is not None:
            known = self.key_store.codes.shape
            facts = (*known[:2], self.key_store.head_dim, self.value_store.head_dim)
            given = (*keys.shape[:2], keys.shape[3], values.shape[3])
            if facts != given:
                raise ShapeError(
                    f"the cache holds batch {facts[0]}, {facts[1]} heads, head_dim {facts[2]} of "
                    f"keys and {facts[3]} of values; got {given[0]}, {given[1]}, {given[2]} and "
                    f"{given[3]}. For another batch, call reset() or make a new cache"
                )
            if keys.dtype is not self.key_store.dtype:
                raise DTypeError(
                    f"the cache returns {self.key_store.dtype}, the dtype of its first tokens; got "
                    f"{keys.dtype}. For another dtype, call reset() or make a new cache"
                )
        if self.max_tokens is None or torch.compiler.is_compiling():
            return  # a compiled graph checks its indices by itself
        # Reading the length of another device would wait for it at every layer.
        length = self.length
        known_length = not isinstance(length, Tensor) or backend_of(length).host
        if known_length and int(length) + count > self.max_tokens:
            raise ShapeError(
                f"{int(length)} tokens and {count} more exceed max_tokens={self.max_tokens}; make "
                "the cache with a larger max_tokens, or without it, so that it grows"
            )
