"""For tests of casts, kernels and rules: exact answers, inputs where they go wrong, and promises.

    from scaledtensor.testing import check_cast

    check_cast(my_cast, "e4m3fn")  # AssertionError: ... a tie: got code 0x39 ..., by bit pattern

`check_cast` puts a cast or kernel through all inputs of 16 bits, every tie and as many random
numbers as asked. `reference_round`, `reference_code` and `reference_codes` are the exact answers
that it compares with. `check_rule` holds an operator with a rule of its own to what every rule
promises. `assert_scaled_close` and `assert_unit_scaled` state one promise each. Strategies for
hypothesis are in `scaledtensor.testing.strategies`: `pip install 'scaledtensor[testing]'`.
"""

from scaledtensor.testing.casts import check_cast
from scaledtensor.testing.reference import (
    near_ties,
    reference_code,
    reference_codes,
    reference_round,
)
from scaledtensor.testing.rules import assert_scaled_close, assert_unit_scaled, check_rule

__all__ = [
    "assert_scaled_close",
    "assert_unit_scaled",
    "check_cast",
    "check_rule",
    "near_ties",
    "reference_code",
    "reference_codes",
    "reference_round",
]
