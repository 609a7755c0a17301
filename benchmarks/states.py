"""Measure optimizer states in few bits: losses of a training, one scale for a tensor, and time.

    python -m benchmarks.states --text FILE [--steps 500] [--seeds 3] [--processes 2]
        [--rows fp32 e4m3fn ...] [--json FILE]
    python -m benchmarks.states --step [--compiled] [--eager] [--rounds 15] [--threads 1] [--peers]
    python -m benchmarks.states --text FILE --lr 1e-2 --steps 300 --seeds 1 --rows e4m3fn per-tensor

Without `--step`, the program trains the demo's GPT (d = 128, 4 layers, context 64, batch 16, AdamW
at 1e-3) in float32, so only the optimizer's states differ. A row is a `state_format` of
`sct.optim.AdamW`, rounded to nearest; "-drawn" is stochastic rounding. `per-tensor` is not in the
library: it is torch's AdamW with a second moment in E4M3FN under one scale for each tensor.
"fp32-ulp" is float32, with one parameter changed in its last bit. It shows the meaning of a
difference between rows. The loss of a run is the mean of its last 100 steps. "Held out" is the loss
of the last tenth of the text. The exit status is 1 if a format is further than 0.02 from float32,
or than 0.1 at another learning rate than 1e-3, or if one scale for a tensor is no further than
that. The failure shows only at a rate of 1e-2: v of a small gradient is zero under the scale of the
largest.

With `--step`, it compares the CPU time of a step with torch's AdamW with foreach=True; figures are
medians of interleaved steps. A row with the name of a format is the step that users get: on a CPU
with a C++ compiler this is a C++ loop. `--compiled` adds the code of torch.compile, and `--eager`
adds PyTorch's operators. `--peers` adds torchao's 8-bit optimizers, which compile themselves.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import scaledtensor as sct
from benchmarks.convergence import CompiledTrainer, Loss, finished, held_out
from benchmarks.memory import peer
from benchmarks.timing import Step, interleaved
from scaledtensor import native
from scaledtensor.apps.gpt import GPT, GPTConfig
from scaledtensor.apps.precision import Precision
from scaledtensor.apps.text import load
from scaledtensor.apps.training import Settings
from scaledtensor.formats import E4M3FN, fake_quantize
from scaledtensor.optim.states import STATE_FORMATS

LAST, LR = 100, 1e-3

#: The largest allowed distance from float32's loss: at `LR`, and at other learning rates.
BAR, WIDE_BAR = 0.02, 0.1

#: The longest allowed step of a row, in times of torch's foreach step.
STEP_ROW, STEP_BARS = "e4m3fn", {"demo": 1.3, "10M": 1.1}

PEERS = ("AdamW8bit", "AdamWFp8")

CONFIGS = {"demo": GPTConfig(65, 64, 4, 4, 128), "10M": GPTConfig(65, 256, 6, 6, 384)}


class PerTensor(torch.optim.AdamW):
    """AdamW that keeps v in E4M3FN, with the largest element of a tensor at the format's
    maximum."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            v = state["exp_avg_sq"]
            scale = v.amax().clamp(min=1e-38) / E4M3FN.max
            v.copy_(fake_quantize(v / scale, E4M3FN) * scale)
        return loss


def _ours(state_format: str, state_rounding: str = "nearest_even") -> Callable[..., Any]:
    def make(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return sct.optim.AdamW(
            parameters, lr, state_format=state_format, state_rounding=state_rounding
        )

    return make


ROWS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fp32": torch.optim.AdamW,
    "fp32-ulp": torch.optim.AdamW,
    **{name: _ours(name) for name in STATE_FORMATS if name != "fp32"},
    **{f"{name}-drawn": _ours(name, "stochastic") for name in ("e4m3fn", "e5m2", "int8")},
    "per-tensor": PerTensor,
}


class StatesTrainer(CompiledTrainer):
    row: str

    def new_optimizer(self) -> torch.optim.Optimizer:
        return ROWS[self.row](self.model.parameters(), self.settings.learning_rate)


@torch.no_grad()
def _nudge(model: torch.nn.Module) -> None:
    first = next(model.parameters()).view(-1)
    first[0] = torch.nextafter(first[0], torch.tensor(torch.inf))


def run(task: tuple[str, int, int, float, str]) -> dict[str, Any]:
    """Run one training, in its own process."""
    row, seed, steps, lr, text = task
    torch.set_num_threads(1)
    corpus = load(Path(text), 64)
    config = GPTConfig(len(corpus.vocabulary), 64, 4, 4, 128)
    prepare = _nudge if row == "fp32-ulp" else lambda model: None
    how = Precision(row, row, prepare)
    StatesTrainer.row = row
    settings = Settings(seed=seed, learning_rate=lr)
    trainer = StatesTrainer(config, how, corpus, settings, torch.device("cpu"))
    losses = [trainer.step() for _ in range(steps)]
    return {
        "row": row,
        "seed": seed,
        "steps": steps,
        "lr": lr,
        "last": statistics.mean(losses[-LAST:]),
        "held_out": held_out(trainer),
    }


