"""A step is traced on fake CUDA tensors: it shows what a CUDA device would run."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
from separately import printed

pytestmark = pytest.mark.kinds

PROGRAM = """
    from benchmarks.no_device import stand_in
    stand_in((9, 0), kernels=False)
    import collections, sys, warnings
    warnings.simplefilter("error", FutureWarning)
    import torch
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._subclasses import FakeTensorMode
    import scaledtensor as sct
    from benchmarks.launches_cuda import _on_device
    from scaledtensor.apps.gpt import GPT, GPTConfig

    graphs = []
    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep,
                           partition_fn=min_cut_rematerialization_partition)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = _on_device(sct.scale_model(GPT(GPTConfig(64, 128, 1, 2, 128)), "unit"), mode)
    with mode, sct.ops.on_missing("error"):
        x, y = (torch.empty(4, 128, dtype=torch.int64, device="cuda") for _ in range(2))
        torch.compile(lambda x, y: model(x, y)[1], backend=backend, fullgraph=True)(x, y).backward()
    for graph in graphs:
        calls = collections.Counter(
            str(n.target) for n in graph.graph.nodes if n.op == "call_function"
        )
        print(sorted(calls.items()))
"""


def traced() -> list[dict[str, int]]:
    return [dict(eval(line)) for line in printed(PROGRAM).splitlines()]


def test__a_step_for_cuda__multiplies_on_fp8_units_and_attends_by_flash():
    forward, backward = traced()
    assert forward["aten._scaled_mm.default"] == 5
    assert backward["aten._scaled_mm.default"] == 10
    assert "aten.mm.default" not in forward | backward
    assert forward["aten._scaled_dot_product_flash_attention.default"] == 1
    assert backward["aten._scaled_dot_product_flash_attention_backward.default"] == 1
    # Only a norm's statistics are measured.
    assert forward.get("scaledtensor.measured.default", 0) <= 3


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton writes the kernels")
def test__every_kernel__compiles_for_both_capabilities(tmp_path):
    command = [sys.executable, "-m", "benchmarks.launches_cuda", "--width", "128"]
    sizes = ["--context", "64", "--layers", "1", "--rows", "bf16", "unit"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    *_, bf16, unit = (line.split() for line in done.stdout.splitlines())
    assert int(unit[3]) <= 1.6 * int(bf16[3])
    assert int(unit[-1]) == int(unit[-2]) > 0


def test__the_stand_in__comes_before_torch():
    program = "import torch; from benchmarks.no_device import stand_in; stand_in((9, 0))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "comes before the import of torch" in done.stderr
