"""The recent history of a server: its charts show all of the last minutes."""

import pytest

pytest.importorskip("fastapi")

from xserver.http.answered import Answered
from xserver.telemetry.observed import Observed


def test_the_chart_of_requests_reaches_back_to_the_first_of_many():
    """It showed the last 600 requests: with many, those of a few seconds."""
    observed = Observed(0.0)
    for number in range(5000):
        ended_s = 100.0 + number * 0.05
        observed.answered(Answered("i", "m", "/", 200, "answered", "usual", None, ended_s, 0.5))
    points = observed.series(100.0 + 5000 * 0.05)["requests"]
    assert 300 <= len(points) <= 600
    assert points[0][0] == pytest.approx(250.0) and points[-1][0] < 2.0
