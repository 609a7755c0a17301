"""The floors of the package, lowest first. A module imports from its own floor or from below.

`tests/test_layers.py` checks that, and `python docs/write_floors.py` copies this list to
docs/architecture.md. Each floor gives one line to each of its modules and packages.
"""

FLOORS: list[dict[str, str]] = [
    {
        "_start": "how this process was started",
        "_torch": "the private names of torch, each with the reason for its use",
        "_version": "the version of this code, and a digest of its text",
        "backends": "the facts about each kind of device, in one file each",
        "errors": "exceptions and warnings",
        "native": "loops in C++ for eager CPU tensors, built at first use",
        "setting": "settings of the process that are context managers as well",
    },
    {"formats": "number formats, their casts, and which elements share a scale"},
    {
        "scales": "powers of two, scales as numbers of the host, scales as closed forms in "
        "traced code, and what Inductor is told about them"
    },
    {"recipes": "frozen data: how each operand of each product is cast"},
    {
        "tensors": "ScaledTensor, the stored tensors, `scaled`, to_format and the other verbs, "
        "their codec for files, parts of tensors on several ranks, the hooks of optimizers' steps"
    },
    {
        "ops": "the registry; rules/: one file for each operator family; products/: the table of "
        "products and the casts of their operands; invariant/: kernels of a fixed order"
    },
    {
        "functional": "unit-scaled functions, and torch's spellings of each",
        "mup": "u-muP's tags of parameters",
    },
    {
        "nn": "unit-scaled modules",
        "optim": "torch's optimizers and Lion, with u-muP's learning rates",
    },
    {"models": "scale_model, simulate_format, delayed scaling, rebalance, guard, state dicts"},
    {
        "quantization": "after training: quantize_, its configs, weights in few bits and their "
        "products, caches of keys and values"
    },
    {"unit_scaling": "unit_scale: a recording of a model, a plan, and a mode that follows it"},
    {"inspect": "track_scales, report, hardware: what ran, under which scale and which rule"},
    {
        "checkpoint": "safetensors files, and folders that any number of ranks saves and loads",
        "distributed": "fully_shard's gathers, tensor parallelism, FP8 reductions, bytes counted",
    },
    {
        "exchange": "quantised models in the files of other libraries: compressed-tensors, "
        "fine-grained FP8, ModelOpt, torchao, GGUF"
    },
    {
        "__init__": "the public names, each loaded on first use",
        "_moved": "modules that old files name",
    },
    {
        "__main__": "the command line",
        "apps": "the commands: demo, train, generate, formats; their parsers load no torch",
        "compat": "the names of other libraries over this one",
        "integrations": "plug-ins of other libraries",
        "testing": "exact answers and promises, for tests of casts and rules",
    },
]
