"""The floors of the package, lowest first. A module imports from its own floor or from below.

`tests/test_layers.py` checks that, and `python docs/write_floors.py` copies this list to
docs/architecture.md. Each floor gives one line to each of its modules and packages.
"""

FLOORS: list[dict[str, str]] = [
    {
        "_start": "how this process was started",
        "_version": "the version of this code, and a digest of its text",
        "_torch": "the private names of torch, each with the reason for its use",
        "engine": "what the tensor needs from the rules, loaded with the first tensor",
        "errors": "exceptions and warnings",
        "formats": "number formats and the casts between them",
        "native": "loops in C++ for eager CPU tensors, built at first use",
        "setting": "settings of the process that are context managers as well",
    },
    {
        "_inductor": "what torch's compilers are told about the operators of this library",
        "cast_nodes": "casts as single nodes of a graph",
        "formed": "the operator that computes a closed form where no compiler does",
        "forms": "scales as closed forms in traced code",
        "measure": "the RMS of plain tensors",
        "scale": "powers of two",
        "singles": "scales as numbers of the host",
        "storable": "what a ScaledTensor can hold",
    },
    {"recipes": "frozen data: how each operand of each product is cast"},
    {"site": "what a weight knows of its products' operands, and lends to compiled code"},
    {"tensor": "ScaledTensor: storage, flatten and unflatten, repr, copy, pickle"},
    {"verbs": "to_format, rescale, drop and dequantize, as torch operators with derivatives"},
    {
        "coded": "CodedTensor: packed codes of any format, under scales of any granularity",
        "sparse": "SparseTensor: a ScaledTensor that stores some of its elements",
    },
    {"expanded": "ExpandedTensor: groups widened to the range of a format, for optimizer states"},
    {"wrap": "scaled: the door for plain tensors"},
    {
        "ops": "the rules: one file per operator family, and the registry around them",
        "shards": "parts of a tensor that is spread over ranks, and facts about the whole",
        "steps": "hooks of optimizers' steps, present while a parameter with a recipe lives",
    },
    {
        "functional": "unit-scaled functions, and torch's spellings of each",
        "mup": "u-muP's tags of parameters",
    },
    {
        "nn": "unit-scaled modules",
        "optim": "torch's optimizers and Lion, with u-muP's learning rates",
    },
    {"interpose": "a model's own forward under function modes, shared by transforms"},
    {"simulate": "simulate_format: a plain model whose products see a low precision"},
    {
        "histories": "delayed scaling: the buffers that keep the amaxes of earlier steps",
        "state_dicts": "plain tensors for libraries that write safetensors, and back",
    },
    {
        "guard": "when sites look at their operands, and calibrate",
        "inspect": "track_scales: scales of a running model, recorded and drawn",
        "machine": "hardware: what this machine multiplies fast",
        "model": "scale_model and unscale_model",
        "rebalance": "rebalance: new scales for tensors that have outgrown theirs",
        "report": "report: what ran in a model, under which rule",
        "unit_scale": "unit_scale: a recording of a model, a plan, and a mode that follows it",
    },
    {
        "checkpoint": "safetensors files, and folders that any number of ranks saves and loads",
        "distributed": "fully_shard's gathers, tensor parallelism, FP8 reductions, bytes counted",
    },
    {"__init__": "the public names, each loaded on first use"},
    {
        "commands": "the parsers of the command line, which load no torch",
        "compat": "other libraries' names over this one",
        "demo": "the demo and the train command",
        "integrations": "plug-ins of other libraries",
        "testing": "exact answers and promises, for tests of casts and rules",
        "__main__": "the command line",
    },
]
