"""Figure 7: the paper's statement that FasterTransformer is above the other systems."""

import pytest

from exegpt.reproduction import figure7
from exegpt.reproduction.setup import Reached, setup


def row(ft, dsi, orca):
    def reached(rate):
        return Reached(rate, 1.0, "") if rate else None

    others = {name: reached(orca) for name in figure7.OTHERS} | {"DSI": reached(dsi)}
    return figure7.Figure7Row("S", 3.0, reached(ft), others)


def test_a_system_without_a_schedule_is_behind_and_an_equal_one_is_level():
    figure = figure7.Figure7((row(4.0, 4.0, None), row(4.0, 3.99999, 5.0), row(4.0, 3.0, 3.0)))
    assert (figure.ahead("DSI"), figure.ahead("ORCA")) == (1, 2)
    (section,) = figure7.sections(figure)
    assert all(len(cells) == len(section.columns) for cells in section.rows) and section.rows[0][4] == "–"
    assert "DSI: 1 of 3, ORCA: 2 of 3" in section.notes[0]


@pytest.mark.slow
def test_the_executors_time_is_what_puts_faster_transformer_ahead():
    tight, unbounded = figure7.task_rows(setup("opt-13b", "4xA40", "S"), quick=True)
    rates = {name: own.throughput_seq_s for name, own in tight.others.items() if own}
    assert rates["ORCA"] < rates["ORCA, no executor time"] and rates["vLLM"] < rates["vLLM, no executor time"]
    assert rates["ORCA"] < tight.ft.throughput_seq_s < rates["ORCA, no executor time"]
    assert rates["DSI"] == pytest.approx(tight.ft.throughput_seq_s, rel=0.02)
    assert unbounded.bound_s is None and unbounded.others["vLLM"].throughput_seq_s > unbounded.ft.throughput_seq_s
    for name, own in tight.others.items():
        assert own is None or own.latency_s <= tight.bound_s * 1.001, name
