"""For every test: no operator runs without a rule, and the examples are the same each run."""

import gc
import os
import sys

import pytest
import torch
from hypothesis import settings

import scaledtensor as sct

# Most tensors here are tiny: a second thread waits more than it works.
torch.set_num_threads(1)

# As many tests as there are cores compile at once, and Inductor's pool is one more process that
# imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# For each kind of device that is absent, torch.manual_seed formats the stack of its caller, which
# takes longer than many a test.
for devices in (torch.cuda, torch.xpu, torch.mtia):
    if not devices.is_available():
        devices.manual_seed_all = lambda seed: None

settings.register_profile("scaledtensor", deadline=None, derandomize=True)
settings.load_profile("scaledtensor")

# For every item of a parametrized test hypothesis wraps the settings of the one before, and asks
# all of them in turn for a database where there is none.
sys.setrecursionlimit(20_000)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nothing that collecting makes is garbage, and looking for some takes a fifth of its time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup():
    """Inductor's one table of dtypes is filled when its rules are more than they were, and not at
    every operator of every kernel, which takes a third of its time."""
    inductor = sys.modules.get("torch._inductor.dtype_propagation")
    table = getattr(inductor, "DtypePropagationOpsHandler", None)
    if getattr(table, "_instance", None) is None or hasattr(table, "_fill"):
        return
    rules = sys.modules["torch._inductor.utils"].op_dtype_propagation_rules

    def fill(self):
        if vars(self).get("_rules") != len(rules):
            self._rules = len(rules)
            self._fill()

    table._fill, table.__init__ = table.__init__, fill


@pytest.fixture(autouse=True, scope="session")
def _no_operator_without_a_rule():
    with sct.on_missing("error"):
        yield
