"""Compare gradients of transformers in FP8 with float32, and with the error of the formats alone.

    python -m benchmarks.gradients [--models NAME ...] [--seeds 3] [--json FILE]

For each model (random weights, tiny configuration) the table has the largest relative error
(Frobenius norm) of a parameter's gradient, and the relative error of the loss:

  ours      `scale_model` with the default recipe: E4M3 operands, E5M2 gradients, BF16 between. ours
  fwd16  the same with BF16 forward operands: the error that remains without E4M3. current   a
  float32 model that rounds the operands of every matrix product and convolution to
            E4M3 under a scale of amax / 448 measured per tensor, and its gradient to E5M2 under
            amax / 57344. All else is float32: no library that keeps one scale a tensor rounds less.

If `ours` is no more than `current`, the formats cause the error, and not the rules. Parameters
whose true gradient is zero by symmetry (key biases) are left out. A router's choice of experts is
not a continuous function of its operands. If rounding flips a choice, the gradients of whole rows
go to other experts, also in `current`, and also in BF16.
"""

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import scaledtensor as sct
from benchmarks.zoo import MODELS, ZERO_BY_SYMMETRY, Batch, batch, build
from scaledtensor import _torch
from scaledtensor.formats import E4M3FN, E5M2, Format, fake_quantize


class Rounded(torch.autograd.Function):
    """Round to `fmt` under amax / max, forwards or backwards; the identity in the other
    direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Format | None, backward: Format | None) -> Tensor:
        ctx.backward_format = backward
        return x.clone() if forward is None else filled(x, forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        fmt = ctx.backward_format
        return (grad if fmt is None else filled(grad, fmt)), None, None


def filled(x: Tensor, fmt: Format) -> Tensor:
    scale = x.abs().max().clamp_min(1e-30) / fmt.max
    return fake_quantize(x / scale, fmt) * scale


class CurrentScaling(TorchFunctionMode):
    """Run every matrix product and convolution of floats on rounded operands, in every spelling
    that these models have."""

    products = (
        *(torch.matmul, torch.bmm, torch.mm, torch.einsum, nn.functional.linear),
        *(Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.mm),
    )
    added = (torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm)
    grouped = (nn.functional.grouped_mm, _torch.grouped_mm)
    convolutions = (
        *(torch.conv1d, torch.conv2d, torch.conv3d),
        *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear:
            bias = kwargs.pop("bias", args[2] if len(args) > 2 else None)
            out = self.rounded(func, args[:2], {})
            return out if bias is None else out + bias
        if func in self.added:
            alpha, beta = kwargs.pop("alpha", 1), kwargs.pop("beta", 1)
            base, *factors = (*args, *kwargs.values())  # mat1, mat2 or batch1, batch2
            return self.rounded(torch.matmul, factors, {}) * alpha + base * beta
        if func is torch.einsum and isinstance(args[1], (list, tuple)):
            args = args[0], *args[1]
        if func in self.convolutions:
            return self.convolution(func, args, kwargs)
        if func in self.products or func in self.grouped:
            return self.rounded(func, args, kwargs)
        return func(*args, **kwargs)

    def convolution(self, func: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        options = dict(zip(("input", "weight", "bias", "stride"), args, strict=False)) | kwargs
        x, weight, bias = (options.pop(name, None) for name in ("input", "weight", "bias"))
        stride, rest = options.pop("stride", 1), args[4:]

        def unbiased(x: Tensor, w: Tensor) -> Tensor:
            return func(x, w, None, stride, *rest, **options)

        out = self.rounded(unbiased, (x, weight), {})
        return out if bias is None else out + bias.view(-1, *[1] * (weight.dim() - 2))

    def rounded(self, func: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        floats = [isinstance(a, Tensor) and a.is_floating_point() for a in args]
        if sum(floats) < 2 or not any(a.requires_grad for a in args if isinstance(a, Tensor)):
            return func(*args, **kwargs)
        cast = [
            Rounded.apply(a, E4M3FN, None) if is_float else a
            for a, is_float in zip(args, floats, strict=True)
        ]
        return Rounded.apply(func(*cast, **kwargs), None, E5M2)


# --- errors ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """Relative errors of one way to run a model against another, and the worst gradient's name."""

    loss: float
    gradients: dict[str, float]

    @property
    def of(self) -> str:
        return max(self.gradients, key=self.gradients.__getitem__)

    @property
    def worst(self) -> float:
        return max(self.gradients.values())

    @property
    def median(self) -> float:
        return statistics.median(self.gradients.values())


Results = tuple[float, dict[str, Tensor]]


def results(model: nn.Module, inputs: Batch) -> Results:
    """Return loss and gradients."""
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), {
        name: p.grad.dequantize() if isinstance(p.grad, sct.ScaledTensor) else p.grad
        for name, p in model.named_parameters()
        if p.grad is not None and not name.endswith(ZERO_BY_SYMMETRY)
    }


def errors(got: Results, truth: Results) -> Errors:
    gradients = {n: float((got[1][n] - t).norm() / t.norm()) for n, t in truth[1].items()}
    return Errors(abs(got[0] / truth[0] - 1), gradients)


def compare(reference: nn.Module, inputs: Batch) -> dict[str, Errors]:
    """Return the errors of each way to run the model, in the order of the module's docstring."""
    ours, fwd16 = (
        sct.scale_model(copy.deepcopy(reference), recipe)
        for recipe in (sct.recipes.Unit(), sct.recipes.Unit(forward="bf16"))
    )
    with CurrentScaling():
        current = results(copy.deepcopy(reference), inputs)
    truth = results(reference, inputs)
    return {
        "ours": errors(results(ours, inputs), truth),
        "ours fwd16": errors(results(fwd16, inputs), truth),
        "current": errors(current, truth),
    }


def row(name: str, seeds: int) -> dict[str, Any]:
    """Return the medians over seeds, for the model and for its input."""
    runs = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        runs.append(compare(build(name), batch(name, seed)))
    found: dict[str, Any] = {"model": name, "of": runs[0]["ours"].of}
    for way in runs[0]:
        for figure in ("loss", "worst", "median"):
            found[f"{way}: {figure}"] = statistics.median(getattr(r[way], figure) for r in runs)
    return found


COLUMNS = (
    "ours: loss",
    "ours: worst",
    "ours fwd16: worst",
    "current: worst",
    "ours: median",
    "current: median",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    sct.on_missing("error")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{'model':30}" + "".join(f"{c:>19}" for c in COLUMNS) + "  worst of ours")
    table = []
    for name in options.models:
        found = row(name, options.seeds)
        table.append(found)
        figures = "".join(f"{found[c]:19.4f}" for c in COLUMNS)
        print(f"{name:30}{figures}  {found['of']}", flush=True)
    for figure in ("worst", "median"):
        ratios = [r[f"ours: {figure}"] / r[f"current: {figure}"] for r in table]
        print(
            f"{figure} gradient, ours / current: median {statistics.median(ratios):.2f}, "
            f"from {min(ratios):.2f} to {max(ratios):.2f}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(table, file, indent=2)


if __name__ == "__main__":
    main()
