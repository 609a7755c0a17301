"""The trained models of `benchmarks.ptq`, kept in a folder so that they are trained once.

The GPT is `scaledtensor.apps.gpt.GPT`, trained on a text file, one training a seed. The BERT is
transformers' `BertModel`. One training by masked tokens reads the top-level modules of the standard
library; then each seed fine-tunes on functions of the library's packages, to tell the package from
the function. No held-out function is part of either training. All trainings are plain float32 and
`torch.optim.AdamW`.
"""

import ast
import hashlib
import json
import random
import re
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaledtensor.apps import precision
from scaledtensor.apps.gpt import GPT, GPTConfig
from scaledtensor.apps.text import Corpus, stdlib_text
from scaledtensor.apps.training import Progress, Settings, Trainer

CLASSES = 20
"""The number of packages."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the models and of their trainings. Each is part of the name of a kept model."""

    layers: int = 4
    width: int = 192
    context: int = 64
    batch: int = 8
    steps: int = 700
    bert_layers: int = 4
    bert_width: int = 128
    tokens: int = 64
    bert_batch: int = 16
    masked_steps: int = 400
    epochs: int = 6
    functions: int = 400
    """The most functions of one package."""
    text: int = 1_500_000
    """Characters for the training by masked tokens."""


QUICK = Sizes(1, 32, 32, 4, 3, 1, 32, 32, 8, 2, 0, functions=6, text=50_000)


def short_name(kind: str, parts: dict[str, Any]) -> str:
    """Return a file name that differs if anything in `parts` does."""
    text = json.dumps(parts, sort_keys=True)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.pt"


def kept(folder: Path | None, name: str, train: Callable[[], nn.Module], model: nn.Module) -> None:
    """Fill `model` with the weights in `folder / name`. If the file is missing, train, and write
    it."""
    path = None if folder is None else folder / name
    if path is not None and path.exists():
        model.load_state_dict(torch.load(path))
        return
    weights = train().state_dict()
    model.load_state_dict(weights)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights, path)


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Raise the learning rate over a tenth of the steps to the optimizer's, and lower it to 0."""
    rate = optimizer.param_groups[0]["lr"]
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=max(steps, 2), pct_start=0.1, cycle_momentum=False
    )


# --- the GPT ---------------------------------------------------------------------------------


