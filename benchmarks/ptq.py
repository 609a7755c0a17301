"""Quantise trained models without training: loss, accuracy and bytes of every config.

    python -m benchmarks.ptq --text FILE [--models FOLDER] [--seeds 3] [--only gpt bert]
        [--rows NAME ...] [--windows 256] [--sizes NAME=N ...] [--json FILE] [--quick]

A GPT is trained on the characters of FILE. A BERT is trained by masked tokens on the standard
library's sources, and fine-tuned to tell which of 20 packages a function is from. There is one GPT
and one fine-tuning for each seed; `benchmarks.ptq_models` describes them. With `--models` the
weights are kept in a folder, so that only the first call trains.

Each row converts a copy of each model and measures it on data that no training saw. Figures are
differences from FP32's, with their mean over the seeds and their range:

  loss      mean negative log-likelihood of a character, or of the right package, in nats
  accuracy  share of the functions whose package the BERT names, in points
  bytes     bytes of the weights of the linear layers, with all scales, over FP32's

torchao's rows are left out with a message if it is not installed, and the BERT if `tokenizers` and
`transformers` are not. Rows of `Static`, and rows with error feedback, see 16 batches of training
data. The GPT of a cache's row reads one character after the other; the cache holds all keys and
values before them.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import scaledtensor as sct
from benchmarks import ptq_models
from benchmarks.memory import storages
from benchmarks.peers import installed
from benchmarks.timing import device_name
from scaledtensor.apps.gpt import GPT
from scaledtensor.apps.text import Corpus, draw_batch, load
from scaledtensor.formats.describe import markdown
from scaledtensor.quantization.configs import Config, Dynamic, Static, WeightOnly

Batches = list[dict[str, Tensor]]
Figures = dict[str, float]
Run = dict[str, Figures]
"""The figures of one model, by row."""
Runs = list[Run]

UNITS = {"accuracy": "points", "loss": "nats"}
FORMS = {"accuracy": "+.2f", "loss": "+.4f"}

CALIBRATION = 16
"""Batches of training data for configs that need data."""


# --- rows ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A way to convert a model in place, or to run it."""

    prepare: Callable[[nn.Module, Batches], object] = lambda model, batches: None
    cache: Callable[[], Any] | None = None
    """Makes the cache of keys and values, for the rows of the GPT that have one."""
    library: str = "torch"


def ours(config: Config) -> Row:
    def prepare(model: nn.Module, batches: Batches) -> None:
        sct.quantize_(model, config, calibration=batches if config.needs_data else None)

    return Row(prepare)


def torchao(name: str, **options: str) -> Row:
    """Return the row of a config of torchao. Options name granularities."""

    def prepare(model: nn.Module, batches: Batches) -> None:
        library = import_module("torchao.quantization")
        made = {k: getattr(library, v)() for k, v in options.items()}
        library.quantize_(model, getattr(library, name)(**made))

    return Row(prepare, library="torchao")


FEEDBACK = {"rounding": "error_feedback"}

