"""The replays with which `benchmarks.device_questions` looks for devices that are cheaper than an answer."""

from dataclasses import replace

from benchmarks.device_questions import cheaper_layout
from exegpt.api.device_offers import device_offers
from exegpt.api.tuning import read_problem
from exegpt.options.tune import TuneOptions


def test_a_dearer_answer_is_noticed(tmp_path):
    path = tmp_path / "t.csv"
    rows = (f"{300 + i % 50},{20 + i % 7},{i / 10}" for i in range(200))
    path.write_text("input,output,arrival_s\n" + "\n".join(rows) + "\n")
    asked = {"model": "opt-1.3b", "latency_bound": "2s", "devices": "A40"}
    options = TuneOptions(
        workload=str(path), arrivals="trace", rate="100/s", max_num_seqs=64, max_num_batched_tokens=512, **asked
    )
    problem = replace(read_problem(options), prices={"A40": 1.0})
    offers = device_offers(problem)
    assert offers.best and offers.best.price_hour and offers.best.price_hour >= 2
    assert cheaper_layout(problem, offers)[0] == ""
    dearer = replace(offers, best=replace(offers.best, price_hour=offers.best.price_hour + 1.5))
    found, replays = cheaper_layout(problem, dearer)
    assert found == f"{offers.needed[0].replicas + 1} replicas of TP1 on A40" and replays >= 1
