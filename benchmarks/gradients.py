"""Gradients of transformers in FP8 against float32, beside what the format itself allows.

    python -m benchmarks.gradients [--models NAME ...] [--seeds 3] [--json FILE]

For each model (random weights, tiny configuration) the largest relative error (Frobenius norm) of a
parameter's gradient, and the relative error of the loss:

  ours      `scale_model` with the default recipe: E4M3 operands, E5M2 gradients, BF16 between.
  ours fwd16  the same with BF16 forward operands: what is left when E4M3 is taken away.
  current   a float32 model that rounds the operands of every matrix product to E4M3 under a scale
            of amax / 448 measured per tensor, and its gradient to E5M2 under amax / 57344. All else
            is float32: no library that keeps one scale a tensor rounds less.

Where `ours` is no more than `current`, the error is that of the formats, and not of the rules.
Parameters whose true gradient is zero by symmetry (key biases) are left out.
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
from scaledtensor.formats import E4M3FN, E5M2, Format, fake_quantize

VOCABULARY = 128

#: A key's bias shifts all logits of a query alike, so its true gradient is zero.
ZERO_BY_SYMMETRY = ("key.bias", "k_proj.bias", "k_lin.bias")


class Rounded(torch.autograd.Function):
    """To `fmt` under amax / max, forwards or backwards; the identity in the other direction."""

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
    """Every matrix product of floats, in every spelling that these models have, on rounded
    operands."""

    products = (
        *(torch.matmul, torch.bmm, torch.mm, torch.einsum, nn.functional.linear),
        *(Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.mm),
    )
    added = (torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm)

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
        if func in self.products:
            return self.rounded(func, args, kwargs)
        return func(*args, **kwargs)

    def rounded(self, func: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        floats = [isinstance(a, Tensor) and a.is_floating_point() for a in args]
        if sum(floats) < 2 or not any(a.requires_grad for a in args if isinstance(a, Tensor)):
            return func(*args, **kwargs)
        cast = [
            Rounded.apply(a, E4M3FN, None) if is_float else a
            for a, is_float in zip(args, floats, strict=True)
        ]
        return Rounded.apply(func(*cast, **kwargs), None, E5M2)


# --- models ----------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OF_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 64,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
OF_ENCODER = {"vocab_size": VOCABULARY, "d_model": 64, "pad_token_id": 0, "eos_token_id": 1}

#: Transformers class -> options of its configuration.
MODELS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": OF_GPT2,
    "LlamaForCausalLM": SIZES | GROUPED,
    "MistralForCausalLM": SIZES | GROUPED,
    "Qwen2ForCausalLM": SIZES | GROUPED,
    "Qwen3ForCausalLM": SIZES | GROUPED | {"head_dim": 16},
    "GemmaForCausalLM": SIZES | GROUPED | {"head_dim": 16},
    "Gemma2ForCausalLM": SIZES | GROUPED | {"head_dim": 16},
    "Gemma3ForCausalLM": SIZES | GROUPED | {"head_dim": 16},
    "OlmoForCausalLM": SIZES | GROUPED,
    "Olmo2ForCausalLM": SIZES | GROUPED,
    "PhiForCausalLM": SIZES | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0},
    "Phi3ForCausalLM": SIZES | GROUPED,
    "StableLmForCausalLM": SIZES | GROUPED,
    "CohereForCausalLM": SIZES | GROUPED,
    "GPTNeoXForCausalLM": SIZES,
    "FalconForCausalLM": SIZES | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "BloomForCausalLM": {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "n_layer": 3,
        "n_head": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "OPTForCausalLM": {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "ffn_dim": 128,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 64,
        "dropout": 0.0,
        "max_position_embeddings": 64,
    },
    "GPTJForCausalLM": OF_GPT2 | {"rotary_dim": 8},
    "GPTBigCodeForCausalLM": OF_GPT2,
    "BertForMaskedLM": SIZES | UNDROPPED,
    "RobertaForMaskedLM": SIZES | UNDROPPED | {"max_position_embeddings": 64},
    "ElectraForMaskedLM": SIZES | UNDROPPED | {"embedding_size": 64},
    "DistilBertForMaskedLM": {
        "vocab_size": VOCABULARY,
        "dim": 64,
        "hidden_dim": 128,
        "n_layers": 3,
        "n_heads": 4,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "T5ForConditionalGeneration": OF_ENCODER
    | {"d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0}
    | {"decoder_start_token_id": 0},
    "BartForConditionalGeneration": OF_ENCODER
    | {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 3), ("attention_heads", 4), ("ffn_dim", 128))
    }
    | {"dropout": 0.0, "max_position_embeddings": 64, "decoder_start_token_id": 1},
}


def build(name: str, **options: Any) -> nn.Module:
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**MODELS[name] | options))
    return model.train()


def batch(seed: int, padded: bool = False) -> dict[str, Tensor]:
    """Four sequences of 32 tokens; padded, the first starts with 5 that count for nothing."""
    ids = torch.randint(2, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, : 5 * padded] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


# --- errors ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """Of one way to run a model against another: relative errors, the worst gradient's name."""

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


def results(model: nn.Module, inputs: dict[str, Tensor]) -> Results:
    """Loss and gradients."""
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


def compare(reference: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Errors]:
    """Of each way to run the model, in the order of the module's docstring."""
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
    """The medians over seeds, for the model and for its input."""
    runs = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        runs.append(compare(build(name), batch(seed)))
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
