"""One training: an unmodified AdamW, batches from an explicit generator, and a list of losses."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from scaledtensor.apps.gpt import GPT, GPTConfig
from scaledtensor.apps.precision import Precision
from scaledtensor.apps.text import Corpus, draw_batch
from scaledtensor.errors import ModelError

# --- options of the command line -------------------------------------------------------------

#: Field of `GPTConfig` or `Settings` -> the option of the command line that sets it.
OPTIONS = {
    "recipe": "--recipe",
    "block_size": "--context",
    "n_layer": "--layers",
    "n_head": "--heads",
    "n_embd": "--width",
    "dropout": "--dropout",
    "batch_size": "--batch",
    "learning_rate": "--lr",
    "seed": "--seed",
}


def apply(args: argparse.Namespace) -> None:
    """Set the number of threads, and replace the name of the device by the device. If torch has no
    such device, the process ends as with any other wrong option."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        args.device = torch.empty(0, device=args.device).device
    except (RuntimeError, AssertionError) as error:  # a build without CUDA raises the latter
        reason = str(error).partition("\n")[0]
        args.usage.error(f"argument --device: {args.device!r} cannot be used here: {reason}")


def config(args: argparse.Namespace, vocab_size: int, dropout: float = 0.0) -> GPTConfig:
    try:
        return GPTConfig(
            vocab_size=vocab_size,
            block_size=args.context,
            n_layer=args.layers,
            n_head=args.heads,
            n_embd=args.width,
            dropout=dropout,
        )
    except ValueError as error:
        told = re.sub(r"\b[a-z]+_[a-z]+\b", lambda m: OPTIONS.get(m[0], m[0]), str(error))
        raise ModelError(told) from error


def settings(args: argparse.Namespace, loss_multiplier: float = 1.0) -> Settings:
    return Settings(args.batch, args.lr, args.seed, loss_multiplier)


# --- progress on stderr: a bar if tqdm is installed, else plain lines ------------------------

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


LINES = 5  # plain lines per training