ROWS: dict[str, Row] = {
    "FP32": Row(),
    "BF16": Row(lambda model, batches: model.bfloat16()),
    "torchao int8, weight only, per channel": torchao("Int8WeightOnlyConfig"),
    "torchao int8, dynamic": torchao("Int8DynamicActivationInt8WeightConfig"),
    **{
        f"WeightOnly({spelled})": ours(config)
        for spelled, config in {
            "e4m3fn": WeightOnly("e4m3fn"),
            "e5m2": WeightOnly("e5m2"),
            "int8": WeightOnly("int8"),
            "e4m3fn, tensor": WeightOnly("e4m3fn", "tensor"),
            "mxfp8": WeightOnly("mxfp8"),
            "e2m3fn, 32": WeightOnly("e2m3fn", 32, "e8m0"),
            "e3m2fn, 32": WeightOnly("mxfp6"),
            "int4, 32": WeightOnly("int4", 32),
            "int4, 128": WeightOnly("int4", 128),
            "nvfp4": WeightOnly("nvfp4"),
            "mxfp4": WeightOnly("mxfp4"),
            "int4, 32, error feedback": WeightOnly("int4", 32, **FEEDBACK),
            "int4, 128, error feedback": WeightOnly("int4", 128, **FEEDBACK),
            "nvfp4, error feedback": WeightOnly("nvfp4", **FEEDBACK),
            "mxfp4, error feedback": WeightOnly("mxfp4", **FEEDBACK),
            "mxfp4, rotate": WeightOnly("mxfp4", rotate=True),
            "mxfp4, rotate, error feedback": WeightOnly("mxfp4", rotate=True, **FEEDBACK),
        }.items()
    },
    "Dynamic(e4m3fn), per token": ours(Dynamic("e4m3fn")),
    "Dynamic(e4m3fn), per tensor": ours(Dynamic("e4m3fn", "tensor", input_granularity="tensor")),
    "Dynamic(int8), per token": ours(Dynamic("int8")),
    "Dynamic(mxfp8)": ours(Dynamic("mxfp8")),
    "Dynamic(nvfp4)": ours(Dynamic("nvfp4")),
    **{
        f"Static({name}), per tensor, {observer}": ours(Static(name, observer=observer))
        for name in ("e4m3fn", "int8")
        for observer in ("amax", "percentile", "least_error")
    },
    **{
        f"Static({name}), per tensor, amax, fold": ours(Static(name, fold=True))
        for name in ("e4m3fn", "int8")
    },
    **{
        f"KVCache({name})": Row(cache=lambda name=name: sct.KVCache(name))
        for name in ("bf16", "e4m3fn", "int8", "e2m1fn")
    },
}


@dataclass(frozen=True)
class Bar:
    """The most that a row may lose on a model."""

    model: str
    row: str
    figure: str
    limit: float


BARS = [
    *(
        Bar("bert", f"Static(e4m3fn), per tensor, {observer}", "accuracy", 0.3)
        for observer in ("amax", "percentile", "least_error")
    ),
    *(Bar(model, "WeightOnly(e4m3fn)", "loss", 0.005) for model in ("gpt", "bert")),
    *(Bar(model, "WeightOnly(nvfp4, error feedback)", "loss", 0.03) for model in ("gpt", "bert")),
    *(Bar(model, "WeightOnly(mxfp4, error feedback)", "loss", 0.05) for model in ("gpt", "bert")),
    Bar("gpt", "KVCache(e4m3fn)", "loss", 0.005),
]


# --- models and their measures ---------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A trained model, batches of training data for calibration, and its measure."""

    model: nn.Module
    batches: Batches
    measure: Callable[[nn.Module, Row], Figures]


def gpt_subject(corpus: Corpus, options: argparse.Namespace, seed: int) -> Subject:
    model = ptq_models.gpt(corpus, options.sizes, seed, options.models)
    size = model.config.block_size
    generator = torch.Generator().manual_seed(seed)
    batches = [
        {"tokens": draw_batch(corpus.train, size, 16, generator)[0]} for _ in range(CALIBRATION)
    ]
    count = min(options.windows, (len(corpus.held_out) - 1) // size)
    inputs, targets = (
        t[: count * size].view(count, size) for t in (corpus.held_out, corpus.held_out[1:])
    )

    def measure(model: nn.Module, row: Row) -> Figures:
        run = (lambda part: model(part)[0]) if row.cache is None else partial(cached, model, row)
        logits = torch.cat([run(part).float() for part in inputs.split(64)])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()}

    return Subject(model, batches, measure)


def cached(model: GPT, row: Row, tokens: Tensor) -> Tensor:
    """Return the logits of `tokens` (B, T). The first quarter of the tokens is a prompt. The others
    follow one by one. Attention reads all keys and values from the cache."""
    cache, prompt = row.cache(), tokens.shape[1] // 4  # type: ignore[misc]
    found, at = [], 0
    for part in (tokens[:, :prompt], *tokens[:, prompt:].split(1, dim=1)):
        length = part.shape[1]
        places = model.position_embedding.weight[at : at + length]
        x = model.token_embedding(part) + places
        for i, block in enumerate(model.blocks):
            qkv = block.attention.qkv(block.norm1(x)).chunk(3, dim=-1)
            q, k, v = (t.unflatten(-1, (block.attention.n_head, -1)).transpose(1, 2) for t in qkv)
            k, v = cache.update(i, k, v)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
            x = x + block.attention.proj(y.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.norm2(x))
        found.append(model.head(model.norm(x)))
        at += length
    return torch.cat(found, dim=1)


