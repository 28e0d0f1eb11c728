"""Demand graphs: written and read, learned from logs, and refused in one sentence where no run could end."""

import json

import pytest

from tests.public_data import needs_data
from xcore import document
from xcore.applications.demand_graph import END, MOST_SAMPLES, DemandGraph, DemandStep, read_demand_graphs
from xcore.errors import InputError
from xmulti.files.call_log import LoggedCall, learn, read_calls


def thought(*next_units):
    return DemandStep("thought", "llm", next_units, (900, 950), (30, 40), (1, 1))


def search(*next_units):
    return DemandStep("search", "search", next_units, seconds=(1.5,))


def graph(*units, start=("thought",)):
    return DemandGraph(1, "react", start, units)


def call(unit, next_unit, run=0, **changes):
    demand = {"input_tokens": 900, "output_tokens": 30} if unit != "search" else {"seconds": 1.5}
    return {"application": "react", "run": run, "unit": unit, **demand, "next": next_unit, **changes}


def write_log(path, *calls):
    path.write_text("".join(json.dumps(each) + "\n" for each in calls))
    return path


def test_a_loop_that_may_end_is_legal_and_travels(tmp_path):
    looping = graph(thought("search", END), search("thought"))
    document.write(tmp_path / "graph.json", looping)
    assert read_demand_graphs(tmp_path / "graph.json") == (looping,)


@pytest.mark.parametrize(
    ("units", "start", "sentence"),
    [
        ((thought("search"), search("thought")), "thought", "always repeats the cycle thought → search → thought"),
        (
            (thought("act", END),),
            "thought",
            "from 'thought' to 'act', which is not one of its units: write one of thought or end",
        ),
        ((thought(END),), "act", "from 'start' to 'act', which is not one of its units: write one of thought."),
        ((thought("search", "thought"), search("thought")), "thought", "has no path from 'thought' to 'end'"),
        ((thought(END), thought(END)), "thought", "needs units with unique names"),
    ],
)
def test_a_graph_that_no_run_could_end_in_is_refused_in_one_sentence(units, start, sentence):
    with pytest.raises(InputError) as refused:
        graph(*units, start=(start,))
    assert sentence in str(refused.value)
    assert str(refused.value).count(". ") == 0 and "\n" not in str(refused.value)


def test_units_with_samples_of_different_numbers_are_refused():
    with pytest.raises(InputError, match=r"equally many input_tokens.*got 2, 1, 2 and 0"):
        DemandStep("thought", "llm", (END,), (1, 2), (1,), (1, 1))
    with pytest.raises(InputError, match="has a sample above the maximum of 10,000,000"):
        DemandStep("thought", "llm", (END,), (10**40,), (1,), (1,))
    for negative in ((-1, 1, 1), (1, -1, 1), (1, 1, 0)):
        with pytest.raises(InputError, match=r"below the minimum of [01]: remove that sample"):
            DemandStep("thought", "llm", (END,), *((sample,) for sample in negative))
    with pytest.raises(InputError, match="negative or infinite"):
        DemandStep("search", "search", (END,), seconds=(float("inf"),))
    with pytest.raises(InputError, match="only seconds"):
        DemandStep("search", "search", (END,))


def test_a_log_is_learned(tmp_path):
    log = write_log(
        tmp_path / "calls.jsonl",
        call("thought", "search", parallel=2),
        call("thought", END, run=1, input_tokens=1000),
        call("search", "thought"),
        call("thought", END, input_tokens=990, output_tokens=41),
    )
    (learned,) = learn(read_calls(log))
    assert learned.start == ("thought", "thought")
    thinking = learned.unit("thought")
    assert (thinking.input_tokens, thinking.parallel) == ((900, 1000, 990), (2, 1, 1))
    assert thinking.next_units == ("search", END, END)
    assert learned.unit("search").seconds == (1.5,) and learned.unit("search").backend == "search"
    (pair,) = learned.joint  # across the search between them
    assert (pair.upstream, pair.downstream, pair.records) == ("thought", "thought", ((900, 30, 2, 990, 41, 1),))


