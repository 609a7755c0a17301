"""What the ranks of a job tell each other while they save and load."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from scaledtensor.errors import CheckpointError

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """The processes of a group; one process where there is no group."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.several = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.several else 0
        self.size = dist.get_world_size(group) if self.several else 1

    def gather(self, mine: T) -> list[T]:
        """What each rank gave, in their order, on every rank.

        Raises:
            CheckpointError: one is gone.
        """
        if not self.several:
            return [mine]
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, mine, self.group)
        except RuntimeError as error:
            raise CheckpointError(f"another rank is gone, or does not answer: {error}") from error
        return found

    def agree(self, action: Callable[[], T]) -> T:
        """What `action` returns here; where it fails on one rank, an error on every rank, so that
        none waits for another."""
        result: Any = None
        failed: Exception | None = None
        try:
            result = action()
        except Exception as error:
            failed = error
        said = self.gather(None if failed is None else f"{failed}")
        if failed is not None:
            raise failed
        for rank, text in enumerate(said):
            if text is not None:
                raise CheckpointError(f"rank {rank}: {text}")
        return result  # type: ignore[no-any-return]
