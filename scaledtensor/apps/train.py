"""`scaledtensor train`: trains on a user's text, saves, resumes with the same bits, and samples."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from scaledtensor.apps import checkpoint, parallel, precision, text, training
from scaledtensor.apps.generate import written
from scaledtensor.apps.gpt import GPTConfig
from scaledtensor.apps.training import Alone, Progress, Trainer
from scaledtensor.checkpoint import files, latest
from scaledtensor.errors import CheckpointError

INTERRUPTED = 128 + signal.SIGINT


def run(args: argparse.Namespace) -> int:
    training.apply(args)
    if args.parallel == "none":
        parallel.refuse_forgotten()
        checkpoint.check_writable(args.checkpoint)
    else:
        parallel.check_folder(args.checkpoint)
        if int(os.environ.get("RANK", "0")):  # the first rank locks for all
            return run_locked(args)
    with files.locked(args.checkpoint):
        return run_locked(args)


def run_locked(args: argparse.Namespace) -> int:
    """Run the command. This process, or the first rank, has locked the checkpoint."""
    if args.parallel == "none" and args.checkpoint.exists() and not args.resume:
        raise CheckpointError(
            f"{args.checkpoint} exists already: continue it with --resume, or choose another file"
        )
    if args.parallel != "none" and latest(args.checkpoint) is not None and not args.resume:
        raise CheckpointError(
            f"{args.checkpoint} holds checkpoints already: continue with --resume, or choose "
            "another folder"
        )
    corpus = text.load(args.text, args.context)
    config = training.config(args, len(corpus.vocabulary), args.dropout)
    if args.parallel == "none":
        return run_in(args, corpus, config, Alone())
    with parallel.joined(args, config) as processes:
        return run_in(args, corpus, config, processes)


def run_in(
    args: argparse.Namespace, corpus: text.Corpus, config: GPTConfig, processes: Alone
) -> int:
    """Run the command in one of the processes that share the work."""
    prompt = corpus.encode(args.prompt) if args.prompt else corpus.train[:1]
    row, chosen = precision.get(args.recipe), training.settings(args)
    trainer = Trainer(config, row, corpus, chosen, processes.device_of(args.device), processes)
    kept = checkpoint if args.parallel == "none" else parallel
    if args.resume:
        kept.load(trainer, args.checkpoint)
        if processes.first:
            print(f"resumed {args.checkpoint} at step {trainer.steps_done}")
    saver = Saver(trainer, args, kept.save)
    with processes.watched(trainer, args.checkpoint):
        finished = train(trainer, args.steps, saver)
    if not finished:
        if processes.first:
            print(
                f"stopped after step {trainer.steps_done} and saved {args.checkpoint}; "
                "the same command with --resume continues"
            )
        return INTERRUPTED
    loss, model = trainer.held_out_loss(), processes.whole(trainer)
    if processes.first:
        print(f"step {trainer.steps_done}: held-out loss {loss:.4f}")
        if args.sample:
            seed = trainer.settings.seed
            print(written(model, corpus, prompt, args.sample, args.temperature, seed))
    return 0


class Saver:
    """Writes the losses and the checkpoints of a training."""

    def __init__(
        self,
        trainer: Trainer,
        args: argparse.Namespace,
        save: Callable[[Trainer, Path], None],
    ) -> None:
        self.trainer, self.path, self.save, self.every = (
            trainer,
            args.checkpoint,
            save,
            args.save_every,
        )
        self.losses = args.losses if trainer.processes.first else None
        self.saved_at: int | None = None

    def after_step(self, loss: float) -> None:
        done = self.trainer.steps_done
        if self.losses is not None:
            with self.losses.open("a") as file:
                file.write(f"{done} {loss!r}\n")
        if done % self.every == 0:
            self.now()

    def now(self) -> None:
        if self.saved_at != self.trainer.steps_done:
            self.save(self.trainer, self.path)
            self.saved_at = self.trainer.steps_done


def train(trainer: Trainer, steps: int, saver: Saver) -> bool:
    """Train up to step `steps`, with checkpoints on the way and at the end. Returns False if Ctrl-C
    ended the training."""
    processes = trainer.processes
    title, quiet = trainer.precision.title, not processes.first
    with (
        ctrl_c_noted() as stop,
        Progress(title, steps, trainer.steps_done, quiet=quiet) as progress,
    ):
        stopped = False
        while trainer.steps_done < steps and not stopped:
            loss = trainer.step()
            progress(loss)
            saver.after_step(loss)
            stopped = processes.any(bool(stop))
        saver.now()
        return not stopped


@contextmanager
def ctrl_c_noted() -> Iterator[list[int]]:
    """A list that fills when Ctrl-C is pressed. Within it, Ctrl-C interrupts no step and no
    save."""
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
