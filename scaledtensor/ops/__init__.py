"""The rules: one file per operator family, each a table of small functions.

Importing this package installs them into ScaledTensor.
"""

from scaledtensor import steps
from scaledtensor.ops import (  # noqa: F401 - imported for the rules that they register
    activation,
    arithmetic,
    attention,
    batch_norm,
    binary,
    by_gemm,
    casts,
    collectives,
    compare,
    complex_numbers,
    convolution,
    creation,
    delayed,
    derivatives,
    distance,
    elementary,
    embedding,
    embedding_bag,
    functions,
    linalg,
    loss,
    margin,
    matmul,
    norm,
    optimizer,
    order,
    pool,
    quantize,
    recurrent,
    reduction,
    resample,
    sampling,
    saved,
    scan,
    scatter,
    softmax,
    sparse,
    special,
    unsupported,
    views,
)
from scaledtensor.ops.products import products_in, state
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
from scaledtensor.tensor import Engine, ScaledTensor

__all__ = ["RULES", "Raw", "Rule", "absent", "missing", "on_missing", "products_in", "rule"]

_FUNCTIONS = {
    **functions.FUNCTIONS,
    **attention.FUNCTIONS,
    **derivatives.FUNCTIONS,
    **elementary.FUNCTIONS,
    **binary.FUNCTIONS,
    **loss.FUNCTIONS,
    **recurrent.FUNCTIONS,
    **resample.FUNCTIONS,
    **scan.FUNCTIONS,
    **complex_numbers.FUNCTIONS,
    **linalg.FUNCTIONS,
    **sparse.FUNCTIONS,
    **steps.FUNCTIONS,
}


def _code_depends_on() -> str:
    return f"{fingerprint()} {state()}"


ScaledTensor._engine = Engine(dispatch, saved.over(_FUNCTIONS), _code_depends_on)
