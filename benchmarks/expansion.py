"""Measure the error of Adam's states in 8 bits, with and without a widened range.

    python -m benchmarks.expansion [--elements 262144] [--sigmas 0.3 1 2] [--format e4m3fn]

The states are synthetic. Gradients have size s, log-normal over the elements with the given sigma
of log s. m is 0.3 s times a Gaussian, and v is s^2 times a uniform number from 1/2 to 3/2. Both are
cast in groups of 128, once under the scale that fills the format and once widened to its range
(`formats.quantize_expanded`). The error is the mean square error of the update m / sqrt(v), which
is 0 if v became 0. "v to zero" is the share of elements whose v became 0.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scaledtensor.formats import (
    dequantize_blocks,
    dequantize_expanded,
    get,
    quantize_blocks,
    quantize_expanded,
)

GROUP = 128


def states(sigma: float, elements: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return m and v."""
    rng = torch.Generator().manual_seed(seed)
    size = 1e-3 * torch.exp(sigma * torch.randn(elements, generator=rng))
    m = 0.3 * size * torch.randn(elements, generator=rng)
    return m, size.square() * (0.5 + torch.rand(elements, generator=rng))


def plain(x: Tensor, fmt: str) -> Tensor:
    codes, scale = quantize_blocks(x, get(fmt), GROUP, "fp32")
    return dequantize_blocks(codes, scale, get(fmt), GROUP)


def expanded(x: Tensor, fmt: str) -> Tensor:
    return dequantize_expanded(quantize_expanded(x, fmt, GROUP), fmt, GROUP)


def measure(
    cast: Callable[[Tensor, str], Tensor], fmt: str, sigma: float, elements: int
) -> tuple[float, float]:
    """Return (mean square error of an update, share of v that became zero)."""
    m, v = states(sigma, elements)
    held = cast(v, fmt)
    update = torch.where(held > 0, cast(m, fmt) / held.sqrt(), 0.0)
    error = (update - m / v.sqrt()).square().mean()
    return float(error), float((held == 0).float().mean())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--elements", type=int, default=1 << 18)
    parser.add_argument("--sigmas", type=float, nargs="+", default=[0.3, 1.0, 2.0])
    parser.add_argument("--format", default="e4m3fn")
    options = parser.parse_args(arguments)
    print("| sigma | plain | v to zero | widened | v to zero | ratio |\n" + "|---" * 6 + "|")
    for sigma in options.sigmas:
        error, zeros = measure(plain, options.format, sigma, options.elements)
        ours, ours_zeros = measure(expanded, options.format, sigma, options.elements)
        print(
            f"| {sigma:g} | {error:.1e} | {zeros:.1%} | {ours:.1e} | {ours_zeros:.1%} | "
            f"{ours / error:.2f} |"
        )


if __name__ == "__main__":
    main()
