"""Tells which parameters of a module are operands of matrix products, and of nothing else.

Under a recipe with `store_frozen`, a frozen weight that only products read is stored as they cast
it. `fully_shard` sends such a weight as 8-bit codes. Both happen before the module runs, so the
answer has to follow from the module itself:

1. The layers of torch are listed by class (`_LAYERS`), with the parameters that they multiply by. A
   subclass of a layer multiplies by the same ones.
2. For all other classes, the name of the parameter decides (`_NAMES`). `weight` is the operand's
   name in `F.linear`, `F.bilinear` and the convolutions, and modules keep the operand under that
   name (GPT-2's Conv1D, routers of experts). `*_proj` is the name that transformers gives to the
   matrices of all experts of a layer, as one parameter of three dimensions.

A parameter with fewer than two dimensions over 1 is a vector. It is added, or it multiplies
elements, and is no operand of a matrix product.
"""

import fnmatch

from torch import Tensor, nn

from scaledtensor.tensors.steps import is_scaled

__all__ = ["TABLES", "is_only_operand", "is_operand", "note_ties"]

#: Layers whose parameter is a table of rows. They look rows up.
TABLES = (nn.Embedding, nn.EmbeddingBag)

#: Layers of torch -> the parameters that they multiply matrices by.
_LAYERS: dict[type[nn.Module], tuple[str, ...]] = {
    **dict.fromkeys((nn.Linear, nn.Bilinear), ("weight",)),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), ("weight",)),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), ("weight",)),
    nn.MultiheadAttention: (
        *("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    ),
    **dict.fromkeys(TABLES, ()),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), ()),  # they multiply by element
    **dict.fromkeys((nn.RNNBase, nn.RNNCellBase), ()),  # they take no stored weights
}

#: Patterns of the names of operands, in classes that are no layers of torch.
_NAMES = ("weight", "*_weight", "proj", "*_proj")

#: The attribute of a module that names its operands that another module reads by other operators.
#: Pickles of modules have it.
_READ_ELSEWHERE = "_not_only_factors"


def is_operand(module: nn.Module, name: str, p: Tensor) -> bool:
    """Whether `module` multiplies matrices by its parameter `p`, which it keeps as `name`."""
    if sum(n > 1 for n in p.shape) < 2:
        return False
    for kind, names in _LAYERS.items():
        if isinstance(module, kind):
            return name in names
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _NAMES)


def is_only_operand(module: nn.Module, name: str, p: Tensor) -> bool:
    """Whether `is_operand` holds, and no other module of the model reads `p` by another operator.

    `note_ties` must have seen the model since its parameters were tied.
    """
    return is_operand(module, name, p) and name not in getattr(module, _READ_ELSEWHERE, ())


def note_ties(model: nn.Module) -> None:
    """Note on each module which of its operands another module reads by another operator, as an
    embedding reads the weight of a tied output layer."""
    owners = [
        (module, name, p)
        for module in model.modules()
        for name, p in module._parameters.items()
        if p is not None
    ]
    read_elsewhere = {id(p) for module, name, p in owners if not is_operand(module, name, p)}
    for module in model.modules():
        vars(module).pop(_READ_ELSEWHERE, None)
    for module, name, p in owners:
        if is_scaled(p) and id(p) in read_elsewhere and is_operand(module, name, p):
            noted = vars(module).get(_READ_ELSEWHERE, ())
            vars(module)[_READ_ELSEWHERE] = (*noted, name)
