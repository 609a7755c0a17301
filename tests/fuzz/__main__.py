"""`python tests/fuzz` runs random programs against float64, from a seed that it prints.

It shrinks a program that differs and writes it to `tests/fuzz/cases`, where the suite finds it. The
exit status is then 1.

`python tests/fuzz --kills 200 --damages 100` tries faults instead: kills, damaged files, and limits
on file size. With `--record docs/reliability.json` either command saves its counts, and `python
docs/write_reliability.py` makes a page of them.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from faults import damages, kills, limits
from trying import tried

CASES = Path(__file__).parent / "cases"


def results(
    jobs: list[tuple[int, str | None]], processes: int
) -> Iterator[tuple[int, list[str], str]]:
    if processes < 2:
        yield from map(tried, jobs)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(tried, jobs, chunksize=8)


def faults(options: argparse.Namespace) -> int:
    """Count kills and damaged files. Return 1 if anything was lost."""
    torch.set_num_threads(1)
    print(f"{options.kills} kills, {options.damages} damages, seed {options.seed}", flush=True)
    told = {
        "seed": options.seed,
        "kills": kills(options.kills, options.seed),
        "limits": limits(options.damages, options.seed),
        "files": damages(options.damages, options.seed),
        "machine": f"{platform.system()} on {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print(json.dumps(told, indent=2))
    record(options.record, lambda counts: counts.update(faults=told))
    counted = [told["kills"], told["limits"], *told["files"].values()]
    return int(any(c["lost"] for c in counted) or told["kills"]["back"] > 0)


def record(path: Path | None, put: Callable[[dict[str, Any]], None]) -> None:
    """Put counts into the file, beside its other counts."""
    if path is not None:
        counts = json.loads(path.read_text()) if path.exists() else {}
        put(counts)
        path.write_text(json.dumps(counts, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6 * 1000)
    parser.add_argument("--compile", metavar="BACKEND", help="aot_eager or inductor")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kills", type=int, default=0, help="try faults, with so many kills")
    parser.add_argument("--damages", type=int, default=20, help="of each kind of file")
    parser.add_argument("--record", type=Path, help="where the counts go")
    options = parser.parse_args()
    if options.kills:
        return faults(options)
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
    told = {"programs": options.programs, "seed": options.seed, "differ": wrong}
    how = options.compile or "eager"
    record(options.record, lambda counts: counts.setdefault("programs", {}).update({how: told}))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
