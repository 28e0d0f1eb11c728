"""Service attained while requests decode, and estimates of demand at the calls."""

from types import SimpleNamespace

import pytest

from xcore.applications.demand import ApplicationDemand, Seen, ServiceRates
from xcore.applications.demand_graph import END, DemandGraph, DemandStep
from xmulti.applications.application_progress import Account, DemandEstimates, SubmissionProgress
from xmulti.applications.submission import Call, Submission

RATES = ServiceRates(0.001, 0.1)
CALLS = (Call("a", "llm", 100, 10, 2), Call("b", "search", seconds=3.0), Call("a", "llm", 50, 20))


def begun():
    counter = SimpleNamespace(done=0)
    client = Account(counter)
    return SubmissionProgress(Submission(0, "x", 0.0, CALLS), RATES, counter, client), counter


def test_service_grows_with_every_iteration():
    progress, counter = begun()
    counter.done = 7  # others decoded before
    progress.begin(1)
    counter.done = 11
    progress.begin(1)
    assert progress.attained_s == pytest.approx(200 * 0.001 + 4 * 0.1)
    counter.done = 17
    assert progress.attained_s == pytest.approx(200 * 0.001 + (10 + 6) * 0.1)
    progress.end(1)  # the first, after its 10 tokens
    counter.done = 21
    progress.end(1)
    assert progress.attained_s == pytest.approx(200 * 0.001 + 20 * 0.1)
    assert progress.client.virtual_tokens == pytest.approx(200 / 10 + 20)


def test_other_backends_count_when_they_have_ended():
    progress, counter = begun()
    progress.begin(2)
    counter.done = 10
    progress.end(2)
    progress.leave()
    assert progress.seen == Seen("a", 100, 10, 2)
    before_s = progress.attained_s
    progress.leave()
    assert progress.attained_s == pytest.approx(before_s + 3.0)
    assert progress.seen == Seen("a", 100, 10, 2) and progress.call == CALLS[2]


def test_demand_is_estimated_once_or_at_every_call():
    units = (
        DemandStep("a", "llm", ("b", END), (100, 50), (10, 20), (2, 1)),
        DemandStep("b", "search", ("a",), seconds=(3.0,)),
    )
    models = {"x": ApplicationDemand(DemandGraph(1, "x", ("a",), units), RATES)}
    for refine in (False, True):
        progress, counter = begun()
        estimates = DemandEstimates(models, refine)
        estimates.update(progress)
        first = progress.demand
        progress.begin(2)
        counter.done = 10
        progress.end(2)
        progress.leave()
        estimates.update(progress)
        assert (progress.demand is first) != refine
        assert progress.since_estimate_s == pytest.approx(0.0 if refine else progress.attained_s)
        assert progress.attained_s > 2.0
