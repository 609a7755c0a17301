"""Benchmarks are imported from the root, and the threads that they set are put back."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
