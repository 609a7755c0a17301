"""A plugin of pytest: the tests run on the simulated CUDA device, which is their default device.

    python -m pytest -p benchmarks.on_simulated_cuda tests/test_rebalance.py

It starts the device before torch is imported. A test that needs more than the simulation has is
skipped, with the reason (`_LACKS`).
"""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.simulated_cuda import start

start()

import torch  # noqa: E402 - after the start of the device

torch.set_default_device("cuda")

#: Words of the error of a test -> what the simulation lacks.
_LACKS = {
    "Storage device not recognized: cuda": "pickles of tensors of a device",
    "Attempted to set the storage of a tensor on device": "pickles of tensors of a device",
    "from the 'SparseCUDA' backend": "sparse tensors",
    "copy_() between dense and sparse Tensors": "sparse tensors",
    "TritonMissing": "compiler of kernels",
    "DispatchStub: missing kernel for cuda": "kernel that torch looks up by itself",
    "not implemented for 'BFloat16'": "kernel for bfloat16 here, since a CPU has none",
    "can't convert cuda:0 device type tensor to numpy": "NumPy beside a device",
    "_use_cudnn_ctc_loss": "CTC loss of a plain tensor",
    "_thnn_fused_": "fused cells of recurrent networks",
    "built without USE_CUDA": "functions of the CUDA library",
    "fixes the order of additions of dense tensors on a CPU": "fixed order of additions",
    "apply_ is only implemented on CPU tensors": "Python functions of elements",
    "map_ is only implemented on CPU tensors": "Python functions of elements",
    "Cannot set version_counter for inference tensor": "views that a kernel makes, in inference",
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        shown = str(error)
        for words, lacking in _LACKS.items():
            if words in shown or words in type(error).__name__:
                pytest.skip(f"the simulated device has no {lacking}")
        raise
