"""The caller of an operator, for functions of torch that give no other sign of their purpose."""

import sys

__all__ = ["called_by"]


def called_by(module: str, function: str = "") -> bool:
    """Whether the first caller outside this package is in a module whose name begins so; with
    `function`, in its function of that name."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("scaledtensor."):
        frame = frame.f_back
    named = not function or frame.f_code.co_name == function
    return named and str(frame.f_globals["__name__"]).startswith(module)
