"""Measure the error of the three products of a linear layer under every recipe, and torchao's.

    python -m benchmarks.recipes [--size 512] [--data gaussian heavy outliers] [--json FILE]
    python -m benchmarks.recipes --sweep     the range of good constant scales
    python -m benchmarks.recipes --modes     MX: how a scale rounds to a power of two
    python -m benchmarks.recipes --heads     E5M2 and E4M3FN for the gradients of a vocabulary

Figures are signal over noise in dB: 10 log10 of the sum of squares of the exact product over the
sum of squares of the error. The exact product is the product of the float32 data in float64. Ours
goes through bfloat16 activations, as between the layers of a model; torchao's gets float32, and
multiplies in float32 here (emulate). The data are standard Gaussian; "heavy", Student's t of 3
degrees of freedom; or "outliers", Gaussian inputs with one feature in 64 that is 50 times as large
(weights and gradients stay Gaussian).
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scaledtensor as sct
from benchmarks.peers import installed
from scaledtensor.formats import E4M3FN, PerBlock, dequantize_blocks, quantize_blocks
from scaledtensor.recipes import (
    MXFP4,
    MXFP6,
    MXFP8,
    NVFP4,
    Blockwise,
    Constant,
    Current,
    MinMSE,
    Recipe,
    Unit,
)

#: Constant scales are chosen for this data: weights and gradients of RMS 1 here.
RECIPES: dict[str, Recipe] = {
    "Unit()": Unit(),
    "Unit(gradient=e4m3fn)": Unit(gradient="e4m3fn"),
    "Current()": Current(),
    "Current(gradient=e5m2)": Current(gradient="e5m2"),
    "Current(power_of_two=True)": Current(power_of_two=True),
    "Current(granularity='row')": Current(granularity="row"),
    "MinMSE()": MinMSE(),
    "Constant(0, 0, 0)": Constant(input_exponent=0, weight_exponent=0, gradient_exponent=0),
    "Blockwise()": Blockwise(),
    "MXFP8()": MXFP8(),
    "MXFP6()": MXFP6(),
    "MXFP4()": MXFP4(),
    "NVFP4()": NVFP4(),
}
DATA = ("gaussian", "heavy", "outliers")
PRODUCTS = ("y", "dx", "dw")
Problem = tuple[Tensor, Tensor, Tensor]
Rows = dict[str, dict[str, list[float]]]


def problem(kind: str, n: int, seed: int = 0) -> Problem:
    """Return x, w and dy of n by n, float32."""
    rng = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        z = torch.randn(n, n, generator=rng)
        if kind != "heavy":
            return z
        chi_squared = torch.randn(3, n, n, generator=rng).square().sum(0)
        return z / (chi_squared / 3).sqrt()

    x, w, dy = draw(), draw(), draw()
    if kind == "outliers":
        x[:, ::64] *= 50
    return x, w, dy


def decibels(exact: Tensor, found: Tensor) -> float:
    error = (found.double() - exact).square().sum()
    return float(10 * torch.log10(exact.square().sum() / error))


def products(layer: nn.Module, weight: Tensor, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Return y, dx and dw of a layer without a bias, as plain tensors."""
    y = layer(x)
    y.backward(dy)
    return [plain(t) for t in (y, x.grad, weight.grad)]


def plain(x: Tensor | None) -> Tensor:
    if x is None:
        raise TypeError("backward left no gradient")
    return (x.dequantize() if isinstance(x, sct.ScaledTensor) else x).detach().double()


def ours(recipe: Recipe, given: Problem) -> list[Tensor]:
    x, w, dy = given
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False)
    layer.weight.data.copy_(w)
    sct.scale_model(layer, recipe)
    input, gradient = (sct.scaled(t, "bf16", dtype=torch.float32, recipe=recipe) for t in (x, dy))
    return products(layer, layer.weight, input.requires_grad_(), gradient)


def torchao(kind: str) -> Callable[[Problem], list[Tensor]]:
    """Return torchao's `convert_to_float8_training` with the recipe of that name."""

    def run(given: Problem) -> list[Tensor]:
        config_module = import_module("torchao.float8.config")
        convert = import_module("torchao.float8").convert_to_float8_training
        config = config_module.Float8LinearConfig.from_recipe_name(kind)
        config = replace(config, emulate=True)
        x, w, dy = given
        model = nn.Sequential(nn.Linear(w.shape[1], w.shape[0], bias=False))
        model[0].weight.data.copy_(w)
        convert(model, config=config)
        return products(model, model[0].weight, x.clone().requires_grad_(), dy)

    return run


def variants() -> Iterator[tuple[str, Callable[[Problem], list[Tensor]]]]:
    for name, recipe in RECIPES.items():
        yield name, lambda given, recipe=recipe: ours(recipe, given)  # type: ignore[misc]
    if installed("torchao"):
        for kind in ("tensorwise", "rowwise"):
            yield f"torchao {kind}", torchao(kind)


def measure(kinds: Sequence[str], n: int) -> Rows:
    rows: Rows = {}
    for kind in kinds:
        given = problem(kind, n)
        a, b, g = (t.double() for t in given)
        exact = [a @ b.t(), g @ b, g.t() @ a]
        for name, run in variants():
            torch.manual_seed(0)
            found = run(given)
            rows.setdefault(name, {})[kind] = [
                decibels(e, f) for e, f in zip(exact, found, strict=True)
            ]
    return rows


