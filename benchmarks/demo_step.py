"""Measure whole training steps of the demo, optimizer included: FP32, FP8 without scales, and ours.

    python -m benchmarks.demo_step [--threads 2] [--rounds 60] [--json FILE]

All rows run interleaved in one process, on the demo's model, text, batches and AdamW; a figure is
the median of a step. CPU time includes the time of waiting threads. Every tenth step rebalances the
parameters of our row: means include it, medians do not.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from benchmarks.timing import device_name, multiplies_bfloat16
from scaledtensor.apps import precision, text
from scaledtensor.apps.gpt import GPTConfig
from scaledtensor.apps.training import Settings, Trainer

ROWS = ("fp32", "fp8", "unit")
#: The most that "unit" may take of the CPU time of "fp32" on two threads, with bfloat16 units and
#: without.
BARS = {True: 1.7, False: 1.8}
WARM_UP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--text", type=Path, help="a text to train on, as the demo takes it")
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    corpus = text.load(options.text, 64)
    config = GPTConfig(len(corpus.vocabulary))
    trainers = {
        name: Trainer(config, precision.get(name), corpus, Settings(), device) for name in ROWS
    }
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
    for i in range(options.rounds + WARM_UP):
        for name, trainer in trainers.items():
            wall, cpu = time.perf_counter(), time.process_time()
            trainer.step()
            if i >= WARM_UP:
                spent[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    walls, cpus = (
        {name: [1e3 * pair[which] for pair in pairs] for name, pairs in spent.items()}
        for which in (0, 1)
    )
    median = statistics.median
    report = {
        "device": device_name(device),
        "torch": torch.__version__,
        "bar": BARS[multiplies_bfloat16(device)],
        "rows": {
            name: {
                "cpu_ms": median(cpus[name]),
                "wall_ms": median(walls[name]),
                "cpu": median(cpus[name]) / median(cpus["fp32"]),
                "wall": median(walls[name]) / median(walls["fp32"]),
                "mean_wall": statistics.mean(walls[name]) / statistics.mean(walls["fp32"]),
            }
            for name in trainers
        },
    }
    print(f"{report['device']}, torch {report['torch']}; bar of unit / fp32: {report['bar']}")
    print(f"{'row':6}{'CPU ms':>10}{'wall ms':>10}{'CPU':>8}{'wall':>8}{'mean wall':>11}")
    for name, row in report["rows"].items():
        print(
            f"{name:6}{row['cpu_ms']:10.1f}{row['wall_ms']:10.1f}{row['cpu']:8.2f}{row['wall']:8.2f}"
            f"{row['mean_wall']:11.2f}"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
