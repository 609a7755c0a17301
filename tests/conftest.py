"""For every test: no operator runs without a rule, and the examples are the same each run."""

import gc
import importlib
import logging
import os
import sys

import pytest
import torch
from hypothesis import settings
from long_forms import LONG_FORMS

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


# pytest listens to every logger that does not propagate, and where anybody listens to its trace,
# torch writes every graph of a compilation out for it.
trace = logging.getLogger("torch.__trace")
trace.propagate = True
trace.handlers.clear()

# A compilation makes a million objects that live until its end: to look through them again and
# again for garbage takes an eighth of its time.
gc.set_threshold(100_000, 20, 100)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Nothing that collecting makes is garbage, and looking for some takes a fifth of its time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest takes out what is marked
def pytest_collection_modifyitems(items):
    for item in items:
        inside = item.nodeid.removeprefix("tests/")
        if inside.startswith(tuple(LONG_FORMS)):
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup():
    """Dynamo measures how long its guards take, for a line of its log: 50 ms for each graph."""
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *measured: 0.0


def _fill_once() -> None:
    """Inductor's one table of dtypes is filled when its rules are more than they were, and not at
    every operator of every kernel, which takes a third of its time."""
    table = importlib.import_module("torch._inductor.dtype_propagation").DtypePropagationOpsHandler
    rules = importlib.import_module("torch._inductor.utils").op_dtype_propagation_rules
    fill = table.__init__

    def fill_again(self):
        if vars(self).get("_rules") != len(rules):
            self._rules = len(rules)
            fill(self)

    table.__init__ = fill_again


def _inductor(self, *args, _compile=torch._TorchCompileInductorWrapper.__call__, **kwargs):
    """As it was, with its table as above from the first graph on."""
    if not _filled:
        _filled.append(True)
        _fill_once()
    return _compile(self, *args, **kwargs)


_filled: list[bool] = []
torch._TorchCompileInductorWrapper.__call__ = _inductor


@pytest.fixture(autouse=True, scope="session")
def _no_operator_without_a_rule():
    with sct.on_missing("error"):
        yield
