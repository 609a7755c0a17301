"""Faults of a training: kills at any moment, and files that are cut or changed.

`kills` trains in a copy of this process, kills it by SIGKILL after a random time, and starts it
again from the newest checkpoint, until it has been killed as often as asked. `damages` cuts files
and flips bits. Both report losses, and there should be none.
"""

import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import scaledtensor as sct
from scaledtensor.errors import CheckpointError

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `python tests/fuzz`
from killed import ended, forked

KEEP = 2
DIM = 16


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with something for every part of a checkpoint: FP8 states, and masters by pairs."""
    torch.manual_seed(0)
    model = sct.scale_model(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)))
    return model, sct.optim.AdamW(
        model.parameters(),
        1e-2,
        state_format="e4m3fn",
        state_rounding="stochastic",
        allow_non_unit_scaling_params=True,
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    rng = torch.Generator().manual_seed(step)
    optimizer.zero_grad()
    model(torch.randn(4, DIM, generator=rng)).square().mean().backward()
    optimizer.step()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """Return everything in the model and the optimizer as bytes, to compare."""
    stream = io.BytesIO()
    values = []
    for x in [*model.state_dict().values(), *_states(optimizer)]:
        parts = [getattr(x, n) for n in x.INNER] if hasattr(x, "INNER") else [x]
        for part in parts:
            raw = part.detach().contiguous().reshape(-1).view(torch.uint8)
            values.append(raw.numpy().tobytes())
    for value in values:
        stream.write(value)
    drawn = [(group["draws"], group["seed"]) for group in optimizer.param_groups]
    stream.write(repr(drawn).encode())
    return stream.getvalue()


def _states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (state[name] for name in sorted(state))


def resumed(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """Return the model and optimizer of the newest checkpoint, or of the start, and the step."""
    model, optimizer = training()
    newest = sct.checkpoint.latest(folder)
    if newest is None:
        return model, optimizer, 0
    return model, optimizer, sct.checkpoint.load(newest, model, optimizer).extra["step"]


def train(folder: Path, until: int) -> None:
    torch.set_num_threads(1)
    model, optimizer, step = resumed(folder)
    while step < until:
        train_step(model, optimizer, step)
        step += 1
        name = sct.checkpoint.step_folder(folder, step)
        sct.checkpoint.save(name, model, optimizer, extra={"step": step})
        sct.checkpoint.prune(folder, keep=KEEP)


def kills(count: int, seed: int) -> dict[str, Any]:
    """Kill one training this often at random moments. `lost` counts checkpoints that did not load
    or differ from the uninterrupted run. `back` counts kills after which the newest checkpoint was
    older than before."""
    rng, told = random.Random(seed), Counter(kills=0, lost=0, back=0)
    model, optimizer = training()
    wanted = [bits(model, optimizer)]  # The bits of each step of the uninterrupted run.
    with tempfile.TemporaryDirectory() as name:
        # Modules that load on first use are imported here; otherwise a child would be killed before
        # that.
        train(Path(name), 12)
        start = time.monotonic()
        train(Path(name), 15)
        longest = 3 * (time.monotonic() - start)  # This takes about nine steps.
    with tempfile.TemporaryDirectory() as name:
        folder, reached = Path(name), 0
        while told["kills"] < count:
            child = forked(train, folder, 1_000_000)
            time.sleep(rng.uniform(0.02, longest))
            os.kill(child, signal.SIGKILL)
            assert ended(child) == -signal.SIGKILL
            told["kills"] += 1
            try:
                own, states, step = resumed(folder)
            except CheckpointError as error:
                told["lost"] += 1
                print(f"after kill {told['kills']}: {error}", flush=True)
                continue
            while len(wanted) <= step:
                train_step(model, optimizer, len(wanted) - 1)
                wanted.append(bits(model, optimizer))
            if step:
                told["lost"] += bits(own, states) != wanted[step]
            told["back"] += step < reached
            reached = step
    return dict(told) | {"steps": reached}


def damages(count: int, seed: int) -> dict[str, dict[str, int]]:
    """Cut and flip bits this often in each kind of file. `refused` counts our errors that name the
    file. `harmless` counts files that load to the same bits. `lost` counts everything else."""
    rng = random.Random(seed)
    model, optimizer = training()
    train_step(model, optimizer, 0)
    found: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run, single, parts = folder / "run", folder / "one.safetensors", folder / "parts"
        sct.checkpoint.save(run, model, optimizer, extra={"step": 1})
        sct.checkpoint.save_safetensors(model, single)
        parts.mkdir()
        sct.checkpoint.save_safetensors(model, parts / "model-1.safetensors")
        names = dict.fromkeys(model.state_dict(), "model-1.safetensors")
        index = parts / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": names}))
        for file in [*sorted(run.iterdir()), single, index, parts / "model-1.safetensors"]:
            kind = "parts (*.distcp)" if file.suffix == ".distcp" else file.name
            told = found.setdefault(kind, Counter(tried=0, refused=0, harmless=0, lost=0))
            source = run if file.parent == run else single if file == single else parts
            whole = file.read_bytes()
            for n in range(count):
                if n % 2:
                    wrong = bytearray(whole)
                    wrong[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
                else:
                    wrong = bytearray(whole[: rng.randrange(len(whole))])
                file.write_bytes(wrong)
                told["tried"] += 1
                told[_outcome(source, file, bits(model, optimizer))] += 1
            file.write_bytes(whole)
    return {kind: dict(told) for kind, told in found.items()}


def _outcome(source: Path, file: Path, wanted: bytes) -> str:
    model, optimizer = training()
    before = bits(model, optimizer)
    try:
        if source.suffix == ".safetensors" or (source / "model-1.safetensors").exists():
            read = sct.checkpoint.load_safetensors(source)
            sct.checkpoint.load_into(model, read)
            saved, _ = training()
            train_step(saved, _, 0)
            same = [_values(x) for x in model.state_dict().values()] == [
                _values(x) for x in saved.state_dict().values()
            ]
            return "harmless" if same else "lost"
        sct.checkpoint.load(source, model, optimizer)
        return "harmless" if bits(model, optimizer) == wanted else "lost"
    except CheckpointError as error:
        named = file.name in str(error) or source.name in str(error)
        if bits(model, optimizer) != before:
            return "lost"
        return "refused" if named else "lost"
    except Exception as error:
        print(f"{file.name}: {type(error).__name__}: {error}", flush=True)
        return "lost"


def _values(x: torch.Tensor) -> list[float]:
    whole = x.dequantize() if hasattr(x, "INNER") else x
    values: list[float] = whole.flatten().tolist()
    return values


def limits(count: int, seed: int) -> dict[str, int]:
    """Save this often over a checkpoint under a random limit on file size, which acts like a full
    disk. `refused` counts the saves that report it and leave the previous checkpoint whole."""
    rng, told = random.Random(seed), Counter(tried=0, refused=0, saved=0, lost=0)
    model, optimizer = training()
    train_step(model, optimizer, 0)
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        sct.checkpoint.save(run, model, optimizer, extra={"step": 1})
        before = bits(model, optimizer)
        train_step(model, optimizer, 1)
        largest = max(file.stat().st_size for file in run.iterdir())
        for _ in range(count):
            code = ended(forked(_saves_under, run, rng.randrange(largest), model, optimizer))
            own, states = training()
            step = sct.checkpoint.load(run, own, states).extra["step"]
            wanted = before if step == 1 else bits(model, optimizer)
            whole = bits(own, states) == wanted and (step == 1) == (code == REFUSED)
            told["tried"] += 1
            told[{REFUSED: "refused", 0: "saved"}.get(code, "lost") if whole else "lost"] += 1
            if step != 1:
                break
    return dict(told)


REFUSED = 7


def _saves_under(run: Path, size: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        sct.checkpoint.save(run, model, optimizer, extra={"step": 2})
    except CheckpointError as error:
        told = "limit on the size of files" in str(error) and run.name in str(error)
        os._exit(REFUSED if told else 8)
