"""A schedule's stages as a table, in terminals and reports."""

from dataclasses import replace

from exegpt.report.html import Report, page
from exegpt.report.stage_table import COLUMNS, stage_rows, stage_utilisation
from tests.exegpt.report.test_report import Page
from tests.xcore.small_specs import schedule
from xcore.console.series import Series
from xcore.specs.estimate import Estimate
from xcore.specs.schedule import Stage
from xcore.specs.workload import task

STAGES = (
    Stage((0,), 1, "encode", None, (0, 12)),
    Stage((1, 2), 2, "decode", None, (0, 11)),
    Stage((3,), 1, "decode", None, (11, 12)),
)
BUSY = Estimate(1, 1, 1, 1, 1, 1, 1, 1, 1, utilisation=(0.1, 0.5, 0.5, 0.995) * 2)
SPLIT = schedule("waa-c", stages=STAGES, replicas=2)


def test_every_stage_has_its_devices_layers_and_use():
    assert stage_rows(SPLIT, BUSY) == [
        ["0", "0", "1", "encode", "0–11", "10%"],
        ["1", "1–2", "2", "decode", "0–10", "50%"],
        ["2", "3", "1", "decode", "11", "100%"],
    ]
    assert stage_utilisation(SPLIT, BUSY) == [0.1, 0.5, 0.995]


def test_encoder_and_decoder_layers_are_listed_separately():
    both = replace(SPLIT, stages=(Stage((0,), 1, "both", (0, 6), (0, 12)),))
    assert stage_rows(both)[0][4] == "encoder 0–5, decoder 0–11"


def test_unknown_use_is_a_dash():
    assert {row[-1] for row in stage_rows(SPLIT)} == {"–"}


def test_a_search_report_has_reasons_and_stages():
    report = Report(
        "Schedules",
        (),
        task("S"),
        (Series("waa-c", ((1.0, 2.0),), "W", "#d98032"),),
        None,
        policies=(("waa-c", "2", "1 s", "90 ms", "8 ms", "the best <by far>"),),
        stages=(COLUMNS, *map(tuple, stage_rows(SPLIT, BUSY))),
        advice=("twice the devices would give 1.9 times the throughput",),
    )
    shown = Page(page(report))
    assert shown.asked == []
    for text in ("the best <by far>", "Stages of the chosen schedule", "0–10", "would give 1.9 times"):
        assert text in shown.text
