"""Time forward and backward of a small GPT: ours against float32 and bfloat16, eager and compiled.

    python -m benchmarks.step [--device cuda] [--rounds 9] [--all] [--json FILE]

All variants run interleaved in one process; a figure is the median of their CPU times on one thread
(on a CUDA device: of event times), so a busy machine shifts all alike. "saved" is the recipe
`Unit(saved="e4m3fn")`. "autocast" is bfloat16 between float32 parameters, as a training has them.
"casts" is "autocast" with the casts of FP8 in the linear layers and no scales, so it shows the part
of an FP8 step that no rule can save (`benchmarks.casts_alone`). Tensors that autograd saves for the
backward pass are counted by its hooks for saved tensors, once per storage: eager from each
operator, and compiled from the one function of the graph. Parameters and inputs are not counted. On
a CPU without bfloat16 units the bfloat16 model takes minutes, and is left out unless `--all` is
given.
"""

import argparse
import copy
import json
import platform

import torch
from torch import Tensor, nn

import scaledtensor as sct
from benchmarks.casts_alone import CastsAlone, InAutocast
from benchmarks.timing import Step, device_name, interleaved, multiplies_bfloat16
from scaledtensor.apps.gpt import GPT, GPTConfig

#: (numerator, denominator, the largest allowed ratio), with bfloat16 units and without
BARS = {
    True: (
        ("ours compiled", "fp32 compiled", 0.70),
        ("ours compiled", "bf16 compiled", 1.6),
        ("ours eager", "fp32 eager", 1.1),
    ),
    False: (
        ("ours compiled", "fp32 compiled", 1.2),
        ("ours eager", "fp32 eager", 1.4),
    ),
}

#: The largest allowed memory of "saved", as a share of the bfloat16 model's.
SAVED_BAR = 0.66


class Loss(nn.Module):
    """Model and loss in one graph, as in a compiled training step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.model(x, y)[1]
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--all", action="store_true", help="the bfloat16 model in any case")
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sct.on_missing("error")
    device = torch.device(options.device)

    config = GPTConfig(256, options.context, options.layers, options.width // 64, options.width)
    fp32 = GPT(config).to(device)
    units = multiplies_bfloat16(device)
    models = {
        "fp32": fp32,
        **({"bf16": copy.deepcopy(fp32).bfloat16()} if units or options.all else {}),
        "ours": sct.scale_model(copy.deepcopy(fp32)),
        "saved": sct.scale_model(copy.deepcopy(fp32), sct.recipes.Unit(saved="e4m3fn")),
    }
    x, y = torch.randint(0, 256, (2, options.batch, options.context), device=device)
    for model in models.values():  # a step ends; the guard then looks only at every tenth
        model(x, y)[1].backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()

    steps: dict[str, Step] = {}
    saved: dict[str, int] = {}
    losses_of = {name: Loss(model) for name, model in models.items()}
    if "bf16" in models:
        losses_of["autocast"] = InAutocast(Loss(copy.deepcopy(fp32)))
        losses_of["casts"] = CastsAlone(Loss(copy.deepcopy(fp32)))
    for name, loss_of in losses_of.items():
        losses = loss_of, torch.compile(loss_of, fullgraph=True)
        for how, made in zip(("eager", "compiled"), losses, strict=True):
            steps[f"{name} {how}"] = step(made, x, y)
            saved[f"{name} {how}"] = saved_bytes(made, x, y)
    times = interleaved(steps, options.rounds, device)

    report = {
        "machine": platform.machine(),
        "device": device_name(device),
        "torch": torch.__version__,
        "milliseconds": times,
        "bfloat16_units": units,
        "ratios": {f"{a} / {b}": times[a] / times[b] for a, b, _ in BARS[units]},
        "saved_for_backward_bytes": saved,
        "saved_over_bf16": {
            f"{name} {how}": saved[f"{name} {how}"] / saved[f"bf16 {how}"]
            for name in ("ours", "saved")
            for how in ("eager", "compiled")
            if "bf16" in models
        },
    }
    show(report)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=2)


def step(loss_of: nn.Module, x: Tensor, y: Tensor) -> Step:
    def run() -> None:
        loss_of.zero_grad(set_to_none=True)
        loss_of(x, y).backward()

    return run


def saved_bytes(loss_of: nn.Module, x: Tensor, y: Tensor) -> int:
    """Return the bytes that autograd keeps between forward and backward, without parameters and
    inputs."""
    kept: dict[int, int] = {}
    own = {
        part.untyped_storage().data_ptr()
        for t in (*loss_of.parameters(), x, y)
        for part in inner(t)
    }

    def pack(t: Tensor) -> Tensor:
        for part in inner(t):
            storage = part.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = loss_of(x, y)
    total = sum(kept.values())
    loss.backward()
    loss_of.zero_grad()
    return total


def inner(t: Tensor) -> list[Tensor]:
    if isinstance(t, sct.ScaledTensor):
        return [getattr(t, name).detach() for name in t.INNER]
    return [t.detach()]


def show(report: dict[str, object]) -> None:
    times: dict[str, float] = report["milliseconds"]  # type: ignore[assignment]
    saved: dict[str, int] = report["saved_for_backward_bytes"]  # type: ignore[assignment]
    print(f"torch {report['torch']}, {report['device']}\n")
    print(f"{'':8}{'eager ms':>10}{'compiled ms':>13}{'saved MB eager':>16}{'compiled':>10}")
    for name in ("fp32", "bf16", "autocast", "casts", "ours", "saved"):
        if f"{name} eager" not in times:
            print(f"{name:8}left out: this CPU has no bfloat16 units; --all runs it")
            continue
        figures = [by[f"{name} {how}"] for by in (times, saved) for how in ("eager", "compiled")]
        eager, compiled, *kept = figures
        print(f"{name:8}{eager:10.1f}{compiled:13.1f}{kept[0] / 1e6:16.1f}{kept[1] / 1e6:10.1f}")
    print()
    for a, b, bar in BARS[bool(report["bfloat16_units"])]:
        ratio = times[a] / times[b]
        print(f"{a} / {b}: {ratio:.2f}  (bar {bar}: {'met' if ratio <= bar else 'NOT met'})")
    if "casts compiled" in times:
        for a, b in (("casts", "bf16"), ("ours", "casts")):
            ratio = times[f"{a} compiled"] / times[f"{b} compiled"]
            print(f"{a} compiled / {b} compiled: {ratio:.2f}")
    for name, share in report["saved_over_bf16"].items():  # type: ignore[attr-defined]
        verdict = "met" if share <= SAVED_BAR else "NOT met"
        bar = f"  (bar {SAVED_BAR}: {verdict})" if name.startswith("saved") else ""
        print(f"saved for backward, {name} / bf16: {share:.3f}{bar}")


if __name__ == "__main__":
    main()