def test_a_parent_in_place_of_next_gives_the_same_graph(tmp_path):
    runs = [("thought", "search", "thought"), ("thought",), ("thought", "thought")]
    lines = [(run, place, unit) for run, units in enumerate(runs) for place, unit in enumerate(units)]
    lines.sort(key=lambda line: line[1])  # interleaved
    named = [call(unit, (*runs[run], END)[place + 1], run) for run, place, unit in lines]
    told = [call(unit, None, run, parent=runs[run][place - 1] if place else None) for run, place, unit in lines]
    (by_next,), (by_parent,) = (
        learn(read_calls(write_log(tmp_path / "calls.jsonl", *calls))) for calls in (named, told)
    )
    assert by_parent.start == by_next.start
    assert sorted(by_parent.unit("thought").next_units) == sorted(by_next.unit("thought").next_units)
    assert sorted(by_next.unit("thought").next_units) == [END, END, END, "search", "thought"]
    pairs = [{(each.upstream, each.downstream): sorted(each.records) for each in g.joint} for g in (by_next, by_parent)]
    assert pairs[0] == pairs[1]


def test_the_last_thousand_calls_count():
    calls = (LoggedCall("a", run, "u", END, input_tokens=run, output_tokens=1) for run in range(MOST_SAMPLES + 5))
    (learned,) = learn(calls)
    assert learned.units[0].input_tokens == tuple(range(5, MOST_SAMPLES + 5))
    assert len(learned.start) == MOST_SAMPLES


@pytest.mark.parametrize(
    ("calls", "sentence"),
    [
        ((call("thought", "search"), call("thought", END)), "line 2: run '0' of 'react' calls 'thought', but"),
        ((call("thought", END), call("thought", END)), "names 'end' as the next"),
        ((call("thought", END, output_tokens=None),), "line 1: a call of 'thought' needs input_tokens and output"),
        ((call("thought", None), call("thought", None)), "line 2: run '0' of 'react' calls 'thought' without a parent"),
        ((call("thought", None, parent="search"),), "begins with 'thought', but names 'search' as its parent"),
        (
            (call("thought", "search"), call("search", None, parent="thought"), call("search", None, parent="thought")),
            "but its previous call is 'search': log calls that run at the same time as one call with parallel",
        ),
        ((call("thought", END, tokens=3),), "tokens is not known"),
        ((call("thought", "search"), call("search", "thought")), "always repeats the cycle"),
        ((), "There are no calls to learn from"),
    ],
)
def test_a_log_that_is_wrong_is_refused(tmp_path, calls, sentence):
    with pytest.raises(InputError, match=sentence):
        learn(read_calls(write_log(tmp_path / "calls.jsonl", *calls)))


def test_a_unit_has_one_backend(tmp_path):
    calls = call("thought", END), call("thought", END, run=1, backend="docker", seconds=1.0)
    with pytest.raises(InputError, match="on both llm and docker: use a different unit name"):
        learn(read_calls(write_log(tmp_path / "calls.jsonl", *calls)))


def test_the_published_form_is_read(tmp_path):
    units = {
        "start": {"type": "start", "next": ["thought"]},
        "end": {"type": "end"},
        "thought": {"type": "llm", "next": ["end"], "input_len": [9], "output_len": [3], "parallelism": [2]},
    }
    path = tmp_path / "graphs.json"
    path.write_text(json.dumps({"react": units}))
    (read,) = read_demand_graphs(path)
    assert read == graph(DemandStep("thought", "llm", (END,), (9,), (3,), (2,)))
    path.write_text(json.dumps({"react": {**units, "thought": {**units["thought"], "next": ["thought"]}}}))
    with pytest.raises(InputError, match="always repeats the cycle thought → thought"):
        read_demand_graphs(path)
    path.write_text("{}")
    with pytest.raises(InputError, match="has no demand graphs"):
        read_demand_graphs(path)


def test_all_published_graphs_are_read():
    graphs = read_demand_graphs(needs_data("hermes", "pdgraphs.json"))
    assert len(graphs) == 9
    assert {unit.backend for each in graphs for unit in each.units} == {"llm", "docker", "search", "dnn"}
