"""The rules: one file per operator family, each a table of small functions.

Importing this package installs them into ScaledTensor.
"""

from scaledtensor.ops import (  # noqa: F401 - imported for the rules that they register
    activation,
    arithmetic,
    attention,
    casts,
    compare,
    creation,
    derivatives,
    embedding,
    functions,
    loss,
    matmul,
    norm,
    reduction,
    softmax,
    views,
)
from scaledtensor.ops.registry import (
    RULES,
    Raw,
    Rule,
    dispatch,
    fingerprint,
    missing,
    on_missing,
    rule,
)
from scaledtensor.tensor import Engine, ScaledTensor

__all__ = ["RULES", "Raw", "Rule", "missing", "on_missing", "rule"]

ScaledTensor._engine = Engine(dispatch, functions.FUNCTIONS | derivatives.FUNCTIONS, fingerprint)
