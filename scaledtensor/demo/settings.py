"""What the options of `demo` and `train` come to."""

from __future__ import annotations

import argparse

import torch

from scaledtensor.demo.model import GPTConfig
from scaledtensor.demo.training import Settings
from scaledtensor.errors import ModelError


def apply(args: argparse.Namespace) -> None:
    """Set the number of threads, and make of the name of the device what it names; a name that
    torch has no device for ends the process, as other wrong options do."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        args.device = torch.empty(0, device=args.device).device
    except (RuntimeError, AssertionError) as error:  # the latter from a build without CUDA
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
        raise ModelError(str(error)) from error


def settings(args: argparse.Namespace, loss_multiplier: float = 1.0) -> Settings:
    return Settings(args.batch, args.lr, args.seed, loss_multiplier)
