"""Figure 10: schedules for a tenth of the lengths, judged on the others."""

import gzip

import pytest

from exegpt.reproduction import figure10
from exegpt.reproduction.figure10 import Figure10, Figure10Row
from exegpt.reproduction.setup import setup
from tests.public_data import needs_data


def test_a_tenth_is_drawn_and_the_others_run(tmp_path):
    """All rows are in one part or the other, but for those without output and those beyond the context of 2,048."""
    path = tmp_path / "lengths.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("input_length,output_length\n" + "".join(f"{n},{1 + n % 9}\n" for n in range(1, 101)))
        file.write("50,0\n3000,10\n")
    scheduled, run = figure10.split("CNN", path, setup("opt-13b", "4xA40", "S"))
    parts = [sorted(row.input for row in part.requests) for part in (scheduled, run)]
    assert [len(part) for part in parts] == [10, 90] and sorted(parts[0] + parts[1]) == list(range(1, 101))
    assert parts[0] != list(range(1, 11))  # rows of a file are in an order


def test_gains_are_of_the_better_policy():
    rows = (
        Figure10Row("WMT", "m", 9, 1.0, 2.0, 6.0, 8.0),
        Figure10Row("Alpaca", "m", 9, None, 2.0, 4.0, None),
        Figure10Row("CNN", "m", 9, None, 2.0, 6.0, 4.0),
    )
    assert [(row.gain, row.ahead) for row in rows] == [(4.0, "WAA"), (2.0, "RRA"), (3.0, "RRA")]
    data, statements = figure10.sections(Figure10(rows))
    assert data.rows[1] == ("Alpaca", "m", "9", "∞", "2", "4", "–", "2")
    assert statements.rows[0] == ("mean gain over FT", "3", "4.4", "-31.8%")
    assert [row[1] for row in statements.rows[2:]] == ["1 of 1 row", "1 of 1 row", "0 of 1 row"]


@pytest.mark.slow
def test_the_papers_order_of_the_policies_without_a_fit():
    """WAA is ahead on articles with short summaries, RRA on conversations; both above FasterTransformer."""
    for name, ahead in (("CNN", "WAA"), ("Alpaca", "RRA")):
        folder, file, *_ = figure10.DATA[name]
        rows = figure10.case(setup("opt-13b", "4xA40", "S"), name, needs_data(folder, file))
        assert [row.ahead for row in rows] == [ahead, ahead] and all(1.5 < row.gain < 8.7 for row in rows)
