"""`KVCache` as a cache of transformers: `model.generate(..., past_key_values=sct.KVCache())`.

`scaledtensor.KVCache` loads this module if transformers is loaded.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, get_layer_types_and_kwargs

from scaledtensor.errors import UnsupportedError
from scaledtensor.quantization.cache import KVCache

__all__ = ["TransformersCache", "windows"]

_TWO = (
    "One cache would mix the keys of self-attention and of cross-attention; give two, without "
    "`config`: EncoderDecoderCache(sct.KVCache(...), sct.KVCache(...)), where EncoderDecoderCache "
    "is a class of transformers"
)
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


def windows(config: Any) -> list[int | None]:
    """Return the window of each layer of a model of transformers, None for full attention.

    Raises:
        UnsupportedError: a layer has no keys and values, or keeps them in another way; or the model
            has an encoder and a decoder.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{type(config).__name__} has an encoder and a decoder. {_TWO}")
    kinds, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    other = dict.fromkeys(kind for kind in kinds if kind not in _ATTENTION)
    if other:
        raise UnsupportedError(
            f"KVCache keeps keys and values of {', '.join(_ATTENTION)}; this model has layers of "
            f"{', '.join(other)}. Use the caches of transformers for it"
        )
    return [option.get("sliding_window") for option in options]


class TransformersCache(KVCache, Cache):  # type: ignore[misc]
    """A `KVCache` that is also a `transformers.Cache`. `scaledtensor.KVCache(...)` makes it."""

    offloading = False
    layer_class_to_replicate = None
    _last = 0  # the layer that transformers updated last

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take `update(layer, keys, values)`, and `update(keys, values, layer)`, which transformers
        calls."""
        if "layer" in kwargs or (args and isinstance(args[0], int)):
            return super().update(*args, **kwargs)
        return self._update(*args, **kwargs)

    def _update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():  # a guard on `_last` would compile each layer alone
            return KVCache.update(self, layer_idx, key_states, value_states)
        # A decoder updates a layer once in a pass, after the layer before. Layer 0 cannot tell,
        # since a model of one layer updates it again and again; nor can the only layer of a stage.
        if 0 < layer_idx == self._last and self.layers[layer_idx - 1].stores():
            raise UnsupportedError(
                f"layer {layer_idx} was updated twice without layer {layer_idx - 1} in between, as "
                f"in a model with an encoder and a decoder. {_TWO}. In a loop of your own, call "
                "update(layer, keys, values)"
            )
        made = KVCache.update(self, layer_idx, key_states, value_states)
        self._last = layer_idx
        return made

    def reset(self) -> None:
        """Forget all tokens. A cache with `max_tokens` keeps its memory."""
        super().reset()
        self._last = 0

    def crop(self, tokens: int) -> None:
        """Keep the first `tokens` tokens, or, if it is negative or 0, remove the last -`tokens`."""
        super().crop(tokens)
        self._last = 0

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the number of tokens: an int, or a tensor in a cache of fixed memory."""
        return self._length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys that the next `update` returns, and the position of the
        first."""
        return self._sizes(query_length, layer_idx)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return `max_tokens`, or -1."""
        return -1 if self.max_tokens is None else self.max_tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences of the batch for beam search."""
        self.reorder(beam_idx)

    def activate_past_recording(self) -> None:
        """Do nothing. A cache with a window always keeps some tokens more than it needs, so that
        `crop` can remove tokens."""

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Raise UnsupportedError: scales come from the first tokens."""
        raise UnsupportedError(
            "KVCache takes its scales from the first tokens, so it cannot be initialized earlier"
        )

    @property
    def batch_size(self) -> int:
        """The number of sequences; -1 before the first update."""
        stores = self.layers[0].stores() if self.layers else ()
        return stores[0].codes.shape[0] if stores else -1

    @property
    def is_compileable(self) -> bool:
        """Whether the memory is fixed."""
        return self.max_tokens is not None

    @property
    def is_initialized(self) -> bool:
        """Whether every layer has tokens."""
        return bool(self.layers) and all(layer.stores() for layer in self.layers)

    @property
    def is_croppable(self) -> bool:
        """Always True."""
        return True

    @property
    def is_sliding(self) -> list[bool]:
        """Whether a layer returns the tokens of a window only."""
        fixed = self.max_tokens is not None
        return [layer.window is not None and not fixed for layer in self.layers]

    @property
    def is_linear(self) -> list[bool]:
        """Never: no layer has linear attention."""
        return [False] * len(self.layers)

    @property
    def is_dummy(self) -> list[bool]:
        """Never: every layer keeps tokens."""
        return [False] * len(self.layers)
