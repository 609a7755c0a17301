"""benchmarks.expansion at a small size: how much a widened range is worth."""

import pytest

from benchmarks import expansion


@pytest.mark.parametrize(("sigma", "share"), [(0.3, 0.7), (1.0, 0.7), (2.0, 0.5)])
def test__a_widened_range__errs_less_and_loses_nothing(sigma, share):
    plain, _ = expansion.measure(expansion.plain, "e4m3fn", sigma, 1 << 14)
    widened, zeros = expansion.measure(expansion.expanded, "e4m3fn", sigma, 1 << 14)
    assert widened <= share * plain
    assert zeros == 0


def test__wide_groups__are_flushed_without_it():
    assert expansion.measure(expansion.plain, "e4m3fn", 2.0, 1 << 14)[1] > 0.2


def test__the_command__prints_a_row_for_each_sigma(capsys):
    expansion.main(["--elements", "1024", "--sigmas", "0.5", "3"])
    assert len(capsys.readouterr().out.splitlines()) == 4
