"""Progress of a training on stderr: a bar where tqdm is installed, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

LINES = 5  # plain lines per training


class Progress:
    """`with Progress("FP32", steps) as progress: ... progress(loss)` after each step."""

    def __init__(self, title: str, steps: int, start: int = 0, quiet: bool = False) -> None:
        self.title, self.steps, self.done, self.tells = title, steps, start, not quiet
        self.every = max(1, steps // LINES)
        self.bar = (
            self.tells
            and tqdm
            and tqdm(
                total=steps,
                initial=start,
                desc=title,
                unit="step",
                dynamic_ncols=True,
                mininterval=0.5,
            )
        )

    def __call__(self, loss: float) -> None:
        self.done += 1
        if self.bar:
            self.bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            self.bar.update()
        elif self.tells and self.done in (self.steps, *range(0, self.steps, self.every)):
            print(f"{self.title}: step {self.done}/{self.steps}, loss {loss:.4f}", file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.bar:
            self.bar.close()
