"""All reproductions by one command: each beside what its quick form leaves out, and what lacks its data."""

import json
from dataclasses import dataclass

import pytest

from exegpt.cli import main
from exegpt.report.sections import Section
from exegpt.reproduction import experiments, samullm, seallm
from exegpt.reproduction.experiments import Experiment, _shown
from xcore.errors import InputError


@dataclass(frozen=True)
class Result:
    value: int


def experiment(left_out=""):
    def sections(result):
        return [Section("a table", ("here", "paper"), ((str(result.value), "3"),), ("a note",))]

    return Experiment(_shown(lambda progress, quick: Result(1 if quick else 2), sections), left_out, "By hand.")


def absent():
    def run(progress, quick):
        raise InputError("There is no folder 'data'.")

    return Experiment(run, "", "Never.")


@pytest.fixture
def of_hand(monkeypatch):
    monkeypatch.setattr(
        experiments, "ALL", {"table-1": lambda: experiment("half of it"), "table-2": absent, "table-3": experiment}
    )


def test_each_is_printed_with_what_is_left_out(of_hand, capsys, tmp_path):
    assert main(["reproduce", "all", "--quick", "--report", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("a table") == 2 and shown.out.count("a note") == 2
    assert "--quick: half of it.\n" in shown.out and "--quick leaves nothing out here.\n" in shown.out
    assert "· table-2 is left out. There is no folder 'data'." in shown.err
    page = (tmp_path / "page.html").read_text()
    assert "table-1: --quick: half of it." in page and "table-2 is left out." in page and page.count("a table") == 2


def test_one_document_has_all_of_them(of_hand, capsys):
    for quick, value in (([], 2), (["--quick"], 1)):
        assert main(["reproduce", "all", *quick, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["table_1"] == document["table_3"] == {"value": value}
        assert document["left_out"] == {"table-2": "There is no folder 'data'."} and "table_2" not in document


def test_every_command_is_among_them(capsys):
    assert main(["reproduce", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in experiments.ALL)
    assert all(make().reduction.startswith("--quick") for make in experiments.ALL.values())


def test_what_is_left_of_several_models():
    """The reductions say how many cases are left of how many."""
    assert (len(seallm.load_scenarios(quick=True)), len(seallm.load_scenarios())) == (2, 12)
    assert [each.name for each in seallm.sweep_scenarios(quick=True)] == ["density 2", "runs of 16", "noise 16x"]
    few, every = samullm._cases(None, quick=True), samullm._cases(None, quick=False)
    assert (len(few), len(every)) == (5, 22)
