"""For every test: no operator runs without a rule, and the examples are the same each run."""

import sys

import pytest
import torch
from hypothesis import settings

import scaledtensor as sct

# Most tensors here are tiny: a second thread waits more than it works.
torch.set_num_threads(1)

settings.register_profile("scaledtensor", deadline=None, derandomize=True)
settings.load_profile("scaledtensor")

# For every item of a parametrized test hypothesis wraps the settings of the one before, and asks
# all of them in turn for a database where there is none.
sys.setrecursionlimit(20_000)


@pytest.fixture(autouse=True, scope="session")
def _no_operator_without_a_rule():
    with sct.on_missing("error"):
        yield
