"""Try one program of the fuzzer in any process. Workers can import this module."""

import warnings

import torch
from programs import Program, differences, drawn, smaller, sound


def told(program: Program, compiled: str | None) -> list[str]:
    try:
        return differences(program, compiled)
    except Exception as error:
        return [f"raised {type(error).__name__}: {str(error).splitlines()[0]}"]


def tried(job: tuple[int, str | None]) -> tuple[int, list[str], str]:
    """Return the differences of a seed's program, and a small program that shows them."""
    seed, compiled = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    program = drawn(seed)
    found = told(program, compiled)
    if not found:
        return seed, [], ""
    small = smaller(sound(program), lambda p: bool(told(p, compiled)))
    return seed, found, small.dump()
