"""All cases, from the modules that register them."""

import cases_data  # noqa: F401 - imported for the cases that they register
import cases_functions  # noqa: F401
import cases_images  # noqa: F401
from op_cases import CASES, Case, Shapes

__all__ = ["CASES", "Case", "Shapes"]
