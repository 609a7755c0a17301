"""Time transforms of a whole model, beside the transforms of the published library, `unit-scaling`.

    python -m benchmarks.unit_scaling [--rounds 15] [--json FILE]
    python -m benchmarks.unit_scaling --profile "ours both" [--lines 25]

The step is forward and backward of a GPT (4 layers, d = 256, context 256, batch 4, the loss
included) under `unit_scale`, `simulate_fp8` and both, eager and compiled by Inductor. All variants
run interleaved in one process; a figure is the median of their CPU times on one thread. The
published `simulate_fp8` rounds stochastically and ours to nearest, so each rounding has a row in
which both libraries round alike. In "both" each library rounds in its own way. `--profile` runs one
variant alone, and lists the time of its operators.
"""

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from benchmarks.step import Loss, step
from benchmarks.timing import Step, device_name, interleaved
from scaledtensor.apps.gpt import GPT, GPTConfig
from scaledtensor.models.simulate import simulate_format, simulate_fp8
from scaledtensor.unit_scaling import unit_scale

Transform = Callable[[nn.Module], nn.Module]

PLAIN, COMPILED = "plain", "plain compiled"
PATHS = ("eager", "compiled")

#: (transform, the published library's ratio to the plain model as first measured, ours to reach)
BARS = (
    ("unit_scale", 1.07, 1.05),
    ("simulate_fp8, nearest", 1.54, 1.25),
    ("simulate_fp8, stochastic", 1.54, 1.4),
    ("both", 1.83, 1.35),
    ("both compiled", 1.81, 1.3),
)
NEAREST, STOCHASTIC = "simulate_fp8, nearest", "simulate_fp8, stochastic"


def ours(x: Tensor, y: Tensor) -> dict[str, Transform]:
    """Return our transforms; each changes a model in place."""

    def unit(model: nn.Module) -> nn.Module:
        return unit_scale(model, (x, y))

    return {
        "unit_scale": unit,
        NEAREST: simulate_fp8,
        STOCHASTIC: lambda model: simulate_format(model, rounding="stochastic"),
        "both": lambda model: simulate_fp8(unit(model)),
        "both compiled": lambda model: compiled(simulate_fp8(unit(model))),
    }


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, fullgraph=True)  # type: ignore[return-value]


def published() -> dict[str, Transform]:
    from unit_scaling import transforms as peer
    from unit_scaling.formats import FPFormat

    nearest = FPFormat(4, 3, "nearest"), FPFormat(5, 2, "nearest")
    return {
        "unit_scale": peer.unit_scale,
        NEAREST: lambda model: peer.simulate_format(model, *nearest),
        STOCHASTIC: peer.simulate_fp8,
        "both": lambda model: peer.simulate_fp8(peer.unit_scale(model)),
        "both compiled": lambda model: peer.compile(peer.simulate_fp8(peer.unit_scale(model))),
    }


def variants(model: nn.Module, x: Tensor, y: Tensor, paths: Sequence[str]) -> dict[str, Step]:
    """Return steps by name, published ones first: each discards all compiled code at its start."""
    libraries = {"published": published()} if installed() else {}
    chosen: dict[str, Transform] = {
        f"{library} {name}": transform
        for library, transforms in (libraries | {"ours": ours(x, y)}).items()
        for name, transform in transforms.items()
    }
    chosen |= {PLAIN: lambda model: model, COMPILED: compiled}
    return {
        name: step(transform(copy.deepcopy(model)), x, y)
        for name, transform in chosen.items()
        if path(name) in paths
    }


def path(name: str) -> str:
    return "compiled" if name.endswith("compiled") else "eager"


def installed() -> bool:
    return find_spec("unit_scaling") is not None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    parser.add_argument("--json", help="write the figures there")
    parser.add_argument("--profile", metavar="VARIANT", help="run this one alone")
    parser.add_argument("--lines", type=int, default=25, help="lines of the profile")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPTConfig(256, options.context, options.layers, options.width // 64, options.width)
    x, y = torch.randint(0, 256, (2, options.batch, options.context))
    steps = variants(Loss(GPT(config)), x, y, options.paths)
    if options.profile is not None:
        if options.profile not in steps:
            parser.error(f"--profile takes one of: {'; '.join(steps)}. Got {options.profile!r}")
        profile(steps[options.profile], options.lines)
        return
    # Three rounds compile, and compile discarded code again; two more warm up.
    times = interleaved(steps, options.rounds, torch.device("cpu"), warm_up=5)
    show(times)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"torch": torch.__version__, "milliseconds": times}, file, indent=2)


def profile(run: Step, lines: int) -> None:
    for _ in range(3):
        run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for _ in range(3):
            run()
    print(found.key_averages().table("self_cpu_time_total", row_limit=lines))


def show(times: dict[str, float]) -> None:
    print(f"torch {torch.__version__}, {device_name(torch.device('cpu'))}")
    for name in (PLAIN, COMPILED):
        if name in times:
            print(f"{name}: {times[name]:.1f} ms")
    if not installed():
        print("unit-scaling is not installed: its column is left out")
    peer = f"unit-scaling {version('unit-scaling')}" if installed() else ""
    print("\nratios to the plain model, eager or compiled:\n")
    print(f"{'':26}{'ours':>8}{peer:>22}")
    bars = {name: bars for name, *bars in BARS}
    for name in bars:
        if f"ours {name}" not in times:
            continue
        plain = times[COMPILED if path(name) == "compiled" else PLAIN]
        mine = times[f"ours {name}"] / plain
        theirs = times.get(f"published {name}")
        row = f"{name:26}{mine:8.2f}" + (f"{theirs / plain:22.2f}" if theirs else "")
        if theirs:
            row += f"   not slower: {'met' if mine <= theirs / plain else 'NOT met'}"
        for word, bar in zip(("bar", "target"), bars[name], strict=True):
            row += f"   {word} {bar}: {'met' if mine <= bar else 'NOT met'}"
        print(row)


if __name__ == "__main__":
    main()
