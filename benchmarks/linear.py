"""Time one linear layer, forward and backward: ours, float32, bfloat16 and torchao's float8.

    python -m benchmarks.linear [--sizes 1024 2048] [--recipes unit] [--rounds 9] [--json FILE]
    python -m benchmarks.linear --sizes 1024 --profile "unit eager" [--lines 25]

The layer is `nn.Linear(n, n)` on a batch of n rows that needs a gradient, with a Gaussian incoming
gradient. All variants of a size run interleaved in one process; a figure is the median of their CPU
times on one thread. Ours has float32 parameters, casts them again in each step, and gives them
float32 gradients. The tensors between layers are ScaledTensors with bfloat16 elements, so a
recipe's row gets such an input. In "plain input" the row gets a float32 tensor, as the first layer
of a model does: its RMS is measured, and its gradient is a float32 tensor. torchao's layer has
bfloat16 parameters, and scales each tensor by its maximum (`convert_to_float8_training`). Its
products are emulated, which on a CPU takes no longer than `torch._scaled_mm`; ours are emulated
too. To install it: `pip install --no-deps torchao`. On a CPU without bfloat16 units the rows of
bfloat16 products are left out unless `--all` is given, and ours is compared with float32.
"""

import argparse
import copy
import json
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

import torch
from torch import Tensor, nn

import scaledtensor as sct
from benchmarks.peers import installed
from benchmarks.timing import Step, device_name, interleaved, multiplies_bfloat16
from benchmarks.unit_scaling import profile

PATHS = ("eager", "compiled")

#: With bfloat16 units and without: the row to compare with, and the largest allowed ratio of a
#: recipe to that row, by path.
BARS: dict[bool, tuple[str, dict[str, dict[str, float]]]] = {
    True: ("bf16", {"unit": {"eager": 1.4, "compiled": 1.15}}),
    False: ("fp32", {"unit": {"eager": 1.25, "compiled": 1.1}}),
}

#: size -> variant -> milliseconds
Times = dict[int, dict[str, float]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--sizes", type=int, nargs="+", default=(1024, 2048), metavar="N")
    parser.add_argument("--recipes", nargs="+", default=("unit",), metavar="NAME")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    parser.add_argument("--bias", action="store_true", help="give the layers a bias")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--all", action="store_true", help="rows of bfloat16 products in any case")
    parser.add_argument("--json", help="write the figures there")
    parser.add_argument(
        "--profile", metavar="VARIANT", help="run this one alone, at the first size"
    )
    parser.add_argument("--lines", type=int, default=25, help="lines of the profile")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sct.on_missing("error")
    # Every variant compiles the one forward of nn.Linear.
    torch._dynamo.config.recompile_limit = 64
    times: Times = {}
    for n in options.sizes:
        # Compiled again for each size; otherwise the size would become a symbol in the kernels.
        torch.compiler.reset()
        halves = options.all or multiplies_bfloat16(torch.device("cpu"))
        steps = variants(n, options.recipes, options.paths, options.bias, halves)
        if options.profile is not None:
            if options.profile not in steps:
                parser.error(f"--profile takes one of: {'; '.join(steps)}. Got {options.profile!r}")
            profile(steps[options.profile], options.lines)
            return
        times[n] = interleaved(steps, options.rounds, torch.device("cpu"))
    show(times)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"versions": versions(), "milliseconds": times}, file, indent=2)


def variants(
    n: int,
    recipes: Sequence[str],
    paths: Sequence[str],
    bias: bool = False,
    halves: bool = True,
) -> dict[str, Step]:
    """Return the timed functions by "row path"; `halves` are the rows of bfloat16 products."""
    x, grad = torch.randn(n, n), torch.randn(n, n)
    half, half_grad = x.bfloat16(), grad.bfloat16()
    layer = nn.Linear(n, n, bias=bias)
    rows = {"fp32": (layer, x, grad)}
    if halves:
        rows["bf16"] = (copy.deepcopy(layer).bfloat16(), half, half_grad)
    if halves and installed("torchao"):
        rows["torchao float8"] = (torchao_layer(layer), half, half_grad)
    for name in recipes:
        ours = sct.scale_model(copy.deepcopy(layer), name)
        scaled = sct.scaled(x, "bf16", recipe=name)
        scaled_grad = sct.scaled(grad, "bf16", recipe=name)
        rows[name] = (ours, scaled, scaled_grad)
        rows[f"{name}, plain input"] = (ours, x, scaled_grad)
    return {f"{row} {path}": step(path, *given) for row, given in rows.items() for path in paths}


def step(path: str, layer: nn.Module, x: Tensor, grad: Tensor) -> Step:
    run_layer = torch.compile(layer, fullgraph=True) if path == "compiled" else layer
    x = x.detach().requires_grad_()

    def run() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        run_layer(x).backward(grad)

    return run


def torchao_layer(layer: nn.Module) -> nn.Module:
    float8 = import_module("torchao.float8")
    model = nn.Sequential(copy.deepcopy(layer).bfloat16())  # it converts only children
    config = float8.Float8LinearConfig(emulate=True)
    converted: nn.Module = float8.convert_to_float8_training(model, config=config)
    return converted


def versions() -> dict[str, str]:
    names = ("torch", "scaledtensor", "torchao")
    return {name: version(name) for name in names if installed(name)}


def show(times: Times) -> None:
    device = torch.device("cpu")
    base, bars = BARS[multiplies_bfloat16(device)]
    print(", ".join(f"{name} {number}" for name, number in versions().items()), end="")
    print(f"; {device_name(device)}; medians of CPU time")
    if not installed("torchao"):
        print("torchao is not installed: its row is left out")
    for n, spent in times.items():
        print(f"\n| {n} x {n} x {n} | path | ms | / fp32 | / bf16 | bar, / {base} |")
        print("|---|---|---|---|---|---|")
        for variant, milliseconds in spent.items():
            row, path = variant.rsplit(" ", 1)
            ratios = {
                other: milliseconds / spent[f"{other} {path}"]
                for other in ("fp32", "bf16")
                if f"{other} {path}" in spent
            }
            bar = bars.get(row, {}).get(path)
            verdict = "met" if bar and ratios[base] <= bar else "NOT met"
            cells = [f"{ratios[o]:.2f}" if o in ratios else "" for o in ("fp32", "bf16")]
            print(
                f"| {row} | {path} | {milliseconds:.4g} | {cells[0]} | {cells[1]} "
                f"| {f'{bar}: {verdict}' if bar else ''} |"
            )


if __name__ == "__main__":
    main()
