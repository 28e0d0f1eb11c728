"""The event simulator: by hand for one request, and nothing lost or overlapping for many."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.cluster import parse_cluster
from exegpt.errors import InputError
from exegpt.schedule import Stage
from exegpt.workload import RequestLengths
from tests.exegpt.nouns import profile, schedule
from xsimulator.replay import replay
from xsimulator.stage import Chunks, stage_costs

PROFILE = profile()
POLICIES = ("rra", "static", "orca", "chunked")


def costs():
    return stage_costs(schedule(), PROFILE)[0]


def encode(*lengths):
    return costs().step(Chunks(np.array(lengths, dtype=np.float64), np.zeros(len(lengths)), len(lengths)), 0, 0.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_request_is_its_encoding_and_its_iterations(policy):
    run = replay(schedule(policy), PROFILE, [RequestLengths(20, 5, 2.0)])
    (served,) = run.served
    first = 2.0 + encode(20)
    finish = first + sum(costs().step(None, 1, context) for context in (21, 22, 23, 24))
    assert served.start_s == 2.0
    assert served.first_token_s == pytest.approx(first)
    assert served.finish_s == pytest.approx(finish)
    assert run.seconds == pytest.approx(finish)
    assert run.estimate.latency_from == "arrival"


def test_a_static_batch_computes_finished_rows_along():
    run = replay(schedule("static"), PROFILE, [RequestLengths(10, 2), RequestLengths(10, 4), RequestLengths(7, 1)])
    starts = {s.index: s.start_s for s in run.served}
    finish = {s.index: s.finish_s for s in run.served}
    steps = [costs().step(None, 3, context) for context in ((11 + 11 + 7) / 3, (11 + 12 + 7) / 3, (11 + 13 + 7) / 3)]
    assert set(starts.values()) == {0.0}
    assert finish[2] == pytest.approx(encode(10, 10, 7))
    assert finish[0] == pytest.approx(finish[2] + steps[0])
    assert finish[1] == pytest.approx(finish[2] + sum(steps))


def test_a_prompt_in_chunks_asks_for_its_past():
    run = replay(schedule("chunked", max_num_batched_tokens=64), PROFILE, [RequestLengths(100, 1)])
    pieces = [Chunks(np.array([64.0]), np.array([0.0]), 0), Chunks(np.array([36.0]), np.array([64.0]), 1)]
    assert run.seconds == pytest.approx(sum(costs().step(piece, 0, 0.0) for piece in pieces))


def test_a_request_larger_than_the_cache_is_refused():
    with pytest.raises(InputError, match="Request 1 needs 8 KV blocks"):
        replay(schedule(kv_blocks=4), PROFILE, [RequestLengths(10, 4), RequestLengths(100, 20)])


REQUESTS = st.lists(
    st.builds(RequestLengths, st.integers(1, 90), st.integers(1, 20), st.sampled_from([0.0, 0.0, 0.05, 5.0])),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60)
@given(st.sampled_from(POLICIES), REQUESTS, st.integers(7, 40))
def test_everybody_is_served_once_and_in_time(policy, requests, kv_blocks):
    run = replay(schedule(policy, kv_blocks=kv_blocks), PROFILE, requests)
    assert sorted(s.index for s in run.served) == list(range(len(requests)))
    for s in run.served:
        asked = requests[s.index]
        assert (s.input_tokens, s.output_tokens, s.arrival_s) == (asked.input, asked.output, asked.arrival_s)
        assert asked.arrival_s <= s.start_s < s.first_token_s <= s.finish_s <= run.seconds
        assert (s.first_token_s == s.finish_s) == (asked.output == 1)
    spans = run.timeline.spans
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))
    if policy != "static":  # every token computed is a prompt's or the next of an output
        assert sum(span.tokens for span in spans) == sum(r.input + r.output - 1 for r in requests)
    assert [s.finish_s for s in run.served] == sorted(s.finish_s for s in run.served)


def test_a_pipeline_works_on_several_micro_batches_at_once():
    """Stages overlap, each does one piece at a time, and no token is begun before its predecessor is out."""
    stages = tuple(Stage((i,), 1, "both", None, (4 * i, 4 * i + 4)) for i in range(3))
    made = schedule("orca", stages=stages, cluster=parse_cluster("3xA40"), max_num_seqs=9, prefills_per_step=3)
    run = replay(made, PROFILE, [RequestLengths(30 + i, 12) for i in range(30)])
    assert sorted(s.index for s in run.served) == list(range(30))
    begun = {}
    for span in run.timeline.spans:
        assert span.start_s >= begun.get(span.stage, 0.0) - 1e-12  # a stage does one piece at a time
        begun[span.stage] = span.end_s
    for micro_batch in range(3):
        own = [span for span in run.timeline.spans if span.micro_batch == micro_batch]
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(own))
    assert sum(run.estimate.utilisation) > 1.8