def table(runs: list[dict[str, Any]], rows: list[str]) -> str:
    found = {(r["row"], r["seed"]): r for r in runs}
    lines = ["| states | loss | - fp32 | held out | - fp32 |", "|---" * 5 + "|"]
    for row in rows:
        own = [r for (name, _), r in sorted(found.items()) if name == row]
        cells = [f"`{row}`"]
        for figure in ("last", "held_out"):
            cells += [
                f"{statistics.mean(r[figure] for r in own):.4f}",
                f"{gap(found, row, figure):+.4f}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gap(found: dict[tuple[str, int], dict[str, Any]], row: str, figure: str = "last") -> float:
    gaps = [
        r[figure] - found["fp32", seed][figure] for (name, seed), r in found.items() if name == row
    ]
    return statistics.mean(gaps)


def judge(runs: list[dict[str, Any]], rows: list[str], bar: float) -> bool:
    found = {(r["row"], r["seed"]): r for r in runs}
    good = True
    for row in rows:
        distance = gap(found, row)
        if row == "per-tensor":
            met = not distance <= bar  # NaN too
            print(f"{row}: {distance:+.4f}, {'fails as it should' if met else 'does NOT fail'}")
        else:
            met = abs(distance) <= bar and math.isfinite(distance)
            print(f"{row}: {distance:+.4f}, bar {bar} {'met' if met else 'NOT met'}")
        good &= met
    return good


# --- time ------------------------------------------------------------------------------------


def _by_operators(step: Step) -> Step:
    def run() -> None:
        with native.left_out():
            step()

    return run


def step_times(
    config: GPTConfig, rounds: int, formats: tuple[str, ...], ways: set[str], peers: tuple[str, ...]
) -> dict[str, float]:
    """Return the milliseconds of a step by name. `ways` adds "compiled" and "eager" steps."""
    torch.manual_seed(0)
    model = GPT(config)
    tokens = torch.randint(config.vocab_size, (4, config.block_size))
    Loss(model)(tokens, tokens).backward()
    parameters = list(model.parameters())
    steps: dict[str, Step] = {"torch": torch.optim.AdamW(parameters, 1e-5, foreach=True).step}
    for name in formats:

        def step(compiled: bool | None, name: str = name) -> Step:
            made = sct.optim.AdamW(parameters, 1e-5, state_format=name, compiled=compiled)
            return made.step

        steps[name] = step(None)
        if "compiled" in ways:
            steps[f"{name} compiled"] = step(True)
        if "eager" in ways:
            steps[f"{name} eager"] = _by_operators(step(False))
    for name in peers:
        steps[f"torchao {name}"] = peer(name)(parameters).step
    return interleaved(steps, rounds, torch.device("cpu"))


def show_steps(
    rounds: int, formats: tuple[str, ...], ways: set[str], peers: tuple[str, ...]
) -> bool:
    good = True
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {native.status()}"
    )
    for label, config in CONFIGS.items():
        times = step_times(config, rounds, formats, ways, peers)
        count = sum(p.numel() for p in GPT(config).parameters())
        print(f"\n{label}: {count:,} parameters, {torch.get_num_threads()} threads\n")
        print("| step | ms | ns a parameter | times torch's |\n" + "|---" * 4 + "|")
        for name, ms in times.items():
            ratio = ms / times["torch"]
            print(f"| {name} | {ms:.2f} | {1e6 * ms / count:.2f} | {ratio:.2f} |")
        if STEP_ROW in times:
            bar = STEP_BARS[label]
            met = times[STEP_ROW] <= bar * times["torch"]
            print(f"\n{STEP_ROW}: bar {bar} {'met' if met else 'NOT met'}")
            good &= met
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS)[:-1])
    parser.add_argument("--json", type=Path, help="keeps the runs; those that it has are not run")
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--compiled", action="store_true", help="with --step, torch.compile too")
    parser.add_argument("--eager", action="store_true", help="with --step, operators too")
    parser.add_argument("--peers", action="store_true", help="with --step, torchao's steps too")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--formats", nargs="+", choices=STATE_FORMATS[1:], default=["e4m3fn"])
    options = parser.parse_args()
    if options.step:
        torch.set_num_threads(options.threads)
        if options.peers and find_spec("torchao") is None:
            parser.error("--peers times torchao, which is not installed")
        formats, peers = tuple(options.formats), PEERS if options.peers else ()
        ways = {way for way in ("compiled", "eager") if getattr(options, way)}
        sys.exit(not show_steps(options.rounds, formats, ways, peers))
    if options.text is None:
        parser.error("--text, or --step")
    runs: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        runs = json.loads(options.json.read_text())
    done = {(r["row"], r["seed"], r["steps"], r["lr"]) for r in runs}
    rows = list(dict.fromkeys(["fp32", *options.rows]))
    tasks = [
        (row, seed, options.steps, options.lr, str(options.text))
        for seed in range(options.seeds)
        for row in rows
        if (row, seed, options.steps, options.lr) not in done
    ]
    for found in finished(run, tasks, options.processes):
        runs.append(found)
        if options.json is not None:
            options.json.write_text(json.dumps(runs))
    wanted = [
        r
        for r in runs
        if (r["steps"], r["lr"]) == (options.steps, options.lr) and r["seed"] < options.seeds
    ]
    how = f"{options.steps} steps at {options.lr}, {options.seeds} seeds"
    print(f"\ntorch {torch.__version__}, {how}\n")
    print(table(wanted, rows) + "\n")
    sys.exit(not judge(wanted, rows, BAR if options.lr == LR else WIDE_BAR))


if __name__ == "__main__":
    main()
