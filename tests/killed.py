"""Processes that are killed on the way, for tests of what is left then."""

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

#: Seconds after which a process that should have ended is killed.
PATIENCE = 60


def forked(job: Callable[..., Any], *args: Any) -> int:
    """Start `job(*args)` in a copy of this process, without the seconds of a new one; its id."""
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
    """How it ended: its exit status, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def dies_at(owner: Any, name: str, call: int = 1, after: bool = False) -> None:
    """Let this process be killed at a call of `owner.name`, as by a loss of power."""
    inner, calls = getattr(owner, name), []

    def deadly(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) < call:
            return inner(*args, **kwargs)
        if after:
            inner(*args, **kwargs)
        return os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, deadly)
