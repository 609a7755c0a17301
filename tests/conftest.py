"""Settings of all tests: an operator without a rule is an error, and examples are deterministic."""

import atexit
import gc
import importlib
import logging
import os
import shutil
import sys
import tempfile

import pytest
import torch
from hypothesis import settings
from long_forms import LONG_FORMS

import scaledtensor as sct

# Most tensors here are tiny, so a second thread mostly waits.
torch.set_num_threads(1)

# One test per core compiles at once. Inductor's pool would add a process that imports torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# ld.bfd takes a third of the time of g++ to build a kernel of Inductor. g++ looks for `ld` in this
# folder first.
if "COMPILER_PATH" not in os.environ and (gold := shutil.which("ld.gold")):
    linkers = tempfile.mkdtemp(prefix="scaledtensor-linkers-")
    atexit.register(shutil.rmtree, linkers, ignore_errors=True)
    os.symlink(gold, os.path.join(linkers, "ld"))
    os.environ["COMPILER_PATH"] = linkers

# torch.manual_seed formats its caller's stack for each absent kind of device, which takes longer
# than many tests.
for devices in (torch.cuda, torch.xpu, torch.mtia):
    if not devices.is_available():
        devices.manual_seed_all = lambda seed: None

settings.register_profile("scaledtensor", deadline=None, derandomize=True)
settings.load_profile("scaledtensor")

# Hypothesis wraps the settings of one parametrized item in the settings of the next, and asks all
# of them in turn for a database.
sys.setrecursionlimit(20_000)


# pytest listens to every logger that does not propagate. If anybody listens to its trace, torch
# writes out every graph of a compilation.
trace = logging.getLogger("torch.__trace")
trace.propagate = True
trace.handlers.clear()

# A compilation makes a million objects that live until its end. Searching them again and again for
# garbage takes an eighth of its time.
gc.set_threshold(100_000, 20, 100)


def pytest_configure(config):
    # A filter in pyproject.toml would import the library, and so torch, before any plugin. The
    # plugin of the simulated device comes before torch.
    config.addinivalue_line("filterwarnings", "error::scaledtensor.errors.MissingRuleWarning")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collection makes no garbage, and searching for some takes a fifth of its time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # This runs before pytest removes the marked tests.
def pytest_collection_modifyitems(items):
    for item in items:
        inside = item.nodeid.removeprefix("tests/")
        if inside.startswith(tuple(LONG_FORMS)):
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup():
    """Dynamo measures its guards for a line of its log, which takes 50 ms per graph."""
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *measured: 0.0


def _fill_once() -> None:
    """Inductor fills its table of dtypes at every operator of every kernel, which takes a third of
    its time. Here it fills the table only when rules were added."""
    table = importlib.import_module("torch._inductor.dtype_propagation").DtypePropagationOpsHandler
    rules = importlib.import_module("torch._inductor.utils").op_dtype_propagation_rules
    fill = table.__init__

    def fill_again(self):
        if vars(self).get("_rules") != len(rules):
            self._rules = len(rules)
            fill(self)

    table.__init__ = fill_again


def _inductor(self, *args, _compile=torch._TorchCompileInductorWrapper.__call__, **kwargs):
    """Compile as before, with the table above from the first graph on."""
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
