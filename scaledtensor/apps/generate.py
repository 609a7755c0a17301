"""`scaledtensor generate`: writes text with a checkpoint of `scaledtensor train`, or with a folder
of transformers."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor import checkpoint as folders
from scaledtensor.apps import checkpoint as files
from scaledtensor.apps import precision, training
from scaledtensor.apps.gpt import GPT, GPTConfig
from scaledtensor.apps.text import Corpus
from scaledtensor.errors import CheckpointError, TextError, UnsupportedError


def run(args: argparse.Namespace) -> int:
    training.apply(args)
    if not args.model.exists():
        raise CheckpointError(
            f"{args.model} does not exist; give a file or folder of `{files.KIND} --checkpoint`, "
            "or a folder of transformers"
        )
    kind = Pretrained if (args.model / "config.json").is_file() else Trained
    writer = kind(args.model, args.device)
    tokens = writer.encode(args.prompt).to(args.device)
    if args.weights != "none":
        sct.quantize_(writer.model, sct.WeightOnly(args.weights))
    cache = writer.cache(args.cache)
    clock = Clock()
    made = writer.generate(tokens[None], args, cache, clock)
    print(writer.decode(made[0]))
    report(clock, len(tokens), writer.model, cache)
    return 0


class Clock:
    """A streamer that notes when the prompt, and each token, was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


def report(clock: Clock, prompt: int, model: nn.Module, cache: Any) -> None:
    """Print the speed and the memory of a generation to stderr."""
    times, held = clock.times, 0 if cache is None else bytes_of_cache(cache)
    lines = []
    if len(times) > 1:
        lines.append(f"prefill: {prompt} tokens, {prompt / (times[1] - times[0]):.1f} tokens/s")
    if len(times) > 2:
        speed = (len(times) - 2) / (times[-1] - times[1])
        lines.append(f"decode: {len(times) - 2} tokens, {speed:.1f} tokens/s")
    lines.append(f"weights: {bytes_of(model):,} bytes, cache: {held:,} bytes")
    print("\n".join(lines), file=sys.stderr)


def bytes_of(model: nn.Module) -> int:
    """The bytes of all parameters and buffers; of codes and scales, if they are quantized."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def bytes_of_cache(cache: Any) -> int:
    """The bytes of a `KVCache`, or of a cache of transformers."""
    if isinstance(cache, sct.KVCache):
        return cache.nbytes
    held = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum(t.nbytes for t in held if isinstance(t, Tensor))


# --- a checkpoint of `scaledtensor train` ----------------------------------------------------


class Trained:
    """A model that `scaledtensor train` saved."""

    def __init__(self, path: Path, device: torch.device) -> None:
        known, state = identity(path, device)
        self.seed: int = known["seed"]
        none = torch.empty(0)  # a checkpoint has the characters of the text, but not the text
        self.corpus = Corpus(str(path), known["vocabulary"], none, none, known["text_sha256"])
        self.model = load(path, known, state, device)

    def encode(self, prompt: str | None) -> Tensor:
        characters = self.corpus.vocabulary
        return self.corpus.encode(prompt or ("\n" if "\n" in characters else characters[0]))

    def decode(self, tokens: Tensor) -> str:
        return self.corpus.decode(tokens)

    def cache(self, name: str) -> sct.KVCache | None:
        return None if name == "none" else sct.KVCache(name)

    def generate(
        self, tokens: Tensor, args: argparse.Namespace, cache: Any, clock: Clock
    ) -> Tensor:
        seed = self.seed if args.seed is None else args.seed
        generator = torch.Generator(tokens.device).manual_seed(seed)
        made: Tensor = self.model.eval().generate(
            tokens, args.tokens, args.temperature, generator, args.top_k, cache, clock
        )
        return made


def written(
    model: GPT, corpus: Corpus, prompt: Tensor, count: int, temperature: float, seed: int
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
        CheckpointError: `path` is damaged, or no checkpoint of `scaledtensor train`.
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


# --- a folder of transformers ----------------------------------------------------------------


class Pretrained:
    """A causal language model and its tokenizer in a local folder of transformers."""

    def __init__(self, path: Path, device: torch.device) -> None:
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise UnsupportedError(
                f"{path} is a folder of transformers, which is not installed: "
                "pip install scaledtensor[hf]"
            ) from error
        import scaledtensor.integrations.transformers  # noqa: F401 - for its own checkpoints

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype="auto")
        except (OSError, ValueError) as error:  # a file is missing, or the model is another kind
            raise CheckpointError(f"{path} cannot be loaded by transformers: {error}") from error
        self.path, self.model = path, model.eval().to(device)

    def encode(self, prompt: str | None) -> Tensor:
        if prompt:
            found: Tensor = self.tokenizer(prompt, return_tensors="pt").input_ids[0]
        else:
            begin = self.tokenizer.bos_token_id
            found = torch.tensor([] if begin is None else [begin], dtype=torch.int64)
        if not len(found):
            raise TextError(f"{self.path} has no token for the beginning of a text; give --prompt")
        return found

    def decode(self, tokens: Tensor) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def cache(self, name: str) -> Any:
        from transformers import DynamicCache

        config = self.model.config
        return DynamicCache(config=config) if name == "none" else sct.KVCache(name, config=config)

    def generate(
        self, tokens: Tensor, args: argparse.Namespace, cache: Any, clock: Clock
    ) -> Tensor:
        torch.manual_seed(args.seed or 0)
        if not args.tokens:
            return tokens
        how: dict[str, Any] = {"do_sample": False}
        if args.temperature:
            how = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k or 0}
        pad = self.tokenizer.pad_token_id
        how["pad_token_id"] = self.model.generation_config.eos_token_id if pad is None else pad
        made: Tensor = self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=args.tokens,
            past_key_values=cache,
            streamer=clock,
            **how,
        )
        return made
