"""The text of a training: a user's file, or the sources of Python's standard library."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scaledtensor.errors import TextError

STDLIB_CHARACTERS = 1_500_000
_OUTSIDE = re.compile(r"[^\n -~]+")  # all but newline and printable ASCII
# Files that are written at build or install time, so that they differ from machine to machine.
_GENERATED = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Corpus:
    """A text as indices of characters. The first 90 % are for training, the rest is held out."""

    name: str
    vocabulary: str
    train: Tensor
    held_out: Tensor
    digest: str

    @classmethod
    def from_text(cls, name: str, text: str, block_size: int) -> Corpus:
        if not text:
            raise TextError(f"{name} is empty; a text to train on is needed")
        raw = text.encode("utf-32-le", errors="surrogatepass")
        points, indices = np.unique(np.frombuffer(raw, dtype="<u4"), return_inverse=True)
        tokens = torch.from_numpy(indices.astype(np.int64))
        split = len(tokens) * 9 // 10
        # A window has block_size inputs and one more target. The held-out tenth must hold one.
        if len(tokens) - split <= block_size:
            raise TextError(
                f"{name} has {len(tokens)} characters; a context of {block_size} needs at least "
                f"{10 * block_size + 1}, so that the held-out tenth holds one window: "
                "give a longer text or a shorter context"
            )
        return cls(
            name=name,
            vocabulary="".join(map(chr, points)),
            train=tokens[:split],
            held_out=tokens[split:],
            digest=hashlib.sha256(raw).hexdigest(),
        )

    def encode(self, text: str) -> Tensor:
        index = {character: i for i, character in enumerate(self.vocabulary)}
        missing = sorted(set(text) - index.keys())
        if missing:
            raise TextError(
                f"{''.join(missing)!r} does not occur in {self.name}: the model has no token for it"
            )
        return torch.tensor([index[character] for character in text])

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.vocabulary[i] for i in tokens.tolist())


def load(path: Path | None, block_size: int) -> Corpus:
    """Read the user's file, or the standard library if no file is given."""
    if path is None:
        return Corpus.from_text("the standard library's sources", stdlib_text(), block_size)
    return Corpus.from_text(str(path), read_text(path), block_size)


def read_text(path: Path) -> str:
    if not path.exists():
        raise TextError(f"{path} does not exist; --text takes a text file")
    if path.is_dir():
        raise TextError(f"{path} is a directory; --text takes one text file")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from error
    if b"\0" in raw:
        raise TextError(f"{path} is not text: byte {raw.index(0)} is NUL")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; convert it to UTF-8"
        ) from error


def stdlib_text(limit: int = STDLIB_CHARACTERS) -> str:
    """The top-level modules in the order of their names, without characters other than newline and
    printable ASCII.

    Each version of Python gives one text. The digest of the corpus distinguishes the versions.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[str] = []
    size = 0
    for path in sorted(root.glob("*.py"), key=lambda path: path.name):
        if path.stem.startswith(_GENERATED):
            continue
        parts.append(_OUTSIDE.sub("", path.read_text(encoding="utf-8").expandtabs(4)))
        size += len(parts[-1])
        if size >= limit:
            break
    if not parts:
        raise TextError(
            "this Python has no standard library sources to read; give a text with --text FILE"
        )
    return "".join(parts)[:limit]


def draw_batch(
    tokens: Tensor, block_size: int, batch_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw `batch_size` random windows, and their targets, which begin one character later."""
    starts = torch.randint(len(tokens) - block_size, (batch_size, 1), generator=generator)
    windows = tokens[starts + torch.arange(block_size + 1)]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
