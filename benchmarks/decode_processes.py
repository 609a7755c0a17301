"""The variants of `benchmarks.decode`, each in a process of its own."""

import ctypes
import gc
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import scaledtensor as sct
from benchmarks.decode_llama_cpp import LlamaCpp
from benchmarks.memory import storages
from benchmarks.timing import Moment, between, now

PROMPT = 8


# --- variants --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A way to store and multiply the weights."""

    convert: Callable[[nn.Module], object] = lambda model: None
    dtype: torch.dtype = torch.float32
    library: str = "torch"
    bits: int = 32
    """Bits of an element. The bars depend on it."""
    gguf: str | None = None
    """The type of the matrices in the GGUF file, for llama.cpp."""

    def open(self, folder: Path) -> Any:
        """Return the decoder of the model in a folder."""
        return Decoder(folder, self) if self.gguf is None else LlamaCpp(folder, self.gguf)


def ours(dtype: torch.dtype = torch.float32, **options: Any) -> Variant:
    """Return a variant of `WeightOnly(**options)`, with embeddings."""
    config = sct.WeightOnly(**options, roles=("linear", "head", "embedding"))
    return Variant(lambda model: sct.quantize_(model, config), dtype, bits=config.format.bits)


def torchao(dtype: torch.dtype, bits: int, module: str, name: str, **options: Any) -> Variant:
    def convert(model: nn.Module) -> None:
        config = getattr(import_module(module), name)(**options)
        import_module("torchao.quantization").quantize_(model, config)

    return Variant(convert, dtype, "torchao", bits)


def variants() -> dict[str, Variant]:
    bf16 = torch.bfloat16
    int8 = ("torchao.quantization", "Int8WeightOnlyConfig")
    # In torchao 0.18 the packed weights of the CPU's operator are here.
    int4 = (
        "torchao.prototype.quantization.int4.inference_workflow",
        "PrototypeInt4WeightOnlyConfig",
    )
    packed = {"group_size": 128, "set_inductor_config": False}
    return {
        "FP32": Variant(),
        "BF16": Variant(dtype=bf16, bits=16),
        "torchao int8": torchao(torch.float32, 8, *int8),
        "torchao int8, BF16": torchao(bf16, 8, *int8),
        "torchao int4": torchao(torch.float32, 4, *int4, **packed),
        "torchao int4, BF16": torchao(bf16, 4, *int4, **packed),
        "llama.cpp Q8_0": Variant(library="xllamacpp", bits=8, gguf="Q8_0"),
        "llama.cpp Q4_0": Variant(library="xllamacpp", bits=4, gguf="Q4_0"),
        "ours e4m3fn": ours(format="e4m3fn"),
        "ours e4m3fn, BF16": ours(bf16, format="e4m3fn"),
        "ours int8": ours(format="int8"),
        "ours int4, 128": ours(format="int4", granularity=128),
        "ours nvfp4": ours(format="nvfp4"),
        "ours mxfp4": ours(format="mxfp4"),
    }


# --- one process a variant -------------------------------------------------------------------


class Clock:
    """A streamer of `generate`: the time at which each token arrives, the prompt first."""

    def __init__(self) -> None:
        self.times: list[Moment] = []

    def put(self, value: Tensor) -> None:
        self.times.append(now())

    def end(self) -> None:
        pass


class Decoder:
    """A converted model and its ways to decode."""

    def __init__(self, folder: Path, variant: Variant) -> None:
        from transformers import LlamaForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=variant.dtype).eval()
        for p in self.model.parameters():  # a view of the file would keep all of it in memory
            p.data = p.data.clone()
        variant.convert(self.model)
        release()
        self.eager = self.model.forward
        step = torch.compile(self.eager, fullgraph=True, dynamic=False)

        @wraps(self.eager)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            """As in `generate` on a GPU, the prompt is not compiled."""
            return (step if kwargs["input_ids"].shape[1] == 1 else self.eager)(*args, **kwargs)

        self.compiled = compiled

    def facts(self) -> dict[str, float]:
        held = sum(storages(self.model.parameters()).values())
        table = sum(storages(self.model.get_input_embeddings().parameters()).values())
        return {"bytes": held, "read": held - table}

    @torch.inference_mode()
    def decode(self, path: str, count: int, prompt: int) -> list[Moment]:
        """Return the seconds of each token after the first, which includes the prompt."""
        self.model.forward = getattr(self, path)
        clock = Clock()
        tokens = torch.arange(prompt)[None] + 1
        self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=False,
            streamer=clock,
            cache_implementation="static" if path == "compiled" else None,
        )
        return between(clock.times[1:])


def serve(pipe: Connection, name: str, folder: Path, threads: int) -> None:
    """Build a variant, send its facts, and answer each (path, tokens) with the seconds of tokens
    and the peak of memory. An error is sent as its text."""
    torch.set_num_threads(threads)
    decoder: Any = None
    request: Any = ()
    while request is not None:
        try:
            if decoder is None:
                decoder = variants()[name].open(folder)
                pipe.send(decoder.facts())
            else:
                reset_peak()
                pipe.send((decoder.decode(*request, PROMPT), peak()))
        except Exception as error:  # whatever another library raises here
            pipe.send(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            if decoder is None:
                return
        request = pipe.recv()


def release() -> None:
    """Give the memory that the conversion freed back to the system. Only glibc has to be told."""
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    """Let the kernel forget the peak of this process's memory. Only Linux can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> float:
    """Return the largest resident bytes of this process since `reset_peak`."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return 1024.0 * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


class Worker:
    """The process of a variant, as the main process sees it."""

    def __init__(self, context: Any, name: str, folder: Path, threads: int) -> None:
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, name, folder, threads))
        self.process.start()
        other.close()

    def ask(self, request: Any = None) -> Any:
        """Send a request if there is one, and return the answer. Text is an error's."""
        if request is not None:
            self.pipe.send(request)
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            return f"its process ended with exit code {self.process.exitcode}"

    def end(self) -> None:
        with suppress(OSError):
            self.pipe.send(None)
        self.process.join()
