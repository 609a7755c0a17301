"""A small GPT in ordinary PyTorch. It imports nothing from scaledtensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int
    block_size: int = 64
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; it must lie in [0, 1)")


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(
        self, x: Tensor, layer: int = 0, cache: Any = None, mask: Tensor | None = None
    ) -> Tensor:
        B, T, C = x.shape
        heads = (B, T, self.n_head, C // self.n_head)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if cache is not None:
            k, v = cache.update(layer, k, v)
        dropout = self.dropout if self.training else 0.0
        how = {"is_causal": True} if cache is None else {"attn_mask": mask}
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **how)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(B, T, C))
        return out


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.n_embd)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, layer: int = 0, cache: Any = None, mask: Tensor | None = None
    ) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), layer, cache, mask))
        out: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return out


class GPT(nn.Module):
    """Pre-LN decoder. `forward` returns the logits, and the mean loss if it has targets, else None.

    With a cache, such as `scaledtensor.KVCache`, `tokens` continue the tokens that the cache holds.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.position_embedding = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.apply(_init)
        # As in GPT-2: each block adds two branches to the residual stream, so each branch starts
        # smaller by 1/sqrt(2L).
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.proj.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, cache: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        count = tokens.shape[1]
        if cache is None:
            positions, mask = torch.arange(count, device=tokens.device), None
        else:
            positions = cache.positions(count).to(tokens.device)
            mask = cache.mask(count).to(tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for layer, block in enumerate(self.blocks):
            x = block(x) if cache is None else block(x, layer, cache, mask)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits, None
        # CPU autocast keeps log_softmax in bf16, which would round the loss to three digits.
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return logits, loss

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        count: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        top_k: int | None = None,
        cache: Any = None,
        streamer: Any = None,
    ) -> Tensor:
        """Return `tokens` (B, T), continued by `count` sampled tokens.

        Without a cache each token sees the last `block_size` tokens, which are computed again. With
        a cache only the new token is computed. Positions are absolute, so a full cache is
        emptied, and the last half of its tokens is computed again.

        `temperature` 0 takes the likeliest token. A streamer has the methods `put` and `end` of
        streamers of transformers.
        """
        size, first = self.config.block_size, max(tokens.shape[1] - self.config.block_size, 0)
        if streamer is not None:
            streamer.put(tokens)
        for _ in range(count):
            if cache is None:
                logits, _ = self(tokens[:, -size:])
            else:
                if tokens.shape[1] - first > size:
                    first = tokens.shape[1] - max(size // 2, 1)
                    cache.reset()
                logits, _ = self(tokens[:, first + cache.tokens() :], cache=cache)
            token = _sampled(logits[:, -1].float(), temperature, top_k, generator)
            tokens = torch.cat((tokens, token), dim=1)
            if streamer is not None:
                streamer.put(token)
        if streamer is not None:
            streamer.end()
        return tokens


def _sampled(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """One token for each row of `logits` (B, vocabulary)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    chances = F.softmax(logits / temperature, dim=-1)
    return torch.multinomial(chances, 1, generator=generator)


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