def table(rows: Rows) -> str:
    kinds = list(next(iter(rows.values())))
    heads = ["recipe", *(f"{kind} {p}" for kind in kinds for p in PRODUCTS)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, of in rows.items():
        cells = [f"{db:.1f}" for kind in kinds for db in of[kind]]
        lines.append("| " + " | ".join([f"`{name}`", *cells]) + " |")
    return "\n".join(lines)


# --- constant scales -------------------------------------------------------------------------


def sweep(n: int, within: float = 0.995) -> str:
    """Run FP8-CSCALE's sweep (arXiv 2309.17224): the exponents whose signal stays within 99.5 % of
    the best one's signal, for each operand with the two others at their best."""
    lines = []
    given = problem("gaussian", n)
    a, b, g = (t.double() for t in given)
    exact = [a @ b.t(), g @ b, g.t() @ a]
    of = {"input": 0, "weight": 0, "gradient": 1}
    for operand, product in of.items():
        signal = {}
        for exponent in range(-12, 13):
            exponents = dict.fromkeys(("input", "weight", "gradient"), 0) | {operand: exponent}
            recipe = Constant(**{f"{k}_exponent": v for k, v in exponents.items()})
            error = (ours(recipe, given)[product].double() - exact[product]).norm()
            signal[exponent] = 1 - float(error / exact[product].norm())
        best = max(signal.values())
        good = [e for e, s in signal.items() if s >= within * best]
        lines.append(f"{operand}: 2^{good[0]} to 2^{good[-1]} for values of RMS 1")
    return "\n".join(lines)


def modes(n: int) -> str:
    """Measure one cast to MXFP8 under each way to round its scales: over the tensor, and as the
    mean over its blocks, in which a block of small errors counts as much as one of large errors."""
    x = torch.randn(n, n, generator=torch.Generator().manual_seed(0))
    lines = []
    for mode in ("floor", "even", "rceil", "ceil"):
        codes, scale = quantize_blocks(x, E4M3FN, PerBlock((1, 32)), "e8m0", mode)  # type: ignore[arg-type]
        found = dequantize_blocks(codes, scale, E4M3FN, PerBlock((1, 32)))
        whole = decibels(x.double(), found)
        blocks = zip(x.double().view(-1, 32), found.view(-1, 32), strict=True)
        mean = statistics.mean(decibels(*pair) for pair in blocks)
        lines.append(f"{mode:6} {whole:.2f} dB, a block {mean:.2f} dB")
    return "\n".join(lines)


# --- gradients of a vocabulary ---------------------------------------------------------------

HEADS = {
    "e5m2": Unit(activation="fp32", guard=False),
    "e4m3fn": Unit(gradient="e4m3fn", activation="fp32", guard=False),
}


def head(vocabulary: int, certainty: float, recipe: Recipe | None) -> list[Tensor]:
    """Return the loss of 256 tokens under the last layer of a language model, 128 features, and the
    gradients of its input, of its weight, and of the weight's rows that are no token's target."""
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(vocabulary, 128, generator=rng) * 128**-0.5
    targets = torch.randint(vocabulary, (256,), generator=rng)
    states = F.normalize(rows[targets], dim=1) * certainty
    states += 0.3 * torch.randn(states.shape, generator=rng)
    layer = nn.Linear(128, vocabulary, bias=False)
    layer.weight.data = rows
    x = states
    if recipe is not None:
        sct.scale_model(layer, recipe)
        x = sct.scaled(states, recipe=recipe)
    loss = F.cross_entropy(layer(x.requires_grad_()), targets)
    loss.backward()
    others = torch.ones(vocabulary, dtype=torch.bool)
    others[targets] = False
    dw = plain(layer.weight.grad)
    return [plain(loss), plain(x.grad), dw, dw[others]]


def heads(
    vocabularies: Sequence[int] = (256, 4096, 32768, 131072),
    certainties: Sequence[float] = (0.0, 4.0, 12.0),
) -> str:
    """Return a Markdown table of the errors of gradients. The gradient of a logit is p, or p - 1
    for the target. With V tokens the target's gradient is up to sqrt(V) times their RMS, and most
    gradients are far below the RMS if the model is certain."""
    lines = ["| tokens | loss | " + " | ".join(f"{f} dx, dw, others" for f in HEADS) + " |"]
    lines.append("|---" * (2 + len(HEADS)) + "|")
    for vocabulary in vocabularies:
        for certainty in certainties:
            loss, *exact = head(vocabulary, certainty, None)
            cells = [str(vocabulary), f"{float(loss):.2f}"]
            for recipe in HEADS.values():
                found = zip(head(vocabulary, certainty, recipe)[1:], exact, strict=True)
                errors = (float((a - b).norm() / b.norm()) for a, b in found)
                cells.append(", ".join(f"{e:.3f}" for e in errors))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA)
    parser.add_argument("--sweep", action="store_true", help="constant scales instead")
    parser.add_argument("--modes", action="store_true", help="scales of MX instead")
    parser.add_argument("--heads", action="store_true", help="gradients of a vocabulary instead")
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    others = {"sweep": lambda: sweep(options.size), "modes": lambda: modes(options.size)}
    for name, run in {**others, "heads": heads}.items():
        if getattr(options, name):
            print(run())
            return
    rows = measure(options.data, options.size)
    ao = f", torchao {version('torchao')}" if installed("torchao") else ""
    print(f"{options.size}^3, dB; torch {torch.__version__}{ao}\n\n{table(rows)}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