def bert_subject(data: ptq_models.Functions, options: argparse.Namespace, seed: int) -> Subject:
    model = ptq_models.bert(data, options.sizes, seed, options.models)
    chosen = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    batches = [
        ptq_models.padded([data.train[i] for i in part])
        for part in chosen[: 16 * CALIBRATION].split(16)
    ]
    parts = [ptq_models.padded(data.held_out[i : i + 64]) for i in range(0, len(data.held_out), 64)]

    def measure(model: nn.Module, row: Row) -> Figures:
        logits = torch.cat([model(**part).logits.float() for part in parts])
        right = logits.argmax(dim=1) == data.held_out_labels
        return {
            "accuracy": 100 * right.float().mean().item(),
            "loss": F.cross_entropy(logits, data.held_out_labels).item(),
        }

    return Subject(model, batches, measure)


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights of the linear layers, with their scales."""
    weights = (m.weight for m in model.modules() if isinstance(m, nn.Linear))
    return sum(storages(weights).values())


# --- operators of an inference ---------------------------------------------------------------

#: Rows whose operators are counted. `Dynamic` shows that the count is not blind.
COUNTED = ("Static(e4m3fn), per tensor, amax", "Dynamic(e4m3fn), per tensor")
MEASURES = ("amax", "amin", "aminmax", "max", "min", "norm", "linalg_vector_norm")


class Operators(TorchDispatchMode):
    """Counts the operators of a forward pass on plain tensors, the operators inside a quantised
    product among them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the quantised weight calls operators on its parts next
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def measures(self) -> int:
        return sum(self.counts[name] for name in MEASURES)


def count_measures(row: Row, subject: Subject) -> int:
    """Return the number of operators in one forward pass that measure a tensor's range."""
    model = copy.deepcopy(subject.model)
    row.prepare(model, subject.batches)
    with torch.no_grad(), Operators() as operators:
        model(**subject.batches[0])
    return operators.measures()


# --- the table -------------------------------------------------------------------------------


@torch.no_grad()
def measure(rows: Iterable[str], subject: Subject, tell: Callable[[str], None]) -> Run:
    """Return the figures of each row on one model."""
    found: Run = {}
    for name in rows:
        row, start = ROWS[name], time.perf_counter()
        model = copy.deepcopy(subject.model)
        row.prepare(model, subject.batches)
        found[name] = subject.measure(model, row) | {"bytes": float(weight_bytes(model))}
        shown = ", ".join(f"{k} {v:.6g}" for k, v in found[name].items())
        tell(f"{name}: {shown} ({time.perf_counter() - start:.1f} s)")
    return found


def differences(runs: Runs, row: str, figure: str) -> list[float]:
    """Return a row's figure less FP32's, for each seed."""
    return [run[row][figure] - run["FP32"][figure] for run in runs]


def lost(runs: Runs, row: str, figure: str) -> float:
    """Return the mean that a row loses against FP32."""
    sign = -1 if figure == "accuracy" else 1
    return sign * statistics.mean(differences(runs, row, figure))


def spread(values: Sequence[float], form: str) -> str:
    """Return the mean of some seeds and their range."""
    mean, low, high = (format(f(values), form) for f in (statistics.mean, min, max))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def table(kind: str, runs: Runs) -> str:
    """Return the Markdown table of one kind of model. The first row has FP32's figures."""
    rows = []
    for name in runs[0]:
        cells = {kind: f"`{name}`" if "(" in name else name}
        for figure, form in FORMS.items():
            if figure not in runs[0]["FP32"]:
                continue
            plain = name == "FP32"
            values = [r[name][figure] for r in runs] if plain else differences(runs, name, figure)
            cells[f"{figure}, {UNITS[figure]}"] = spread(values, form.strip("+") if plain else form)
        cells["bytes"] = f"{runs[0][name]['bytes'] / runs[0]['FP32']['bytes']:.3f}"
        rows.append(cells)
    return markdown(rows)


def verdicts(found: dict[str, Runs]) -> list[tuple[str, bool]]:
    """Return a line for each bar whose row was measured, and whether it is met."""
    lines = []
    for bar in BARS:
        runs = found.get(bar.model)
        if not runs or bar.row not in runs[0]:
            continue
        loses = lost(runs, bar.row, bar.figure)
        met = loses <= bar.limit
        line = f"{bar.model}, {bar.row}: loses {loses:{FORMS[bar.figure]}} {UNITS[bar.figure]}"
        lines.append((f"{line} (bar: at most {bar.limit}: {'met' if met else 'NOT met'})", met))
    return lines


