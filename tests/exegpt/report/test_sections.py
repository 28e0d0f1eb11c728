"""Sections as one page, and the charts in them."""

import re
from html.parser import HTMLParser

import pytest

from exegpt.report import svg
from exegpt.report.sections import Section, page

SERIES = (("a", "#111111"), ("b", "#222222"))


def bars(drawing, colour):
    """Heights of a series' bars, its key left out."""
    return [float(h) for h in re.findall(rf'height="([\d.]+)" fill="{colour}"><title>', drawing)]


def test_bars_are_as_high_as_their_values_and_missing_ones_are_not_drawn():
    chart = svg.Panel("one & two", (("x", (4.0, None)), ("y", (2.0, 1.0))))
    drawing = svg.panels([chart], SERIES, "things/s")
    first, second = bars(drawing, "#111111")
    (third,) = bars(drawing, "#222222")
    assert first == pytest.approx(2 * second, abs=0.1) and second == pytest.approx(2 * third, abs=0.1)
    assert "one &amp; two" in drawing and "things/s" in drawing


def test_a_line_rises_with_its_values_and_stays_inside():
    groups = tuple((str(n), (1.0, 1.0)) for n in range(3))
    drawing = svg.panels([svg.Panel("", groups, (0.5, 1.0, 1.5))], SERIES, "", "latency")
    points = re.search(r'class="axis" d="M([^"]*)"', drawing)[1].split("L")
    heights = [float(point.split()[1]) for point in points]
    assert heights[0] > heights[1] > heights[2] > 0  # downwards on the screen
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert "latency" in drawing


def test_every_panel_has_a_place_of_its_own():
    charts = [svg.Panel(f"panel {n}", (("x", (1.0, 2.0)),)) for n in range(7)]
    drawing = svg.panels(charts, SERIES, "")
    places = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="start">panel', drawing)
    assert len(set(places)) == 7
    height = float(re.search(r'viewBox="0 0 \d+ (\d+)"', drawing)[1])
    assert all(float(y) < height for _, y in places)


def test_a_page_holds_every_section_and_is_well_formed():
    sections = [
        Section("first <title>", ("a", "b"), (("1", "<2>"),), ("a note",)),
        Section("second", ("c",), (("3",),), drawing="<svg></svg>"),
    ]
    text = page("all", ("stands on this",), sections)
    opened = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag != "meta":
                opened.append(tag)

        def handle_endtag(self, tag):
            assert opened.pop() == tag

    Checker().feed(text)
    assert not opened
    for part in ("first &lt;title&gt;", "&lt;2&gt;", "a note", "<svg></svg>", "stands on this"):
        assert part in text
