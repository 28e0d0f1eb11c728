"""`exegpt graphs`: a log in, graphs out, and what of them is printed."""

import json

import pytest

from xcore.applications.demand_graph import read_demand_graphs


@pytest.fixture
def log(tmp_path):
    """Forty runs: a thought whose length predicts the answer's; every other run searches in between."""
    path, lines = tmp_path / "calls.jsonl", []
    for run in range(40):
        own = {"application": "react", "run": run}
        lines.append(own | {"unit": "think", "input_tokens": 50, "output_tokens": 10 + run})
        if run % 2:
            lines.append(own | {"unit": "search", "parent": "think", "seconds": 1.5})
        parent = "search" if run % 2 else "think"
        lines.append(own | {"unit": "answer", "parent": parent, "input_tokens": 90, "output_tokens": 20 + 2 * run})
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_log_is_learned_and_shown(exegpt, log, tmp_path):
    graphs = tmp_path / "graphs.json"
    done = exegpt("graphs", "learn", log, "--out", graphs)
    assert done.code == 0 and f"1 demand graph written to {graphs}." in done.out
    (graph,) = read_demand_graphs(graphs)
    assert graph.application == "react" and len(graph.unit("search").seconds) == 20
    (facts,) = exegpt("graphs", "show", graphs, "--json").json["applications"]
    units = {unit["unit"]: unit for unit in facts["units"]}
    assert units["think"]["next"] == {"answer": 0.5, "search": 0.5} and units["answer"]["next"] == {"end": 1.0}
    assert units["answer"]["output_tokens"] == 59 and units["search"]["seconds"] == 1.5
    assert "output → output" in units["think"]["predicts"]["answer"]
    assert facts["start"] == {"think": 1.0}
    service_s = 1e-4 * (50 + 90) + 0.06 * (29.5 + 59) + 0.5 * 1.5  # the default rates
    assert facts["mean_service_s"] == pytest.approx(service_s, rel=0.05)
    printed = exegpt("graphs", "show", graphs).out
    assert "react, begins with think" in printed and "answer 50%, search 50%" in printed
    assert "A call of think predicts the next one of answer: output → output" in printed
    learned = exegpt("graphs", "learn", log, "--out", graphs, "--json").json
    assert learned["applications"] == [facts] and learned["provenance"]["exegpt"]


def test_wrong_files_are_refused(exegpt, log, tmp_path):
    done = exegpt("graphs", "learn", log, "--out", log)
    assert done.code == 2 and done.err.count("\n") == 1
    done = exegpt("graphs", "show", tmp_path / "no.json")
    assert done.code == 2 and "no.json" in done.err
    (tmp_path / "bad.jsonl").write_text('{"application": "a", "run": 0, "unit": "u", "next": "end"}\n')
    done = exegpt("graphs", "learn", tmp_path / "bad.jsonl", "--out", tmp_path / "g.json")
    assert done.code == 2 and "line 1: a call of 'u' needs input_tokens and output_tokens, or seconds" in done.err
