"""The comparison of answers for agents with grids, on a small question."""

from dataclasses import replace

from benchmarks import agent_questions
from benchmarks.agent_questions import CHAT, compare


def test_an_answer_is_as_good_as_the_best_point_of_its_grid(monkeypatch, capsys):
    small = replace(CHAT, model="opt-1.3b", cluster="1xA40", workload="60/20", agents=6, turns=3, tpot="20ms")
    monkeypatch.setattr(agent_questions, "QUESTIONS", (("small", replace(small, policy="orca")),))
    assert compare(1)
    shown = capsys.readouterr().out.split()
    assert shown[:3] == ["1", "small", "6"] and int(shown[-2]) >= 12


def test_a_point_that_keeps_bounds_which_the_answer_breaks_is_noticed(monkeypatch, capsys):
    small = replace(CHAT, model="opt-1.3b", cluster="1xA40", workload="60/20", agents=6, turns=3)
    monkeypatch.setattr(agent_questions, "QUESTIONS", (("small", replace(small, policy="orca")),))
    monkeypatch.setattr(agent_questions, "best_of_grid", lambda problem: (0.0, 1e6, 1))
    assert not compare(1) and "+" in capsys.readouterr().out
