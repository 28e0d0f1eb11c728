"""The recurrence against an event-driven simulation of the dependencies alone."""

import heapq
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xsimulator.steady.pipeline import iteration_times, phase_times, tandem_times


def waits(phases, encodes, iterations, micro_batches, joins):
    """Pieces of work (phase, cell) in the order of every stage, and for each first stage what it waits for."""
    order, needs = [], {}
    last = [None] * micro_batches
    for phase in range(phases):
        order += [(phase, e) for e in range(encodes)]
        for iteration in range(iterations):
            for m in range(micro_batches):
                cell = (phase, encodes + iteration * micro_batches + m)
                order.append(cell)
                needs[cell] = [last[m]] if last[m] else []
                if iteration == 0 and encodes:  # its share of the new sequences; the last has all of them
                    share = max(0, min(encodes - 1, (m + 1) * encodes // micro_batches - 1))
                    place = (m - phase * joins) % micro_batches  # fewer sequences than micro-batches join in turn
                    if joins < micro_batches:
                        share = place * encodes // joins
                    if joins == micro_batches or place < joins:
                        needs[cell].append((phase, share))
                last[m] = cell
    return order, needs


def event_simulation(encode, decode, micro_batches, hops, phases, joins=None):
    """{(phase, cell, stage): (start, end)} by events: the end of one piece frees its stage and wakes who waits."""
    stages = encode.shape[1]
    order, needs = waits(phases, len(encode), len(decode), micro_batches, joins or micro_batches)
    missing, wakes = {}, defaultdict(list)  # how many inputs a piece still lacks; whom an end wakes, after how long
    for cell in order:
        encodes = cell[1] < len(encode)
        for s in range(stages):
            missing[cell, s] = 1 if s else len(needs.get(cell, []))
            if s:
                wakes[cell, s - 1].append(((cell, s), hops[0 if encodes else 1][s]))
        for before in needs.get(cell, []):
            wakes[before, stages - 1].append(((cell, 0), 0.0))
    turn, busy, times, events = [0] * stages, [False] * stages, {}, []

    def try_start(s, now):
        if busy[s] or turn[s] == len(order) or missing[order[turn[s]], s]:
            return
        cell = order[turn[s]]
        turn[s] += 1
        busy[s] = True
        number = cell[1]
        work = encode[number, s] if number < len(encode) else decode[(number - len(encode)) // micro_batches, s]
        times[(*cell, s)] = (now, now + work)
        heapq.heappush(events, (now + work, 0, "end", cell, s))

    for s in range(stages):
        try_start(s, 0.0)
    while events:
        now, _, kind, cell, s = heapq.heappop(events)
        if kind == "end":
            busy[s] = False
            for (other, place), delay in wakes[cell, s]:
                heapq.heappush(events, (now + delay, 1, "input", other, place))
        else:
            missing[cell, s] -= 1
        try_start(s, now)
    return times


SECONDS = st.floats(0.01, 3.0)


@st.composite
def pipelines(draw):
    stages, encodes, iterations = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    row = st.lists(SECONDS, min_size=stages, max_size=stages)
    encode = np.array(draw(st.lists(row, min_size=encodes, max_size=encodes)))
    decode = np.array(draw(st.lists(row, min_size=iterations, max_size=iterations)))
    way = st.lists(st.floats(0, 0.5), min_size=stages, max_size=stages).map(np.array)
    return encode, decode, draw(st.integers(1, 4)), (draw(way), draw(way))


@settings(max_examples=60)
@given(pipelines())
def test_one_phase_is_what_the_events_say(pipeline):
    encode, decode, micro_batches, hops = pipeline
    times = phase_times(encode, decode, micro_batches, hops, repeats=False)
    events = event_simulation(encode, decode, micro_batches, hops, 1)
    last = encode.shape[1] - 1
    out = np.array([events[0, cell, last][1] for cell in range(len(encode) + len(decode) * micro_batches)])
    assert times.encoded == pytest.approx(out[: len(encode)].max())
    np.testing.assert_allclose(times.decoded, out[len(encode) :].reshape(len(decode), micro_batches).max(axis=1))
    assert times.period == pytest.approx(max(end for _, end in events.values()))


@settings(max_examples=60)
@given(pipelines())
def test_iterations_alone_are_what_the_events_say(pipeline):
    _, decode, micro_batches, (_, hop) = pipeline
    stages = decode.shape[1]
    starts, ends = iteration_times(np.repeat(decode[:, None], micro_batches, axis=1), hop)
    events = event_simulation(np.zeros((0, stages)), decode, micro_batches, (hop, hop), 1)
    assert len(events) == starts.size
    for (_, cell, stage), (start, end) in events.items():
        assert starts[(*divmod(cell, micro_batches), stage)] == pytest.approx(start)
        assert ends[(*divmod(cell, micro_batches), stage)] == pytest.approx(end)


LONG_CYCLE = (
    np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0.5], [1, 2, 1.5]]),
    np.array([[2.0, 1, 2]]),
    3,
    (np.zeros(3), np.zeros(3)),
)
"""Repeats itself only after several phases."""


