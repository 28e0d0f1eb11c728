"""The commands whose time `benchmarks.question_times` measures."""

import os
import sys

from benchmarks import question_times


def test_a_command_is_timed_and_those_beyond_the_goal_are_named(monkeypatch, capsys):
    small = "-m llama-3.1-8b -c 1xH100-SXM -w 64/16 -l inf --policy static --no-advice"
    monkeypatch.setattr(question_times, "QUESTIONS", (small, f"{small} --ttft never"))
    monkeypatch.setattr(question_times, "GOAL_S", 0.0)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: None)  # the other tests keep their cores
    monkeypatch.setattr(sys, "argv", ["question_times"])
    question_times.main()
    first, second, last = capsys.readouterr().out.splitlines()
    assert "exit 0" in first and small in first and "exit 2" in second
    assert last == "2 of 2 exceed their goal: 1, 2"
