# ruff: noqa: E501 - a page has lines of 120
"""Writes docs/reliability.md from docs/reliability.json, which `tests/fuzz` records.

python tests/fuzz --programs 20000 --record docs/reliability.json
python tests/fuzz --programs 200 --compile aot_eager --record docs/reliability.json
python tests/fuzz --kills 200 --damages 100 --record docs/reliability.json
python docs/write_reliability.py > docs/reliability.md
"""

import json
from pathlib import Path

RECORD = Path(__file__).with_name("reliability.json")

PAGE = """# Reliability

`make fuzz` compares random programs with float64, kills a training, fills the disk and damages files. This page counts
the attempts and the losses of one run. Each run draws different faults, and `make test` tries a few of them each day.

    make fuzz
    python docs/write_reliability.py > docs/reliability.md

**Programs.** Random programs of 5 to 20 operators ran on ScaledTensors of several formats and scales, with their
backward passes, and in float64. The allowed difference follows from the formats.

| how | programs | first seed | beyond the bound |
|---|---|---|---|
{programs}

**Kills.** A training of a small scaled model saved a checkpoint after each step. AdamW kept E4M3FN states, rounded
stochastically. `kill -9` ended it {count} times at random moments. Each time it continued from its newest checkpoint,
and got to step {steps}. {lost} checkpoints did not load or differed in a bit from the uninterrupted run.
{back} times the newest checkpoint was older than at the kill before.

**Full disks.** A limit on the size of files, at random, ended {limits} saves over a checkpoint. {told} raised an error
that says so and left the earlier checkpoint whole.

**Damaged files.** Files were cut at a random byte, or a random bit of them was flipped (seed {seed}). "Refused" is a
`CheckpointError` that names the file or its folder, with an unchanged model and optimizer. "Harmless" is a
file that loads to the same bits. "Lost" is anything else.

| file | tried | refused | harmless | lost |
|---|---|---|---|---|
{rows}

{machine}, Python {python}, torch {torch}.
"""


def page() -> str:
    record = json.loads(RECORD.read_text())
    told = record["faults"]
    kinds = ("tried", "refused", "harmless", "lost")
    rows = [
        f"| `{name}` | " + " | ".join(str(own[kind]) for kind in kinds) + " |"
        for name, own in told["files"].items()
    ]
    programs = [
        f"| {how} | {own['programs']:,} | {own['seed']} | {own['differ']} |"
        for how, own in record["programs"].items()
    ]
    kills = told["kills"]
    return PAGE.format(
        programs="\n".join(programs),
        count=kills["kills"],
        steps=kills["steps"],
        lost=kills["lost"],
        back=kills["back"],
        limits=told["limits"]["tried"],
        told=told["limits"]["refused"],
        rows="\n".join(rows),
        **{name: told[name] for name in ("seed", "machine", "python", "torch")},
    )


if __name__ == "__main__":
    print(page(), end="")