def gpt_config(corpus: Corpus, sizes: Sizes) -> GPTConfig:
    heads = max(sizes.width // 64, 1)
    return GPTConfig(len(corpus.vocabulary), sizes.context, sizes.layers, heads, sizes.width)


def gpt(corpus: Corpus, sizes: Sizes, seed: int, folder: Path | None) -> GPT:
    """Return the trained GPT of a seed."""
    config = gpt_config(corpus, sizes)

    def train() -> nn.Module:
        settings = Settings(sizes.batch, 2e-3, seed)
        trainer = Trainer(config, precision.get("fp32"), corpus, settings, torch.device("cpu"))
        warm_up = schedule(trainer.optimizer, sizes.steps)
        with Progress(f"GPT, seed {seed}", sizes.steps) as progress:
            for _ in range(sizes.steps):
                progress(trainer.step())
                warm_up.step()
        return trainer.model

    parts = asdict(config) | {"batch": sizes.batch, "steps": sizes.steps, "text": corpus.digest}
    model = GPT(config)
    kept(folder, short_name(f"gpt-{seed}", parts), train, model)
    return model.eval()


# --- the functions of the standard library ---------------------------------------------------


@dataclass(frozen=True)
class Functions:
    """Functions as token ids with [CLS] first, their packages, and the names of the packages."""

    train: list[list[int]]
    train_labels: Tensor
    held_out: list[list[int]]
    held_out_labels: Tensor
    packages: list[str]
    vocabulary: int
    text: list[int]
    """The tokens of the text for the training by masked tokens."""


CLS, MASK, PADDING = 0, 1, 2


def definitions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions and methods under `node`, without the functions inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from definitions(child)


def texts_of(package: Path) -> list[str]:
    """Return the texts of a package's files, without its tests."""
    found = []
    for path in sorted(package.rglob("*.py")):
        if not {"test", "tests", "idle_test"} & set(path.relative_to(package).parts):
            with suppress(UnicodeDecodeError):  # some files show that a tool refuses them
                found.append(path.read_text(encoding="utf-8"))
    return found


def sources(texts: Sequence[str], most: int) -> Iterator[str]:
    """Yield the functions of more than two lines, until there are `most` or some more."""
    count = 0
    for text in texts:
        if count >= most:
            return
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        lines = text.splitlines()
        for node in definitions(tree):
            body = lines[node.lineno - 1 : node.end_lineno]
            if len(body) > 2:
                count += 1
                yield textwrap.dedent("\n".join(body))


def functions(sizes: Sizes) -> Functions:
    """Read the twenty packages with the most functions. Of each, draw functions in a random order
    that is the same in every run; a third of them are held out."""
    from tokenizers import ByteLevelBPETokenizer

    root = Path(sysconfig.get_path("stdlib"))
    packages = {p.parent.name: texts_of(p.parent) for p in root.glob("*/__init__.py")}
    counts = {
        name: sum(len(re.findall(r"^ *(?:async )?def ", text, re.M)) for text in held)
        for name, held in packages.items()
        if name != "test"
    }
    order = sorted(sorted(counts, key=lambda name: (-counts[name], name))[:CLASSES])
    text = stdlib_text(sizes.text)
    tokenizer = ByteLevelBPETokenizer()
    special = ["[CLS]", "[MASK]", "[PAD]"]
    tokenizer.train_from_iterator(
        [text], vocab_size=2048, special_tokens=special, show_progress=False
    )
    rng = random.Random(0)
    seen: set[str] = set()
    parts: dict[bool, list[tuple[list[int], int]]] = {False: [], True: []}
    for label, name in enumerate(order):
        texts = rng.sample(packages[name], len(packages[name]))
        chosen = [s for s in dict.fromkeys(sources(texts, 2 * sizes.functions)) if s not in seen]
        seen.update(chosen)
        rng.shuffle(chosen)
        for i, source in enumerate(chosen[: sizes.functions]):
            ids = [CLS, *tokenizer.encode(source).ids][: sizes.tokens]
            parts[i % 3 == 0].append((ids, label))
    rng.shuffle(parts[False])
    parts[True].sort(key=lambda item: len(item[0]))  # batches of one length need no padding
    train, held_out = parts[False], parts[True]
    return Functions(
        [ids for ids, _ in train],
        torch.tensor([label for _, label in train]),
        [ids for ids, _ in held_out],
        torch.tensor([label for _, label in held_out]),
        order,
        tokenizer.get_vocab_size(),
        tokenizer.encode(text).ids,
    )


def padded(ids: Sequence[list[int]]) -> dict[str, Tensor]:
    """Return the inputs of BERT for some sequences: ids and mask, (sequences, longest)."""
    longest = max(map(len, ids))
    rows = [row + [PADDING] * (longest - len(row)) for row in ids]
    tokens = torch.tensor(rows)
    return {"input_ids": tokens, "attention_mask": (tokens != PADDING).long()}


# --- the BERT --------------------------------------------------------------------------------


def bert_config(data: Functions, sizes: Sizes) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=data.vocabulary,
        hidden_size=sizes.bert_width,
        num_hidden_layers=sizes.bert_layers,
        num_attention_heads=max(sizes.bert_width // 32, 1),
        intermediate_size=4 * sizes.bert_width,
        max_position_embeddings=sizes.tokens,
        attention_probs_dropout_prob=0.0,
        pad_token_id=PADDING,
        num_labels=len(data.packages),
    )


def masked(tokens: Tensor, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mask 15 % of the tokens as BERT does: 80 % of them become [MASK], 10 % a random token. The
    targets of the others are -100."""
    chosen = torch.rand(tokens.shape, generator=generator) < 0.15
    how = torch.rand(tokens.shape, generator=generator)
    noise = torch.randint(3, vocabulary, tokens.shape, generator=generator)
    inputs = torch.where(chosen & (how < 0.8), MASK, tokens)
    inputs = torch.where(chosen & (how > 0.9), noise, inputs)
    return inputs, torch.where(chosen, tokens, -100)


def pretrained(data: Functions, sizes: Sizes, folder: Path | None) -> nn.Module:
    """Return the BERT after the training by masked tokens."""
    from transformers import BertForMaskedLM

    def train() -> nn.Module:
        torch.manual_seed(0)
        model = BertForMaskedLM(bert_config(data, sizes))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        warm_up = schedule(optimizer, sizes.masked_steps)
        text, generator = torch.tensor(data.text), torch.Generator().manual_seed(0)
        with Progress("BERT, masked tokens", sizes.masked_steps) as progress:
            for _ in range(sizes.masked_steps):
                starts = torch.randint(
                    len(text) - sizes.tokens, (sizes.bert_batch, 1), generator=generator
                )
                windows = text[starts + torch.arange(sizes.tokens)]
                inputs, targets = masked(windows, data.vocabulary, generator)
                loss = model(input_ids=inputs, labels=targets).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                warm_up.step()
                progress(loss.item())
        return model

    model = BertForMaskedLM(bert_config(data, sizes))
    names = ("bert_layers", "bert_width", "tokens", "bert_batch", "masked_steps")
    parts = {name: getattr(sizes, name) for name in names} | {"text": data.text}
    kept(folder, short_name("bert-masked", parts), train, model)
    return model


def bert(data: Functions, sizes: Sizes, seed: int, folder: Path | None) -> nn.Module:
    """Return the BERT that a seed fine-tuned to tell packages."""
    from transformers import BertForSequenceClassification

    def train() -> nn.Module:
        torch.manual_seed(seed)
        model = BertForSequenceClassification(bert_config(data, sizes))
        model.bert.load_state_dict(pretrained(data, sizes, folder).bert.state_dict(), strict=False)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, fused=True)
        batches = -(-len(data.train) // sizes.bert_batch)
        warm_up = schedule(optimizer, sizes.epochs * batches)
        with Progress(f"BERT, seed {seed}", sizes.epochs * batches) as progress:
            for _ in range(sizes.epochs):
                for chosen in torch.randperm(len(data.train)).split(sizes.bert_batch):
                    inputs = padded([data.train[i] for i in chosen])
                    loss = F.cross_entropy(model(**inputs).logits, data.train_labels[chosen])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    warm_up.step()
                    progress(loss.item())
        return model

    model = BertForSequenceClassification(bert_config(data, sizes))
    parts = asdict(sizes) | {"packages": data.packages, "train": data.train}
    for name in ("layers", "width", "context", "batch", "steps"):  # the GPT's
        del parts[name]
    kept(folder, short_name(f"bert-{seed}", parts), train, model)
    return model.eval()
