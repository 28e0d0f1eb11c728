"""Figure 9: the paper's statements on OPT-13B, and the lines of the table."""

import pytest

from exegpt.reproduction import figure9
from exegpt.reproduction.figure9 import Figure9, Figure9Row, MemoryUse


def use(encoding, sides, weights):
    return MemoryUse("WAA", encoding, sides, max(sides) - min(sides), weights, 40e9, 10.0)


def test_every_scheme_has_a_line_beside_what_the_paper_says():
    ft = use(0, (50e9,), 25e9)
    rows = tuple(
        Figure9Row("opt-13b", "4xA40", task, ft, use(1, (25e9, 50e9), 50e9), use(encoding, (40e9, 44e9), 50e9))
        for task, encoding in (("T", 2), ("G", 1))
    )
    (section,) = figure9.sections(Figure9(rows))
    assert [line[2] for line in section.rows] == ["FT", "WAA-C", "WAA-M"] * 2
    assert all(len(line) == len(section.columns) for line in section.rows)
    assert section.rows[1][8] == "+100.0% (+12.5%)"  # a second copy; of four devices' memory in use
    assert "WAA-M takes 2 encoding devices, another split than WAA-C's; its sides differ by 9%" in section.notes[1]
    assert "1 encoding device, the same split" in section.notes[2]


@pytest.mark.slow
def test_opt_on_g_takes_one_encoder_and_three_decoders_in_both_variants_and_on_t_it_is_balanced():
    g, t = (figure9.row("opt-13b", "4xA40", task) for task in ("G", "T"))
    assert g.waa_c.encoding == g.waa_m.encoding == 1
    assert g.waa_m.imbalance > 0.3 * max(g.waa_m.sides) and t.waa_m.imbalance < 0.15 * max(t.waa_m.sides)
    assert all(row.waa_m.imbalance <= row.waa_c.imbalance for row in (g, t))
    assert all(row.waa_m.cache < row.ft.cache and row.waa_m.weights > row.ft.weights for row in (g, t))
