"""Measure the errors that the guard of `Unit` corrects, and the cost of the guard.

    python -m benchmarks.guard [--steps 40] [--width 256] [--threads 1]

Errors of the output and of the first weight's gradient are relative to the model in float32, in the
2-norm, in the first forward and backward pass. "calibrated" is the output in inference after
`scaledtensor.calibrate` on other data of the same kind. The networks have weights of one sign with
ReLU; averages; box blurs; or were trained in float32 without norms, on inputs with two outlier
channels. "features" is the loss of a regression after the steps, over float32's loss, on inputs
whose columns have sizes from 1e-3 to 1e4.

The cost is a ratio: the CPU time of steps of a GPT with AdamW and the guard, over the CPU time of
the same steps without the guard, eager and compiled. One step in ten looks. The two trainings run
interleaved.
"""

import argparse
import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import scaledtensor as sct
from benchmarks.timing import device_name
from scaledtensor.apps.gpt import GPT, GPTConfig
from scaledtensor.recipes import Current, Recipe, Unit

Case = tuple[nn.Module, Tensor, Tensor]
"""A model, its inputs, and other inputs of the same kind."""

RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "current": Current(),
    "unguarded": Unit(guard=False),
    "unit": Unit(),
}


def one_sign(width: int) -> Case:
    layers: list[nn.Module] = []
    for _ in range(6):
        linear = nn.Linear(width, width, bias=False)
        linear.weight.data.abs_()
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(128, width), torch.randn(128, width)


def averages(width: int) -> Case:
    layers = [nn.Linear(64, 64, bias=False) for _ in range(4)]
    for linear in layers:
        linear.weight.data.fill_(1 / 64)
    return nn.Sequential(*layers), torch.randn(128, 64), torch.randn(128, 64)


def blurs(size: int, count: int) -> Callable[[int], Case]:
    def made(width: int) -> Case:
        layers = [nn.Conv2d(8, 8, size, padding=size // 2, bias=False) for _ in range(count)]
        for conv in layers:
            conv.weight.data.fill_(1 / (8 * size**2))
        return nn.Sequential(*layers), torch.randn(4, 8, 32, 32), torch.randn(4, 8, 32, 32)

    return made


def trained(width: int) -> Case:
    x = torch.randn(1024, width)
    x[:, :2] *= 300
    y = torch.sin(x[:, 2:6]).sum(1, keepdim=True) + x[:, :1].abs() / 300
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for i in range(200):
        part = slice(i % 8 * 128, i % 8 * 128 + 128)
        optimizer.zero_grad()
        (model(x[part]) - y[part]).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, x[:512], x[512:]


CASES: dict[str, Callable[[int], Case]] = {
    "one sign, 6 layers": one_sign,
    "averages, 4 layers": averages,
    "5x5 blurs, 3 layers": blurs(5, 3),
    "3x3 blurs, 8 layers": blurs(3, 8),
    "trained in FP32": trained,
}


def scaled(model: nn.Module, recipe: Recipe | None) -> nn.Module:
    model = copy.deepcopy(model)
    return model.bfloat16() if recipe is None else sct.scale_model(model, recipe)


def plain(x: Tensor) -> Tensor:
    return (x.dequantize() if isinstance(x, sct.ScaledTensor) else x).float()


def error(x: Tensor, y: Tensor) -> float:
    return float((plain(x.detach()) - y.detach()).norm() / y.detach().norm())


def passed(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output, and the gradient of the first weight."""
    y = plain(model(x))
    y.square().mean().backward()  # type: ignore[no-untyped-call]
    grad = next(model.parameters()).grad
    assert grad is not None
    return y, grad


def errors(case: Case) -> dict[str, tuple[float, float]]:
    """Return (error of the output, error of the gradient) by recipe."""
    model, x, other = case
    y, g = passed(copy.deepcopy(model), x)
    found = {}
    for name, recipe in RECIPES.items():
        out, grad = passed(scaled(model, recipe), x.bfloat16() if recipe is None else x)
        found[name] = error(out, y), error(grad, g)
    calibrated = scaled(model, Unit())
    sct.calibrate(calibrated, [other])
    with torch.no_grad():
        found["calibrated"] = error(calibrated(x), y), float("nan")
    return found


def features(steps: int) -> dict[str, float]:
    """Return the loss of a regression on features of seven orders of magnitude, over float32's."""
    torch.manual_seed(0)
    x = torch.randn(512, 16) * torch.logspace(-3, 4, 16)
    y = torch.tanh(x / torch.logspace(-3, 4, 16)).sum(1, keepdim=True)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 1))
    losses = {}
    for name, recipe in {"fp32": None, **RECIPES}.items():
        m = copy.deepcopy(model) if name == "fp32" else scaled(model, recipe)
        optimizer = torch.optim.AdamW(m.parameters(), 1e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (plain(m(x.bfloat16() if name == "bf16" else x)) - y).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        losses[name] = loss.item()
    return {name: loss / losses["fp32"] for name, loss in losses.items()}


def cost(steps: int, width: int, *, compiled: bool) -> float:
    """Return the CPU time of training steps with the guard, over the time without it."""
    config = GPTConfig(256, block_size=128, n_layer=2, n_embd=width)
    runs = []
    for guard in (True, False):
        torch.manual_seed(0)
        model = sct.scale_model(GPT(config), Unit(guard=guard))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=compiled)
        forward = torch.compile(model, fullgraph=True) if compiled else model
        runs.append((forward, optimizer))
    x = torch.randint(256, (8, 128))
    spent = [0.0, 0.0]
    for step in range(-3, steps):  # the first ones compile, build and load
        for i, (model, optimizer) in enumerate(runs):
            start = time.process_time()
            optimizer.zero_grad()
            model(x, x)[1].backward()
            optimizer.step()
            if step >= 0:
                spent[i] += time.process_time() - start
    return spent[0] / spent[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {device_name(torch.device('cpu'))}, threads {args.threads}")
    names = [*RECIPES, "calibrated"]
    print(f"{'output / gradient':20}" + "".join(f"{name:>19}" for name in names))
    for title, make in CASES.items():
        torch.manual_seed(0)
        found = errors(make(args.width))
        cells = (f"{out:.4f} / {grad:.4f}" for out, grad in found.values())
        print(f"{title:20}" + "".join(f"{cell:>19}" for cell in cells), flush=True)
    ratios = features(10 * args.steps)
    print("features: loss over fp32's: " + ", ".join(f"{k} {v:.2f}" for k, v in ratios.items()))
    for compiled in (False, True):
        ratio = cost(args.steps, args.width, compiled=compiled)
        how = "compiled" if compiled else "eager"
        print(f"cost of a step, guard over none, {how}: {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
