"""A slice of the faults of `make fuzz`; each day has another slice."""

import subprocess
import sys
import time
from pathlib import Path

from faults import damages, kills, limits


def seed() -> int:
    return int(time.time() // 86_400)


def test__a_training_that_is_killed__loses_nothing():
    print(f"seed {seed()}")
    told = kills(5, seed())
    assert told["kills"] == 5
    assert told["steps"] > 0
    assert told["lost"] == told["back"] == 0, f"seed {seed()}: {told}"


def test__damaged_files__are_refused_by_name_and_change_nothing():
    print(f"seed {seed()}")
    for kind, told in damages(6, seed()).items():
        assert told["tried"] >= 6
        assert told["lost"] == 0, f"{kind}, seed {seed()}: {told}"


def test__a_limit_on_files__is_told_and_leaves_the_checkpoint_before():
    told = limits(4, seed())
    assert told["refused"] == told["tried"] == 4, f"seed {seed()}: {told}"


def test__the_page__is_written_from_the_record():
    page = Path(__file__).parents[2] / "docs" / "reliability.md"
    script = page.with_name("write_reliability.py")
    written = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert page.read_text() == written.stdout, "python docs/write_reliability.py"
