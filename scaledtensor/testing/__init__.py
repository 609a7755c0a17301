"""Tools for tests of casts, kernels and rules: exact answers, difficult inputs, and promises.

    from scaledtensor.testing import check_cast

    check_cast(my_cast, "e4m3fn")  # AssertionError: ... a tie: got code 0x39 ..., by bit pattern

`check_cast` tests a cast or a kernel on all inputs of 16 bits, on every tie, and on random numbers.
It compares with the exact answers, which `reference_round`, `reference_code` and `reference_codes`
give. `check_rule` tests whether a custom operator's rule keeps the promises of every rule.
`assert_scaled_close` and `assert_unit_scaled` test one promise each. Strategies for hypothesis are
in `scaledtensor.testing.strategies`: `pip install 'scaledtensor[testing]'`.
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