def claims(kind: str, runs: Runs) -> Iterable[str]:
    """Compare each FP8 row with the INT8 row of the same config. FP8-BERT (arXiv 2312.05725) says
    that INT8 loses more."""
    for row in runs[0]:
        other = row.replace("e4m3fn", "int8")
        if other != row and other in runs[0]:
            figures = [f for f in FORMS if f in runs[0]["FP32"]]
            told = (
                f"{lost(runs, other, f):{FORMS[f]}} and {lost(runs, row, f):{FORMS[f]}} {UNITS[f]}"
                for f in figures
            )
            more = lost(runs, other, "loss") > lost(runs, row, "loss")
            yield (
                f"{kind}, {other} and {row} lose {', '.join(told)}: INT8 loses "
                f"{'more' if more else 'no more'}"
            )


def chosen_rows(kind: str, options: argparse.Namespace) -> list[str]:
    """Return the rows for one kind of model, FP32 first."""
    rows = ["FP32", *(name for name in options.rows if name != "FP32")]
    return [r for r in rows if installed(ROWS[r].library) and (kind == "gpt" or not ROWS[r].cache)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, help="the text of the GPT, which needs one")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="keep trained weights there")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=("gpt", "bert"), default=("gpt", "bert"))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument(
        "--sizes", nargs="+", default=[], metavar="NAME=N", help="fields of `ptq_models.Sizes`"
    )
    parser.add_argument("--windows", type=int, default=256, help="held-out windows of the GPT")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="models of no use, in seconds")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    options.sizes = sizes_of(options.sizes, options.quick, parser)
    if not installed("torchao"):
        print("torchao is not installed: its rows are left out")
    found: dict[str, Runs] = {}
    good = True
    for kind in options.only:
        make = maker(kind, options)
        if make is None:
            continue
        runs = found[kind] = []
        for seed in range(options.seeds):
            subject = make(seed)
            tell = partial(print, f"{kind}, seed {seed},", file=sys.stderr, flush=True)
            runs.append(measure(chosen_rows(kind, options), subject, tell))
        parameters = sum(p.numel() for p in subject.model.parameters())
        print(f"\n{kind}, {parameters:,} parameters, seeds: {options.seeds}; ", end="")
        print(f"torch {torch.__version__}; {device_name(torch.device('cpu'))}\n")
        print(table(kind, runs) + "\n")
        for name in COUNTED:
            if name in runs[0]:
                count = count_measures(ROWS[name], subject)
                bar = ""
                if name.startswith("Static"):
                    good &= not count
                    bar = f" (bar: 0: {'NOT met' if count else 'met'})"
                print(f"{kind}, {name}: {count} operators of a forward measure a range{bar}")
        for line in claims(kind, runs):
            print(line)
    for line, met in verdicts(found):
        print(line)
        good &= met
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if good or options.quick else 1


def sizes_of(given: list[str], quick: bool, parser: argparse.ArgumentParser) -> ptq_models.Sizes:
    """Return the sizes that the command line asks for."""
    sizes = ptq_models.QUICK if quick else ptq_models.Sizes()
    known = asdict(sizes)
    for text in given:
        name, _, value = text.partition("=")
        if name not in known or not value.isdigit():
            parser.error(f"--sizes takes {'=N, '.join(known)}=N with whole numbers; got {text!r}")
        known[name] = int(value)
    return ptq_models.Sizes(**known)


def maker(kind: str, options: argparse.Namespace) -> Callable[[int], Subject] | None:
    """Return the function that makes the trained model of a seed, or None after a message if
    something is missing."""
    if kind == "gpt":
        if options.text is None:
            print("the GPT is left out: --text FILE gives it a text to train on")
            return None
        corpus = load(options.text, options.sizes.context)
        return partial(gpt_subject, corpus, options)
    missing = [library for library in ("tokenizers", "transformers") if not installed(library)]
    if missing:
        print(f"the BERT is left out: {' and '.join(missing)} not installed")
        return None
    return partial(bert_subject, ptq_models.functions(options.sizes), options)


if __name__ == "__main__":
    sys.exit(main())