class Progress:
    """Shows the progress of a training.

    In a `with Progress("FP32", steps) as progress:`, call `progress(loss)` after each step.
    """

    def __init__(self, title: str, steps: int, start: int = 0, quiet: bool = False) -> None:
        self.title, self.steps, self.done, self.tells = title, steps, start, not quiet
        self.every = max(1, steps // LINES)
        self.bar = (
            self.tells
            and tqdm
            and tqdm(
                total=steps,
                initial=start,
                desc=title,
                unit="step",
                dynamic_ncols=True,
                mininterval=0.5,
            )
        )

    def __call__(self, loss: float) -> None:
        self.done += 1
        if self.bar:
            self.bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            self.bar.update()
        elif self.tells and self.done in (self.steps, *range(0, self.steps, self.every)):
            print(f"{self.title}: step {self.done}/{self.steps}, loss {loss:.4f}", file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.bar:
            self.bar.close()


# --- the training ----------------------------------------------------------------------------

HELD_OUT_BATCHES = 8
FINAL_STEPS = 20  # their mean is called the loss of a run


@dataclass(frozen=True)
class Settings:
    """The settings of a training besides its model, its precision and its text."""

    batch_size: int = 16
    learning_rate: float = 1e-3
    seed: int = 0
    loss_multiplier: float = 1.0  # a power of two, so that multiplying back is exact


class Alone:
    """One process that does all the work. `scaledtensor.apps.parallel` has several processes."""

    first = True
    """Whether this is the process that writes to the screen."""

    def spread(self, model: GPT) -> Callable[..., Any]:
        """Divide a model among processes, and return the module to call in its place."""
        return model

    def part(self, batch: Tensor) -> Tensor:
        """This process's part of a batch."""
        return batch

    def mean(self, loss: Tensor) -> Tensor:
        """The mean loss over the parts of all processes."""
        return loss

    def any(self, here: bool) -> bool:
        """Whether `here` is true in any process."""
        return here

    def device_of(self, device: torch.device) -> torch.device:
        """The device of this process, for the device that the user named."""
        return device

    def watched(self, trainer: Trainer, kept_in: Path) -> AbstractContextManager[Any]:
        """A context around the steps that explains failures between processes."""
        return nullcontext()

    def whole(self, trainer: Trainer) -> GPT:
        """The trained model on this process, with plain parameters."""
        trainer.precision.restore(trainer.model)
        return trainer.model


class Trainer:
    """The model, the optimizer and the batches of one training. `step` is the whole loop body."""

    def __init__(
        self,
        config: GPTConfig,
        precision: Precision,
        corpus: Corpus,
        settings: Settings,
        device: torch.device,
        processes: Alone | None = None,
    ) -> None:
        torch.manual_seed(settings.seed)  # for the initialisation and for dropout
        self.precision, self.corpus = precision, corpus
        self.settings, self.device = settings, device
        self.processes = processes or Alone()
        self.model = GPT(config).to(device)
        precision.prepare(self.model)
        self.forward = self.processes.spread(self.model)
        self.optimizer = self.new_optimizer()
        self.batches = torch.Generator().manual_seed(settings.seed)
        self.steps_done = 0

    def new_optimizer(self) -> torch.optim.Optimizer:
        rate = self.settings.learning_rate
        return torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True)

    def loss(self, tokens: Tensor, generator: torch.Generator) -> Tensor:
        batch = draw_batch(
            tokens, self.model.config.block_size, self.settings.batch_size, generator
        )
        inputs, targets = (self.processes.part(whole).to(self.device) for whole in batch)
        with self.precision.context(self.device):
            _, loss = self.forward(inputs, targets)
        assert isinstance(loss, Tensor)
        return loss

    def step(self) -> float:
        loss = self.loss(self.corpus.train, self.batches)
        self.optimizer.zero_grad()
        multiplier = self.settings.loss_multiplier
        (loss if multiplier == 1.0 else loss * multiplier).backward()
        if multiplier != 1.0:
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad * (1 / multiplier)
        self.optimizer.step()
        self.steps_done += 1
        return self.processes.mean(loss).item()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The mean loss over batches that are the same for every row and every call."""
        generator = torch.Generator().manual_seed(self.settings.seed)
        self.model.eval()
        losses = [
            self.processes.mean(self.loss(self.corpus.held_out, generator)).item()
            for _ in range(HELD_OUT_BATCHES)
        ]
        self.model.train()
        return sum(losses) / len(losses)

    def gradients_at_linears(self, loss_multiplier: float) -> Tensor:
        """Every element of every gradient at the output of a linear layer, in one flat tensor.

        A cast to FP8 reads these elements. For a ScaledTensor they are the stored elements.
        """
        seen: list[Tensor] = []

        def keep(grad: Tensor) -> None:
            stored: Tensor = getattr(grad, "qdata", grad)
            seen.append(stored.detach().float().flatten())

        def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            output.register_hook(keep)

        hooks = [
            module.register_forward_hook(watch)
            for module in self.model.modules()
            if isinstance(module, nn.Linear)
        ]
        try:
            generator = torch.Generator().manual_seed(self.settings.seed)
            (self.loss(self.corpus.held_out, generator) * loss_multiplier).backward()
        finally:
            for hook in hooks:
                hook.remove()
            self.optimizer.zero_grad()
        return torch.cat(seen)


@dataclass(frozen=True)
class Run:
    """The results of one training."""

    precision: Precision
    settings: Settings
    losses: list[float]
    held_out_loss: float
    seconds: float
    parameters: dict[str, Tensor]
    gradients: dict[float, Tensor] = field(default_factory=dict)  # by loss multiplier

    def final_loss(self) -> float:
        last = self.losses[-FINAL_STEPS:]
        return sum(last) / len(last)

    def identical_to(self, other: Run) -> bool:
        """Whether every loss and every final parameter agree to the last bit."""
        return _same_bits(torch.tensor(self.losses), torch.tensor(other.losses)) and all(
            _same_bits(parameter, other.parameters[name])
            for name, parameter in self.parameters.items()
        )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # Bytes are compared, since == calls 0 and -0 equal, and a NaN different from itself.
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def train_run(
    config: GPTConfig,
    precision: Precision,
    corpus: Corpus,
    settings: Settings,
    *,
    steps: int,
    device: torch.device,
    on_step: Callable[[float], object] = lambda loss: None,
    gradients_at: tuple[float, ...] = (),
) -> Run:
    """Run one training from its seed. `gradients_at` lists the loss multipliers for which the final
    gradients are returned."""
    trainer = Trainer(config, precision, corpus, settings, device)
    losses: list[float] = []
    start = time.perf_counter()
    for _ in range(steps):
        losses.append(trainer.step())
        on_step(losses[-1])
    seconds = time.perf_counter() - start
    held_out_loss = trainer.held_out_loss()
    gradients = {
        multiplier: trainer.gradients_at_linears(multiplier) for multiplier in gradients_at
    }
    precision.restore(trainer.model)
    return Run(
        precision=precision,
        settings=settings,
        losses=losses,
        held_out_loss=held_out_loss,
        seconds=seconds,
        parameters={name: p.detach().cpu() for name, p in trainer.model.named_parameters()},
        gradients=gradients,
    )
