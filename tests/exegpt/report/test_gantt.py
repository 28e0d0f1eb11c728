"""Pictures of plans: every cell shows what runs then, sharing is seen and said, and nothing is too short to be seen."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.report import gantt
from exegpt.report.gantt import IDLE, MOST_ROWS, ON, Bar, Gantt
from tests.xcore.small_specs import schedule
from xcore.specs.cluster import parse_cluster
from xcore.specs.cluster_plan import Plan, PlannedModel, Share
from xcore.specs.request_times import summarise
from xmulti.files.stage_plan import ExecutionStage, StagedNode, StagePlan

WIDTH = 20


def rows(picture):
    """Labels with the cells of their rows."""
    found = re.findall(r"^ *(\S+) │(.*)$", picture, re.MULTILINE)
    return dict(found)


def planned(name, devices, seconds=None, share=None):
    many = {"requests": 10, "seconds": seconds} if seconds else {"rate_seq_s": 1.0, "goodput_seq_s": 2.0}
    return PlannedModel(name, devices, schedule("orca"), summarise((), 0.0), share=share, **many)


def plan(*models, cluster="4xA40"):
    return Plan(Plan.VERSION, "exegpt", parse_cluster(cluster), models)


@st.composite
def stages(draw):
    """Stages that end at whole seconds, each device with one of a few models or none."""
    ends = sorted(draw(st.sets(st.integers(1, WIDTH - 1), max_size=4)) | {WIDTH})
    found, start = [], 0
    for end in ends:
        runs = draw(st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=3, max_size=3))
        nodes = tuple(
            StagedNode(name, runs.count(name), 1, tuple(d for d, own in enumerate(runs) if own == name))
            for name in dict.fromkeys(runs)
            if name
        )
        found.append(ExecutionStage(float(start), float(end), nodes))
        start = end
    return tuple(found)


@settings(max_examples=200, deadline=None)
@given(stages())
def test_every_cell_shows_what_runs_then(found):
    drawn = gantt.of_stages(StagePlan(StagePlan.VERSION, "samullm", 3, 3, found, 0.0))
    if drawn.seconds != WIDTH:  # the last stage has no model
        return
    picture = gantt.text(drawn, WIDTH)
    marks = dict(re.findall(r"\b([A-Z]) (\w)\b", picture))
    for device, cells in rows(picture).items():
        for second, cell in enumerate(cells):
            stage = next(stage for stage in found if stage.start_s <= second < stage.end_s)
            names = [node.name for node in stage.nodes if int(device) in node.devices]
            assert [marks[cell]] == names if cell != IDLE else not names


def test_what_goes_on_in_the_next_stage_is_one_bar():
    on = StagedNode("a", 1, 1, (0,))
    found = (ExecutionStage(0.0, 5.0, (on, StagedNode("b", 1, 1, (1,)))), ExecutionStage(5.0, 9.0, (on,)))
    drawn = gantt.of_stages(StagePlan(StagePlan.VERSION, "samullm", 2, 2, found, 0.0))
    assert drawn.devices == ((Bar("a", 0.0, 9.0),), (Bar("b", 0.0, 5.0),)) and drawn.names == ("a", "b")


def test_models_that_share_alternate_and_the_key_says_how():
    shares = Share("space", 0.4), Share("space", 0.7)
    some = plan(planned("x", (0,), share=shares[0]), planned("y", (0,), share=shares[1]), planned("z", (1, 2), 50.0))
    picture = gantt.text(gantt.of_plan(some), WIDTH)
    found = rows(picture)
    assert found["0"] == "AB" * 9 + "A" + ON and found["1"] == found["2"] == "C" * WIDTH and found["3"] == IDLE * WIDTH
    assert "A x (space, 40%)" in picture and "B y (space, 70%)" in picture and "C z" in picture and "50 s" in picture


def test_without_an_end_there_is_no_axis():
    some = plan(planned("x", (0, 1)), planned("y", (2,), share=Share("time")), planned("w", (2,), share=Share("time")))
    picture = gantt.text(gantt.of_plan(some), WIDTH)
    assert "└" not in picture and rows(picture)["1"] == "A" * 19 + ON and "C w (time)" in picture
    assert "idle" in picture, "device 3 has none"


def test_short_bars_are_seen_before_long_ones():
    bars = (Bar("long", 0.0, 100.0), Bar("short", 99.999, 100.0), Bar("early", 0.0, 0.001))
    picture = gantt.text(Gantt(("long", "short", "early"), (bars,)), WIDTH)
    assert rows(picture)["0"] == "C" + "A" * (WIDTH - 2) + "B"


def test_neighbours_that_run_the_same_are_one_row_where_there_are_many():
    some = plan(planned("x", tuple(range(40))), planned("y", (40,)), cluster="8x8xA40")
    found = rows(gantt.text(gantt.of_plan(some), WIDTH))
    assert list(found) == ["0–39", "40", "41–63"] and len(found) < MOST_ROWS
    fewer = plan(planned("x", (0, 1)), cluster="8xA40")
    assert list(rows(gantt.text(gantt.of_plan(fewer), WIDTH))) == [str(device) for device in range(8)]


def test_more_models_than_marks_and_long_names_fit_lines():
    many = plan(*(planned(f"model number {i}", (i,)) for i in range(70)), cluster="9x8xA40")
    picture = gantt.text(gantt.of_plan(many), 64)
    assert all(f"model number {i}" in picture for i in range(70))
    assert max(len(line) for line in picture.splitlines()) <= 76


def blocks(drawing):
    found = re.findall(
        r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" fill="[^"]+"><title>([^<]*)<', drawing
    )
    return [(title, *map(float, figures)) for *figures, title in found]


def test_blocks_have_their_time_and_their_part_of_the_lane():
    shares = Share("space", 0.3), Share("space", 0.6)
    some = plan(planned("<x>", (0,), share=shares[0]), planned("y", (0,), share=shares[1]), planned("z", (1, 2), 50.0))
    drawing = gantt.drawing(gantt.of_plan(some))
    x, y, *z = blocks(drawing)
    assert x[0].startswith("&lt;x&gt; (space, 30%)") and "requests arrive" in x[0] and "until 50 s" in z[0][0]
    assert y[4] == pytest.approx(2 * x[4], abs=0.2) and y[2] == pytest.approx(x[2] + x[4], abs=0.2), "below each other"
    assert len(z) == 2 and z[0][3] == x[3] == y[3], "the whole width, as nothing ends later"
    assert z[0][4] == pytest.approx(x[4] + y[4], abs=0.2), "a lane of its own"
    half = Gantt(("a", "b"), ((Bar("a", 0.0, 5.0), Bar("b", 5.0, 10.0)),))
    a, b = blocks(gantt.drawing(half))
    assert a[3] == pytest.approx(b[3], abs=0.2) and b[1] == pytest.approx(a[1] + a[3], abs=0.2)