@settings(max_examples=60)
@example(LONG_CYCLE, 0)
@given(pipelines(), st.integers(0, 3))
def test_repeated_phases_have_the_period_of_a_long_simulation(pipeline, more):
    encode, decode, micro_batches, hops = pipeline
    sequences = min(len(encode) + more, micro_batches)
    encode = encode[:sequences]
    times = phase_times(encode, decode, micro_batches, hops, sequences=sequences)
    events = event_simulation(encode, decode, micro_batches, hops, 90, sequences)
    begun = [events[phase, 0, 0][0] for phase in range(90)]
    assert times.period == pytest.approx((begun[-1] - begun[29]) / 60, rel=1e-3)  # a cycle may span phases
    busiest = (encode.sum(axis=0) + micro_batches * decode.sum(axis=0)).max()
    assert times.period >= busiest * (1 - 1e-9)


@given(st.lists(SECONDS, min_size=1, max_size=4), st.lists(SECONDS, min_size=1, max_size=6), st.integers(1, 3))
def test_one_stage_is_a_sum(encode, decode, micro_batches):
    times = phase_times(np.array(encode)[:, None], np.array(decode)[:, None], micro_batches)
    assert times.period == pytest.approx(sum(encode) + micro_batches * sum(decode))
    assert times.encoded == pytest.approx(sum(encode))
    np.testing.assert_allclose(times.decoded, sum(encode) + micro_batches * np.cumsum(decode))


def test_micro_batches_fill_a_pipeline():
    """Two equal stages: one micro-batch leaves each stage idle half of the time, two leave none."""
    encode, decode = np.full((1, 2), 1.0), np.full((50, 2), 1.0)
    alone = phase_times(encode, decode, micro_batches=1).period
    both = phase_times(np.repeat(encode, 2, axis=0), decode, micro_batches=2).period
    assert alone >= 100
    assert both == pytest.approx(102, abs=1)


def queued(seconds, hops, most):
    """Items through stages by events: [(start, out)]. A stage takes up who has come, first come first served; an item
    enters when the first stage is free and fewer than `most` are inside.
    """
    items, stages = seconds.shape
    waiting, busy = [[] for _ in range(stages)], [False] * stages
    waiting[0] = list(range(items))
    starts, outs, inside, events = np.zeros(items), np.zeros(items), 0, []

    def try_start(s, now):
        nonlocal inside
        if busy[s] or not waiting[s] or (s == 0 and inside == most):
            return
        item = waiting[s].pop(0)
        if s == 0:
            inside += 1
            starts[item] = now
        busy[s] = True
        heapq.heappush(events, (now + seconds[item, s], 0, item, s))

    try_start(0, 0.0)
    while events:
        now, kind, item, s = heapq.heappop(events)
        if kind:  # arrives at a stage
            waiting[s].append(item)
            try_start(s, now)
            continue
        busy[s] = False
        if s + 1 < stages:
            heapq.heappush(events, (now + hops[s + 1], 1, item, s + 1))
        else:
            outs[item] = now
            inside -= 1
        try_start(s, now)
        try_start(0, now)
    return starts, outs


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(0, 2**32 - 1), st.integers(1, 9), st.floats(0, 0.5))
def test_items_in_tandem_are_what_the_events_say(stages, seed, most, hop):
    rng = np.random.default_rng(seed)
    seconds, hops = rng.uniform(0.1, 2.0, (80, stages)), np.full(stages, hop)
    starts, outs = queued(seconds, hops, most)
    settled = slice(20, None)
    way = (outs - starts)[settled]
    between, mean, deviation = tandem_times(seconds, hops, most)
    assert between == pytest.approx((outs[-1] - outs[20]) / 59)
    assert (mean, deviation) == (pytest.approx(way.mean()), pytest.approx(way.std(), abs=1e-9))


def test_equal_items_in_tandem_come_at_the_slowest_stages_pace():
    seconds = np.tile([1.0, 3.0, 2.0], (60, 1))
    between, way, deviation = tandem_times(seconds, np.zeros(3), most=1)
    assert (between, way, deviation) == (pytest.approx(6), pytest.approx(6), pytest.approx(0))
    between, way, _ = tandem_times(seconds, np.zeros(3), most=5)
    assert between == pytest.approx(3)
    assert way == pytest.approx(5 * 3)  # Little's law: five inside, one out every three seconds


@settings(max_examples=40)
@given(pipelines())
def test_with_fewer_sequences_than_micro_batches_they_join_in_turn(pipeline):
    """One sequence a phase: every micro-batch gets one in turn, so none waits longer than where all wait for it."""
    encode, decode, micro_batches, hops = pipeline
    encode = encode[:1]
    each = phase_times(encode, decode, micro_batches, hops, sequences=1)
    every = phase_times(encode, decode, micro_batches, hops)
    events = event_simulation(encode, decode, micro_batches, hops, 90, 1)
    begun = [events[phase, 0, 0][0] for phase in range(90)]
    assert each.period == pytest.approx((begun[-1] - begun[29]) / 60, rel=1e-3)
    assert each.period <= every.period * (1 + 1e-9)
