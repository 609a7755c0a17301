"""`world`: several processes on this machine, kept for all tests of a run."""

from collections.abc import Iterator

import pytest
from world import Worlds


@pytest.fixture(scope="session")
def world() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    worlds.stop()
