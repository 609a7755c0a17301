"""`scaledtensor train`: learn a user's text, save, resume to the last bit, and write a sample."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from scaledtensor.demo import checkpoint, options, precision, text
from scaledtensor.demo.progress import Progress
from scaledtensor.demo.training import Trainer
from scaledtensor.errors import CheckpointError

INTERRUPTED = 128 + signal.SIGINT


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a small GPT on your text, with checkpoints",
        description="Train a small character-level GPT on a text. Ctrl-C finishes the step, saves, "
        "and exits with 130; --resume then continues to the last bit as if nothing had happened "
        "(on the same machine and thread count).",
    )
    options.text_path(parser, required=True)
    parser.add_argument(
        "--recipe",
        default="unit",
        help=f"{', '.join(precision.PLAIN_NAMES)} (without scales) or a scaledtensor recipe "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", required=True, help="where the training is kept"
    )
    parser.add_argument("--resume", action="store_true", help="continue from --checkpoint")
    parser.add_argument(
        "--save-every",
        type=options.positive,
        default=100,
        metavar="N",
        help="steps between checkpoints (default %(default)s)",
    )
    parser.add_argument(
        "--sample",
        type=options.not_negative,
        default=200,
        metavar="N",
        help="characters to write at the end (default %(default)s)",
    )
    parser.add_argument("--prompt", help="how the sample begins (default: as the text does)")
    parser.add_argument(
        "--temperature",
        type=options.positive_float,
        metavar="X",
        default=0.8,
        help="default %(default)s",
    )
    options.add_shared(parser, steps=1000)
    parser.add_argument(
        "--dropout", type=float, metavar="X", default=0.0, help="default %(default)s"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    options.apply_threads(args)
    checkpoint.check_writable(args.checkpoint)
    if args.checkpoint.exists() and not args.resume:
        raise CheckpointError(
            f"{args.checkpoint} exists already: continue it with --resume, or choose another file"
        )
    corpus = text.load(args.text, args.context)
    prompt = corpus.encode(args.prompt) if args.prompt else corpus.train[:1]
    trainer = Trainer(
        options.config(args, len(corpus.vocabulary), args.dropout),
        precision.get(args.recipe),
        corpus,
        options.settings(args),
        args.device,
    )
    if args.resume:
        checkpoint.load(trainer, args.checkpoint)
        print(f"resumed {args.checkpoint} at step {trainer.steps_done}")

    if not train(trainer, args.steps, args.save_every, args.checkpoint):
        print(
            f"stopped after step {trainer.steps_done} and saved {args.checkpoint}; "
            "the same command with --resume continues"
        )
        return INTERRUPTED

    print(f"step {trainer.steps_done}: held-out loss {trainer.held_out_loss():.4f}")
    if args.sample:
        print(sample(trainer, prompt, args.sample, args.temperature))
    return 0


def train(trainer: Trainer, steps: int, save_every: int, path: Path) -> bool:
    """Train up to step `steps`, saving on the way and at the end; False when Ctrl-C ended it."""
    saved_at = None
    with (
        ctrl_c_noted() as stop,
        Progress(trainer.precision.title, steps, trainer.steps_done) as progress,
    ):
        while trainer.steps_done < steps and not stop:
            progress(trainer.step())
            if trainer.steps_done % save_every == 0:
                checkpoint.save(trainer, path)
                saved_at = trainer.steps_done
        if saved_at != trainer.steps_done:
            checkpoint.save(trainer, path)
        return not stop


@contextmanager
def ctrl_c_noted() -> Iterator[list[int]]:
    """Within, Ctrl-C only fills the list: however often it is pressed, no step or save is cut."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if not noted:
            print("\nstopping after this step; saving first", file=sys.stderr)
        noted.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def sample(trainer: Trainer, prompt: torch.Tensor, count: int, temperature: float) -> str:
    trainer.precision.restore(trainer.model)
    generator = torch.Generator(trainer.device).manual_seed(trainer.settings.seed)
    tokens = trainer.model.eval().generate(
        prompt.to(trainer.device)[None], count, temperature, generator
    )
    return trainer.corpus.decode(tokens[0])
