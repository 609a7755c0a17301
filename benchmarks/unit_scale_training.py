"""Train models of `transformers` in FP8 after `unit_scale`, and the originals in float32.

    python -m benchmarks.unit_scale_training [--text FILE] [--models GPT2LMHeadModel ...]
        [--steps 300] [--seeds 1] [--json FILE]

The models read characters of the demo's text, or of FILE, with 4 layers, d = 128, context 64 and
batch 16. GPT-2 and Llama predict the next character; BERT predicts 15 % of the characters, which
are masked. Rows:

  fp32           the original, torch.optim.AdamW
  unit + fp8     unit_scale and simulate_fp8: FP8 without any scale, scaledtensor.optim.AdamW
  unit + scaled  unit_scale and scale_model: FP8 under carried scales, the same optimizer

Each row runs at every learning rate of its grid, a factor of two apart. The loss of a run is the
mean of its last 20 steps. The rate is constant, except for BERT: its norms after the sums need the
published schedule, linear warm-up over a tenth of the steps, then linear decay (Devlin et al.,
arXiv 1810.04805, section A.2). The published library cannot transform these models.
"""

import argparse
import json
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import scaledtensor as sct
from scaledtensor import optim
from scaledtensor.apps.text import Corpus, draw_batch, load

CONTEXT, BATCH, LAST = 64, 16, 20
SIZES = {
    "GPT2LMHeadModel": {
        "n_embd": 128,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": CONTEXT,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "LlamaForCausalLM": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
    },
    "BertForMaskedLM": {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}
MASKED, IGNORED = 0.15, -100
SCHEDULED = {"BertForMaskedLM"}
WARM_UP = 0.1
#: Unit-scaled parameters have unit size, so their learning rates are larger numbers.
GRIDS = {
    "fp32": [2.0**k for k in range(-12, -6)],
    "unit + fp8": [2.0**k for k in range(-5, 1)],
    "unit + scaled": [2.0**k for k in range(-5, 1)],
}


def build(name: str, vocabulary: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model_class = getattr(transformers, name)
    config = model_class.config_class(
        vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, use_cache=False, **SIZES[name]
    )
    model: nn.Module = model_class(config)
    return model


def draw(name: str, corpus: Corpus, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs and targets."""
    x, y = draw_batch(corpus.train, CONTEXT, BATCH, generator)
    if name != "BertForMaskedLM":
        return x, y
    masked = torch.rand(x.shape, generator=generator) < MASKED
    mask = len(corpus.vocabulary)  # the additional token of the model's vocabulary
    return x.where(~masked, mask), x.where(masked, IGNORED)


def share_of_rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate at a step: it rises from zero and falls to zero."""
    warm = max(1, round(WARM_UP * steps))
    return min((step + 1) / warm, (steps - step) / (steps - warm))


def train(name: str, row: str, rate: float, corpus: Corpus, steps: int, seed: int) -> float:
    """Return the mean of the last losses; infinite if the run diverged."""
    model = build(name, len(corpus.vocabulary) + 1, seed)
    batches = torch.Generator().manual_seed(seed)
    optimizer: torch.optim.Optimizer
    if row == "fp32":
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    else:
        example = torch.zeros(2, CONTEXT, dtype=torch.long)
        sct.unit_scale(model, {"input_ids": example})
        if row == "unit + fp8":
            sct.simulate_fp8(model)
        else:
            sct.scale_model(model)
        optimizer = optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01 * 1e-3)
    schedule = partial(share_of_rate, steps=steps) if name in SCHEDULED else lambda step: 1.0
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    losses = []
    for _ in range(steps):
        x, y = draw(name, corpus, batches)
        logits: Tensor = model(input_ids=x).logits
        loss = sct.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            return math.inf
    return statistics.mean(losses[-LAST:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rows", nargs="+", choices=GRIDS, default=list(GRIDS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="keeps the runs; those that it has are not run")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    corpus = load(options.text, CONTEXT)
    runs: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        runs = json.loads(options.json.read_text())
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {options.steps} steps"
    )
    for name in options.models:
        for row in options.rows:
            for rate in GRIDS[row]:
                for seed in range(options.seeds):
                    what = {"model": name, "row": row, "rate": rate, "seed": seed}
                    what["steps"] = options.steps
                    if any(what.items() <= run.items() for run in runs):
                        continue
                    loss = train(name, row, rate, corpus, options.steps, seed)
                    runs.append(what | {"loss": loss})
                    if options.json is not None:
                        options.json.write_text(json.dumps(runs))
            report(name, row, runs, options.steps)


def report(name: str, row: str, runs: list[dict[str, Any]], steps: int) -> None:
    of = [r for r in runs if (r["model"], r["row"], r["steps"]) == (name, row, steps)]
    rates = sorted({r["rate"] for r in of})
    means = {x: statistics.mean(r["loss"] for r in of if r["rate"] == x) for x in rates}
    best = min(means, key=means.__getitem__)
    line = "  ".join(f"2^{math.log2(x):.0f}: {means[x]:.4f}" for x in rates)
    print(
        f"{name:18} {row:14} best {means[best]:.4f} at 2^{math.log2(best):.0f}   {line}", flush=True
    )


if __name__ == "__main__":
    main()
