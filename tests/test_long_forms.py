"""Every test that `make test` leaves out exists, and `make test` runs another form of it."""

from pathlib import Path

from long_forms import LONG_FORMS

HERE = Path(__file__).parent


def test__every_long_form__is_a_test_of_its_file():
    lost = []
    for form in LONG_FORMS:
        file, _, rest = form.partition("::")
        name = rest.partition("[")[0]
        if f"def {name}(" not in (HERE / file).read_text():
            lost.append(form)
    assert lost == []
