"""`scaledtensor sample`: writes text with the model in a checkpoint of `scaledtensor train`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch

from scaledtensor import checkpoint as folders
from scaledtensor.apps import checkpoint as files
from scaledtensor.apps import precision, training
from scaledtensor.apps.gpt import GPT, GPTConfig
from scaledtensor.apps.text import Corpus
from scaledtensor.errors import CheckpointError


def run(args: argparse.Namespace) -> int:
    training.apply(args)
    known, state = identity(args.checkpoint, args.device)
    none = torch.empty(0)  # a checkpoint has the characters of the text, but not the text
    corpus = Corpus(str(args.checkpoint), known["vocabulary"], none, none, known["text_sha256"])
    begin = args.prompt or ("\n" if "\n" in corpus.vocabulary else corpus.vocabulary[0])
    prompt = corpus.encode(begin)
    model = load(args.checkpoint, known, state, args.device)
    seed = known["seed"] if args.seed is None else args.seed
    print(written(model, corpus, prompt, args.count, args.temperature, seed))
    return 0


def written(
    model: GPT, corpus: Corpus, prompt: torch.Tensor, count: int, temperature: float, seed: int
) -> str:
    """Return the prompt, continued by `count` characters."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = model.eval().generate(prompt.to(device)[None], count, temperature, generator)
    return corpus.decode(tokens[0])


def identity(path: Path, device: torch.device) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(the settings of a checkpoint's training, the content of the file). The content is None for a
    folder.

    Raises:
        CheckpointError: `path` is missing, damaged, or no checkpoint of `scaledtensor train`.
    """
    if not path.is_dir():
        state = files.read(path, device)
        return state["identity"], state
    extra = folders.about(newest(path)).extra
    if not isinstance(extra, dict) or "vocabulary" not in extra.get("identity", ()):
        raise CheckpointError(f"{path} is no checkpoint of `{files.KIND}`")
    return extra["identity"], None


def load(
    path: Path, known: dict[str, Any], state: dict[str, Any] | None, device: torch.device
) -> GPT:
    """The trained model, with plain parameters."""
    names = [field.name for field in dataclasses.fields(GPTConfig)]
    config = GPTConfig(**{name: known[name] for name in names})
    how = precision.get(known["recipe"])
    model = GPT(config).to(device)
    how.prepare(model)
    if state is None:
        folders.load(newest(path), model)
    else:
        model.load_state_dict(state["model"], assign=True)
    how.restore(model)
    return model


def newest(path: Path) -> Path:
    """The last checkpoint in a folder, or the folder if it is a checkpoint."""
    return folders.latest(path) or path
