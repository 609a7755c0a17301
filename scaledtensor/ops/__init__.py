"""The rules of operators: one file for each family of operators, a table of small functions.

The import of this package installs the rules into the base of ScaledTensor and CodedTensor.
"""

from scaledtensor.ops.products import (  # noqa: F401 - imported for the rules that they register
    by_gemm,
    delayed,
    quantize,
    table,
)
from scaledtensor.ops.rules import (  # noqa: F401 - imported for the rules that they register
    activation,
    arithmetic,
    attention,
    casts,
    collectives,
    convolution,
    creation,
    elementary,
    embedding,
    in_place,
    linalg,
    loss,
    matmul,
    norm,
    optimizer,
    order,
    powers,
    recurrent,
    reduction,
    resample,
    scatter,
    softmax,
    sparse,
    special,
    unsupported,
    views,
)

# These two read the table of rules, so the rules are registered before.
# isort: split
from scaledtensor.ops import derivatives, saved
from scaledtensor.ops.invariant import batch_invariant
from scaledtensor.ops.products.dtype import products_in, state
from scaledtensor.ops.registry import (
    RULES,
    Raw,
    Rule,
    absent,
    dispatch,
    fingerprint,
    missing,
    on_missing,
    rule,
)
from scaledtensor.tensors import steps
from scaledtensor.tensors.engine import Engine
from scaledtensor.tensors.ruled import Ruled

__all__ = [
    "RULES",
    "Raw",
    "Rule",
    "absent",
    "batch_invariant",
    "missing",
    "on_missing",
    "products_in",
    "rule",
]

_FUNCTIONS = {
    **table.FUNCTIONS,
    **attention.FUNCTIONS,
    **derivatives.FUNCTIONS,
    **elementary.FUNCTIONS,
    **special.FUNCTIONS,
    **loss.FUNCTIONS,
    **recurrent.FUNCTIONS,
    **resample.FUNCTIONS,
    **order.FUNCTIONS,
    **unsupported.FUNCTIONS,
    **linalg.FUNCTIONS,
    **sparse.FUNCTIONS,
    **collectives.FUNCTIONS,
    **steps.FUNCTIONS,
}


def _code_depends_on() -> str:
    return f"{fingerprint()} {state()}"


Ruled._engine = Engine(dispatch, saved.over(_FUNCTIONS), _code_depends_on)
