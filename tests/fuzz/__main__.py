"""`python tests/fuzz`: random programs against float64, from a seed that it prints.

A program that differs is made small and written to `tests/fuzz/cases`, where the suite finds it.
Exits with 1 if there was one.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from programs import Program, differences, drawn, smaller, sound

CASES = Path(__file__).parent / "cases"


def told(program: Program, compiled: str | None) -> list[str]:
    try:
        return differences(program, compiled)
    except Exception as error:
        return [f"raised {type(error).__name__}: {str(error).splitlines()[0]}"]


def tried(job: tuple[int, str | None]) -> tuple[int, list[str], str]:
    """What a seed's program found, and the program, made small, that finds it."""
    seed, compiled = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    program = drawn(seed)
    found = told(program, compiled)
    if not found:
        return seed, [], ""
    small = smaller(sound(program), lambda p: bool(told(p, compiled)))
    return seed, found, small.dump()


def results(
    jobs: list[tuple[int, str | None]], processes: int
) -> Iterator[tuple[int, list[str], str]]:
    if processes < 2:
        yield from map(tried, jobs)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(tried, jobs, chunksize=8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6 * 1000)
    parser.add_argument("--compile", metavar="BACKEND", help="aot_eager or inductor")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    print(f"{options.programs} programs from seed {options.seed}", flush=True)
    wrong, start = 0, time.time()
    jobs = [(options.seed + n, options.compile) for n in range(options.programs)]
    for seed, found, small in results(jobs, options.processes):
        if found:
            wrong += 1
            path = CASES / f"{seed}.json"
            path.write_text(small + "\n")
            print(f"seed {seed}: {found[0]}\n    {path}", flush=True)
    print(f"{options.programs} programs, {wrong} differ, {time.time() - start:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
