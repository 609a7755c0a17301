"""Processes that are killed at work, for tests of the remaining files."""

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

#: Seconds after which a process that did not end is killed.
PATIENCE = 60


def forked(job: Callable[..., Any], *args: Any) -> int:
    """Start `job(*args)` in a copy of this process, without the seconds of a new one. Return its
    id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.alarm(PATIENCE)
        job(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Return its exit status, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def dies_at(owner: Any, name: str, call: int = 1, after: bool = False) -> None:
    """Kill this process at a call of `owner.name`, like a loss of power."""
    inner, calls = getattr(owner, name), []

    def deadly(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) < call:
            return inner(*args, **kwargs)
        if after:
            inner(*args, **kwargs)
        return os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, deadly)
