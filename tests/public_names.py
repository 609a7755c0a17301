"""The frozen list of public names, public_names.txt: each line is a module and one of its names.

    python tests/public_names.py                # after a decision about a name
    python tests/public_names.py scaledtensor.x # adds a module to the list

Adding a name is a decision. Changing or removing a name breaks somebody's program.
"""

import sys
from importlib import import_module
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")


def frozen() -> list[str]:
    return LIST.read_text().splitlines()


def modules() -> list[str]:
    """Modules of the list. Each has all of its public names there."""
    return sorted({line.split()[0] for line in frozen()})


def current(of: list[str]) -> list[str]:
    """Return the lines of the list for the names in the modules' `__all__`."""
    return sorted(f"{module} {name}" for module in of for name in import_module(module).__all__)


if __name__ == "__main__":
    lines = current(sorted({*modules(), *sys.argv[1:]}))
    LIST.write_text("".join(f"{line}\n" for line in lines))
