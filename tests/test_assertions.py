"""The assertions of the tests can fail."""

import pytest
from assertions import assert_each


def test__each__lists_every_case_that_fails():
    def check(case):
        assert case != 2
        if case == 4:
            pytest.fail("four")

    with pytest.raises(AssertionError) as told:
        assert_each(range(5), check)
    lines = str(told.value).splitlines()
    assert [line for line in lines if line[0] in "01234"] == [lines[0], lines[-1]]
    assert lines[0].startswith("2: AssertionError")
    assert lines[-1] == "4: Failed: four"
    assert_each([0, 1, 3], check)
