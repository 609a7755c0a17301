"""`KVCache`: the keys and values of past tokens, in 8 bits or fewer."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from math import isfinite
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor

from scaledtensor.errors import DTypeError, FormatError, ScaleError, ShapeError, UnsupportedError
from scaledtensor.formats import FormatLike
from scaledtensor.formats import get as get_format
from scaledtensor.formats.tensors import FLOATS, named
from scaledtensor.quantization.cache_codes import Plan, Position, has_range, usual_block
from scaledtensor.quantization.cache_layer import Layer
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["KVCache"]


class KVCache:
    """The keys and values of past tokens, coded in FP8, INT8, FP4 or another format.

    A model calls `update` in each attention layer. The call stores the new keys and values and
    returns the decoded ones of all tokens, in the dtype of the new ones:

        cache = sct.KVCache("e4m3fn")
        k, v = cache.update(layer, k, v)    # (batch, heads, all tokens, head_dim)
        mask = cache.mask(queries)          # before the updates of these tokens

    A model of transformers takes a cache as it is: `model.generate(...,
    past_key_values=sct.KVCache("e4m3fn"))`. If transformers is loaded when a cache is made, the
    cache is also a `transformers.Cache`, and `update` also takes the arguments of transformers.

    Elements that share a scale: a few channels of keys have large magnitudes at every token, and
    values have no such channels (KIVI, arXiv:2402.02750). So keys have a scale for each channel,
    and values have a scale for each token. Each head of each sequence has scales of its own, so a
    sequence does not depend on others in its batch.

    - A format of four or more exponent bits (E4M3FN, E5M2, BF16) covers 15 or more binades. The
      scale of a channel of keys then comes from the RMS of the tokens of the first update, and
      serves all later tokens: E4M3FN holds magnitudes up to 448 times this RMS. `saturated` counts
      the elements that exceed the range. Nothing waits for later tokens.
    - Other formats (INT8, FP6, FP4, INT4) need a scale that follows the amax. Keys form groups of
      `block` tokens, each with one scale per channel. The tokens of a group that is not full stay
      in their own dtype. Values in fewer than 8 bits have a scale for each `block` channels.

    Every scale is derived from the tokens that it serves, or from the first update. Then, with one
    exception, results do not depend on how tokens are divided among calls: in the first format
    family above, the first update decides the scale. A number as `scale` removes this exception.

    Gradients of the tokens that a call brings go straight through to its `keys` and `values`. The
    tokens of earlier calls have no gradient, and the cache keeps no graph in memory.

    Args:
        format: the format of keys and values: a `Format`, its name, or a torch dtype.
        keys, values: a format for one of them, in place of `format`.
        scale: the choice of scales. "unit": powers of two, kept as E8M0 codes: of the RMS for
            formats of four or more exponent bits, else the least ones under which nothing
            saturates. "amax": the amax over the format's maximum, rounded up to bfloat16; in fewer
            than 8 bits an E4M3FN number for each block times a power of two, as in NVFP4. A number:
            the scale of all elements, without any measurement. Default: "unit" for formats of four
            or more exponent bits, "amax" for others.
        block: elements that share a scale in formats with less than four exponent bits. Default: 16
            for at most 4 bits, else 32; for values the largest divisor of both 16 or 32 and
            head_dim. Values in 8 bits have one scale for all channels.
        max_tokens: allocate memory for so many tokens at the first update, and never again.
            `update` then returns `max_tokens` tokens, and `mask` hides those that are not there
            yet. The cache works under torch.compile(fullgraph=True). Default: memory grows, by a
            quarter.
        window: a query attends to so many tokens, itself included, as in Mistral's sliding window.
            A growing cache forgets older tokens. A sequence of ints and None is a window for each
            layer.
        config: the config of a transformers model, from which the windows of its layers are read.

    Raises:
        FormatError: a format cannot hold elements.
        ScaleError: `scale` is none of these choices.
        ShapeError: `block`, `max_tokens` or `window` is no positive number.
        UnsupportedError: `config` has layers without keys and values.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls is KVCache and "transformers.cache_utils" in sys.modules:
            cls = import_module("scaledtensor.integrations.transformers_cache").TransformersCache
        return super().__new__(cls)

    def __init__(
        self,
        format: FormatLike = "e4m3fn",
        *,
        keys: FormatLike | None = None,
        values: FormatLike | None = None,
        scale: str | float | None = None,
        block: int | None = None,
        max_tokens: int | None = None,
        window: int | Sequence[int | None] | None = None,
        config: Any = None,
    ) -> None:
        self.key_plan = _plan(format if keys is None else keys, scale, block, of_keys=True)
        self.value_plan = _plan(format if values is None else values, scale, block, of_keys=False)
        if max_tokens is not None:
            _check_count("max_tokens", max_tokens)
        self.max_tokens = max_tokens
        if config is not None:
            if window is not None:
                raise UnsupportedError(
                    "give `window` or `config`, which also has windows; not both"
                )
            window = _windows_of(config)
        each = window if isinstance(window, Sequence) else [window]
        for w in each:
            if w is not None:
                _check_count("window", w)
        self.window: int | tuple[int | None, ...] | None = (
            tuple(window) if isinstance(window, Sequence) else window
        )
        self.layers: list[Layer] = []
        if isinstance(self.window, tuple):
            self._layer(len(self.window) - 1)

    def __repr__(self) -> str:
        told = [f"keys={self.key_plan.fmt.name!r}", f"values={self.value_plan.fmt.name!r}"]
        told += [
            f"scale={s!r}" for s in dict.fromkeys((self.key_plan.scale, self.value_plan.scale))
        ]
        told += [f"max_tokens={self.max_tokens}"] if self.max_tokens is not None else []
        told += [f"window={self.window}"] if self.window is not None else []
        return f"KVCache({', '.join(told)})"

    def __len__(self) -> int:
        """The number of layers."""
        return len(self.layers)

    # --- tokens ------------------------------------------------------------------------------

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens of one layer, and return all that it holds.

        Args:
            layer: the number of the layer, from 0 on.
            keys: float32, bfloat16, float16 or float64, of shape (batch, heads, new tokens,
                head_dim). The cache stores the value of a ScaledTensor, and returns plain tensors.
            values: of the same dtype and shape; its head_dim may differ.

        Returns:
            Keys and values in the dtype of the new ones: of all tokens of the layer; with a window,
            of the last window - 1 tokens and the new ones; with `max_tokens`, always that many.

        Raises:
            DTypeError: keys or values are of another dtype, or of another one than before.
            ShapeError: a shape is wrong, is another one than before, or the tokens exceed
                `max_tokens`. The cache is as it was.
        """
        if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
            raise ShapeError(f"a layer is a number from 0 on; got {layer!r}")
        _check_tokens(keys, values)
        return self._layer(layer).update(_plain(keys), _plain(values))

    def tokens(self, layer: int = 0) -> int:
        """Return the number of tokens that a layer has seen."""
        return int(self._length(layer))

    def positions(self, count: int, layer: int = 0) -> Tensor:
        """Return the positions of the next `count` tokens: int64 of shape (count,)."""
        length = self._length(layer)
        device = length.device if isinstance(length, Tensor) else self._device(layer)
        return torch.arange(count, device=device) + length

    def mask(self, queries: int, layer: int = 0) -> Tensor:
        """Return which keys the next `queries` tokens attend to, for scaled_dot_product_attention.

        Call it before `update`. The result is bool, of shape (queries, tokens that `update`
        returns), True for keys that a query sees: itself, and earlier ones within the window.
        """
        count, first = self._sizes(queries, layer)
        at = self.positions(queries, layer)[:, None]
        keys = torch.arange(count, device=at.device) + first
        seen = keys <= at
        window = self._window(layer)
        return seen if window is None else seen & (keys > at - window)

    def reset(self) -> None:
        """Forget all tokens. A cache with `max_tokens` keeps its memory."""
        for layer in self.layers:
            layer.reset()

    def crop(self, tokens: int) -> None:
        """Keep the first `tokens` tokens, or, if it is negative or 0, remove the last -`tokens`.

        Keys in groups: if the new end lies in a full group, this group is open again, with the
        decoded values of its codes.

        Raises:
            ShapeError: a layer has fewer tokens, or a window has forgotten them.
        """
        for layer in self.layers:
            layer.check_crop(tokens)
        for layer in self.layers:
            layer.crop(tokens)

    # --- sequences of the batch --------------------------------------------------------------

    def reorder(self, indices: Tensor) -> None:
        """Replace sequence i of the batch by sequence indices[i], as beam search does.

        Args:
            indices: int64 of shape (batch,).
        """
        self._map(lambda t: t.index_select(0, indices.to(t.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences of the batch that `indices`, int64 or bool, selects."""
        self._map(lambda t: t[indices.to(t.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch `repeats` times."""
        self._map(lambda t: t.repeat_interleave(repeats, 0))

    def _map(self, f: Callable[[Tensor], Tensor]) -> None:
        for layer in self.layers:
            for store in layer.stores():
                store.map(lambda t: t.copy_(new) if (new := f(t)).shape == t.shape else new)

    # --- memory ------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """The bytes of all codes, scales and waiting tokens that are allocated."""
        stores = [store for layer in self.layers for store in layer.stores()]
        return sum(t.nbytes for store in stores for t in store.tensors())

    @property
    def saturated(self) -> int:
        """The number of keys and values that exceeded the range of their scale, and were stored as
        the largest number of the format."""
        stores = [store for layer in self.layers for store in layer.stores()]
        return sum(int(store.saturated) for store in stores)

    # --- layers ------------------------------------------------------------------------------

    def _layer(self, layer: int) -> Layer:
        while len(self.layers) <= layer:
            window = self._window(len(self.layers))
            plans = self.key_plan, self.value_plan
            self.layers.append(Layer(*plans, self.max_tokens, window))
        return self.layers[layer]

    def _window(self, layer: int) -> int | None:
        if not isinstance(self.window, tuple):
            return self.window
        if layer >= len(self.window):
            raise ShapeError(
                f"layer {layer} has no window: `window` or `config` names {len(self.window)} layers"
            )
        return self.window[layer]

    def _length(self, layer: int) -> Position:
        return self.layers[layer].length if layer < len(self.layers) else 0

    def _device(self, layer: int) -> torch.device | None:
        stores = self.layers[layer].stores() if layer < len(self.layers) else ()
        return stores[0].codes.device if stores else None

    def _sizes(self, queries: int, layer: int) -> tuple[int, int]:
        """(the number of keys that the next `update` returns, the position of the first)."""
        if self.max_tokens is not None:
            return self.max_tokens, 0
        length, window = int(self._length(layer)), self._window(layer)
        first = 0 if window is None else max(length - window + 1, 0)
        return length + queries - first, first


# --- arguments -------------------------------------------------------------------------------


def _plan(given: FormatLike, scale: str | float | None, block: int | None, of_keys: bool) -> Plan:
    fmt = get_format(given)
    if not fmt.has_zero:
        raise FormatError(f"{fmt!r} is a format of scales; keys and values need a sign and a zero")
    if scale is None:
        scale = "unit" if has_range(fmt) else "amax"
    if fmt.bits >= 16 and isinstance(scale, str):
        scale = 1.0  # their range is enough for every activation
    if _is_number(scale):
        if not (isfinite(scale) and scale > 0):
            raise ScaleError(f"a scale is a positive finite number; got {scale}")
        scale = float(scale)
    elif scale not in ("unit", "amax"):
        raise ScaleError(f"scale is 'unit', 'amax' or a positive number; got {scale!r}")
    if block is not None:
        _check_count("block", block)
    if has_range(fmt) or _is_number(scale) or (not of_keys and fmt.bits >= 8):
        return Plan(fmt, scale, None)
    return Plan(fmt, scale, block or (usual_block(fmt) if of_keys else None))


def _plain(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, ScaledTensor) else x


def _is_number(scale: Any) -> TypeGuard[float]:
    return isinstance(scale, int | float) and not isinstance(scale, bool)


def _check_count(name: str, given: Any) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ShapeError(f"{name} is a positive number; got {given!r}")


def _check_tokens(keys: Tensor, values: Tensor) -> None:
    for name, x in (("keys", keys), ("values", values)):
        if not isinstance(x, Tensor) or x.dtype not in FLOATS:
            told = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise DTypeError(f"{name} are a tensor of {named(FLOATS)}; got {told}")
        if x.dim() != 4:
            raise ShapeError(
                f"{name} have shape (batch, heads, tokens, head_dim); got {tuple(x.shape)}"
            )
    if keys.shape[:3] != values.shape[:3]:
        raise ShapeError(
            "keys and values have the same batch, heads and tokens; got "
            f"{tuple(keys.shape)} and {tuple(values.shape)}"
        )
    if keys.dtype is not values.dtype or keys.device != values.device:
        raise DTypeError(
            "keys and values have one dtype and one device; got "
            f"{keys.dtype} on {keys.device} and {values.dtype} on {values.device}"
        )


def _windows_of(config: Any) -> list[int | None]:
    """The window of each layer of a transformers model."""
    try:
        read = import_module("scaledtensor.integrations.transformers_cache").windows
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "`config` is the config of a transformers model, and transformers is not installed; "
            "install scaledtensor[transformers], or give `window`"
        ) from error
    found: list[int | None] = read(config)
    return found
