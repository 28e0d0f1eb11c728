"""Load curves in files: what a row lasts, and rows that are refused by their number."""

import pytest

from xcore.errors import InputError
from xcore.specs.load_curve import LoadHour, read_load_curve


def test_a_rate_lasts_until_the_next_row(tmp_path):
    path = tmp_path / "c.csv"
    path.write_text("hour,rate\n0,5\n6.5,20\n8,0\n")
    assert read_load_curve(path) == (LoadHour(0.0, 6.5, 5.0), LoadHour(6.5, 1.5, 20.0), LoadHour(8.0, 1.5, 0.0))
    path.write_text("hour;rate\n7;3\n")
    assert read_load_curve(path) == (LoadHour(7.0, 1.0, 3.0),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hour,rate\n0,5\n1,much\n", r"row 3, column 'rate': 'much' must be a number"),
        ("hour,rate\n0,5\n1,-2\n", r"row 3, column 'rate': -2 must be a rate in requests/s of at least 0"),
        ("hour,rate\n0,5\n2,5\n1,6\n", r"row 4, column 'hour': 1 must be above 2, the row before"),
        ("hour,rate\n0,nan\n", r"row 2, column 'rate': 'nan' must be a number"),
        ("hour,rate\n0\n", r"row 2 has no value in column 'rate'"),
        ("hour,rate\n0,0\n1,0\n", r"has no requests"),
        ("hour,requests\n0,5\n", r"has no column 'rate'"),
        ("hour,rate\n", r"has no rows"),
    ],
)
def test_bad_rows_are_refused_by_their_number(tmp_path, text, said):
    path = tmp_path / "c.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_load_curve(path)
