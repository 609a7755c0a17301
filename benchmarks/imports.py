"""Measure the cost of `import scaledtensor`, for programs that use it and for programs that do not.

    python -m benchmarks.imports [--rounds 15] [--json FILE]

There are three figures, each printed beside its bar:

- CPU seconds of `import scaledtensor` over the CPU seconds of `import torch`. The processes start
  in turns, with the bytecode of an earlier start;
- CPU time of a step of SGD on 1,000 plain parameters of 4 elements, after the import over before
  it; and while a scaled model is alive in the process over when it is gone;
- seconds until `scaledtensor --help` and a mistyped option are answered.

Figures are medians of runs in turns, on one thread.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

#: figure -> its largest allowed value
BARS = {
    "import scaledtensor / import torch": 1.2,
    "a plain step, after the import / before": 1.03,
    "a plain step, beside a scaled model / alone": 1.03,
    "seconds of --help": 1.0,
    "seconds of a mistyped option": 1.0,
}

# An import cannot be undone, so one process cannot alternate. Two processes fork off one that has
# torch, one of them imports this library, and they step in turns.
STEPS = """
import gc, json, os, statistics, sys
import torch
from benchmarks.timing import cpu_milliseconds

torch.set_num_threads(1)
parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(1000)]
for p in parameters:
    p.grad = torch.ones(4)
optimizer = torch.optim.SGD(parameters, 1e-3)
optimizer.step()
steps = int(sys.argv[1])

def forked(imported):
    (asked, ask), (answer, answers) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(ask)
        if imported:
            import scaledtensor
        while os.read(asked, 1):
            os.write(answers, repr(cpu_milliseconds(optimizer.step)).ljust(32).encode())
        os._exit(0)
    os.close(asked)

    def step():
        os.write(ask, b"1")
        return float(os.read(answer, 32))

    return step

processes = {"before": forked(False), "after": forked(True)}
times = {name: [] for name in (*processes, "alone", "beside")}
for _ in range(steps):
    for name, step in processes.items():
        times[name].append(step())

import scaledtensor

def build():
    return scaledtensor.scale_model(torch.nn.Linear(4, 4))

build()
gc.freeze()
for _ in range(steps):
    model = build()
    times["beside"].append(cpu_milliseconds(optimizer.step))
    del model
    gc.collect()
    times["alone"].append(cpu_milliseconds(optimizer.step))
print(json.dumps({name: statistics.median(spent) for name, spent in times.items()}))
"""


def environment() -> dict[str, str]:
    """Use one thread, and bytecode that is kept from one process to the next."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, kept.get("PYTHONPATH"))))
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def run(arguments: Sequence[str], code: int = 0) -> tuple[str, float, float]:
    """Return a Python process's output, its CPU seconds, and the seconds until it ended."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], env=environment(), capture_output=True, text=True, check=False
    )
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != code:
        raise RuntimeError(f"{arguments} ended with {done.returncode}: {done.stderr}")
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, spent, seconds


def imports(rounds: int) -> tuple[float, float]:
    """Return the CPU seconds of importing torch, and of importing this library."""
    programs = ("import torch", "import scaledtensor")
    spent: dict[str, list[float]] = {program: [] for program in programs}
    for i in range(rounds + 1):
        for program in programs:
            _, seconds, _ = run(["-c", program])
            if i:  # the first start writes bytecode
                spent[program].append(seconds)
    torch, ours = (statistics.median(spent[program]) for program in programs)
    return torch, ours


def steps(count: int) -> tuple[float, float, float]:
    """Return the milliseconds of a plain step before the import; the ratio of the time after the
    import to the time before it; and the ratio of the time with a live scaled model to the time
    without."""
    found = json.loads(run(["-c", STEPS, str(count)])[0])
    after, beside = found["after"] / found["before"], found["beside"] / found["alone"]
    return found["before"], after, beside


def answers(rounds: int) -> tuple[float, float]:
    """Return the seconds until the command line prints its help, and an error."""
    given = ((["--help"], 0), (["train", "--stepz", "3"], 2))
    found = [
        statistics.median(run(["-m", "scaledtensor", *a], code)[2] for _ in range(rounds))
        for a, code in given
    ]
    return found[0], found[1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=500, help="of each kind (default 500)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):
        # All processes run on one core, so other programs on it slow them alike.
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        try:
            measure(options)
        finally:
            os.sched_setaffinity(0, cores)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Print all figures beside their bars."""
    torch, ours = imports(options.rounds)
    before, after, beside = steps(options.steps)
    figures = dict(zip(BARS, (ours / torch, after, beside, *answers(options.rounds)), strict=True))
    print(f"import torch {torch:.2f} s, import scaledtensor {ours:.2f} s of CPU time")
    print(f"a step of SGD on 1,000 plain parameters: {before:.2f} ms before the import\n")
    for name, figure in figures.items():
        met = "met" if figure <= BARS[name] else "NOT met"
        print(f"{name:46}{figure:7.3f}   <= {BARS[name]}: {met}")
    if options.json is not None:
        seconds = {"import torch": torch, "import scaledtensor": ours, "step": before / 1e3}
        options.json.write_text(json.dumps({"seconds": seconds, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
