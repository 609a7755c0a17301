"""What `make test` leaves out is there, and a part of what it has."""

from pathlib import Path

import pytest
from long_forms import LONG_FORMS

HERE = Path(__file__).parent


@pytest.mark.parametrize("form", LONG_FORMS)
def test__a_long_form__is_a_test_of_that_file(form):
    file, _, rest = form.partition("::")
    name = rest.partition("[")[0]
    assert f"def {name}(" in (HERE / file).read_text()
