"""A model's run from event to event is the same as iteration by iteration."""

import time
from collections import deque
from dataclasses import asdict, replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.python_version import python_version
from tests.xmulti.stages import applications
from xcore.compiled_parts import all_there
from xcore.errors import InputError
from xmulti.stages import model_run
from xmulti.stages.batching_run import batching_run
from xmulti.stages.line_costs import BLOCK, line_costs
from xmulti.stages.model_run import ModelReplica, ModelWork, RemainingCalls, run_model

WORK = ModelWork(100.0, 0.5)
PYTHON = python_version("xmulti.stages.batching_run")


def engine(kv_tokens=4096, padded=True, most=512, context=512):
    costs = line_costs(applications.degree(1, kv_tokens=kv_tokens), padded)
    tables = {key: getattr(costs, key)[: most + 1].copy() for key in ("prefill", "prefill_sampled", "decode")}
    return ModelReplica(replace(costs, **tables), WORK, context)


def calls_of(prompts, outputs, following=None):
    count = len(prompts)
    chain = np.full(count, -1) if following is None else np.asarray(following)
    return RemainingCalls(np.asarray(prompts), np.asarray(outputs), np.zeros(count), chain)


def blocks(tokens):
    return -(-tokens // BLOCK)


class Oracle:
    """One replica, iteration by iteration."""

    def __init__(self, engine, calls, ready, start_s, until_s):
        self.engine, self.calls, self.until = engine, calls, until_s
        self.prompt, self.left = list(calls.prompts), list(calls.outputs)
        self.cached, self.done = [0] * len(self.prompt), [np.inf] * len(self.prompt)
        self.arrivals = deque(sorted(calls.first, key=lambda i: ready[i]))
        self.ready, self.now, self.queue, self.running = ready, start_s, deque(), []
        self.free, self.preemptions, self.iterations = engine.costs.blocks, 0, 0

    def run(self):
        while self.step():
            pass
        return self

    def step(self):
        self.arrive()
        if not self.running and not self.queue:
            if not self.arrivals or self.ready[self.arrivals[0]] >= self.until:
                return False
            self.now = self.ready[self.arrivals[0]]
            return True
        admitted = self.admitted()
        if admitted:
            seconds = self.engine.costs.prefill_s([self.prompt[i] for i in admitted])
            if self.now + seconds > self.until:
                return False
            for i in admitted:
                self.queue.popleft()
                self.cached[i] = self.prompt[i]
                self.free -= blocks(self.cached[i])
            self.running += admitted
            self.end(seconds, admitted)
            return True
        while sum(self.cached[i] % BLOCK == 0 for i in self.running) > self.free:
            last = self.running.pop()
            self.free += blocks(self.cached[last])
            self.prompt[last] = self.cached[last] + 1
            self.queue.appendleft(last)
            self.preemptions += 1
        seconds = self.engine.costs.decode_s([self.cached[i] + 1 for i in self.running])
        if self.now + seconds > self.until:
            return False
        for i in self.running:
            self.free -= self.cached[i] % BLOCK == 0
            self.cached[i] += 1
        self.end(seconds, self.running)
        return True

    def arrive(self):
        while self.arrivals and self.ready[self.arrivals[0]] <= self.now:
            self.queue.append(self.arrivals.popleft())

    def admitted(self):
        admitted, free, most = [], self.free, self.engine.costs.decode.shape[0] - 1
        for i in self.queue:
            lengths = [self.prompt[j] for j in (*admitted, i)]
            tokens = len(lengths) * max(lengths) if self.engine.costs.padded else sum(lengths)
            fits = tokens <= self.engine.most_tokens or not admitted
            if len(self.running) + len(admitted) == most or not fits:
                break
            if free - blocks(self.prompt[i]) < self.engine.watermark:
                break
            free -= blocks(self.prompt[i])
            admitted.append(i)
        return admitted

    def end(self, seconds, members):
        self.now += seconds
        self.iterations += 1
        for i in members:
            self.left[i] -= 1
        ended = [i for i in self.running if not self.left[i]]
        if ended:
            self.arrive()
        for i in ended:
            self.done[i] = self.now
            self.free += blocks(self.cached[i])
            if self.calls.following[i] >= 0:
                self.queue.append(self.calls.following[i])
        self.running = [i for i in self.running if self.left[i]]


@st.composite
def cases(draw):
    count = draw(st.integers(1, 25))
    prompts = draw(st.lists(st.integers(1, 150), min_size=count, max_size=count))
    outputs = draw(st.lists(st.integers(1, 120), min_size=count, max_size=count))
    ready = draw(st.lists(st.sampled_from([0.0, 0.05, 0.7, 3.0, np.inf]), min_size=count, max_size=count))
    following = [-1] * count
    for call in range(count - 1):
        if draw(st.integers(0, 3)) == 0:
            following[call] = call + 1
    kv_tokens, padded = draw(st.sampled_from([320, 480, 4096])), draw(st.booleans())
    most, until = draw(st.sampled_from([3, 512])), draw(st.sampled_from([0.4, 2.0, np.inf]))
    return calls_of(prompts, outputs, following), np.array(ready), engine(kv_tokens, padded, most), until


@settings(max_examples=300, deadline=None)
@given(cases())
def test_events_are_what_iterations_come_to(case):
    calls, ready, small, until = case
    run = run_model(small, calls, ready, start_s=0.1, until_s=until)
    oracle = Oracle(small, calls, ready, 0.1, until).run()
    np.testing.assert_allclose(run.done, oracle.done, rtol=1e-9)
    assert (run.iterations, run.preemptions) == (oracle.iterations, oracle.preemptions)
    assert (run.generated == calls.outputs - np.array(oracle.left)).all()


@settings(max_examples=100, deadline=None)
@given(cases())
def test_python_computes_what_is_compiled(case):
    calls, ready, small, until = case
    found = []
    for function in (batching_run, PYTHON.batching_run):
        with mock.patch.object(model_run, "batching_run", function):
            found.append(run_model(small, calls, ready, start_s=0.1, until_s=until))
    one, other = (asdict(run) for run in found)
    assert all(np.array_equal(one[name], other[name]) for name in one)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_what_a_run_leaves_is_computed_once(case):
    """Stopped and begun again, all tokens are made, and only new positions count as work."""
    calls, ready, small, until = case
    ready = np.where(np.isfinite(ready), ready, 0.0)
    before = run_model(small, calls, ready, until_s=until)
    left = ~np.isfinite(before.done)
    outputs = np.maximum(1, calls.outputs - before.generated)
    rest = RemainingCalls(calls.prompts + before.generated, outputs, before.computed, np.full(len(left), -1))
    after = run_model(small, rest, np.where(left, 0.0, np.inf))
    assert np.isfinite(after.done).sum() == left.sum()
    total = WORK.of(calls.prompts + calls.outputs - 1.0)
    assert before.work + after.work == pytest.approx(total, rel=1e-9)


def test_a_full_cache_preempts_and_the_last_one_waits():
    calls = calls_of([100] * 4, [120] * 4)
    run = run_model(engine(kv_tokens=480), calls, np.zeros(4))
    assert run.preemptions > 0 and np.isfinite(run.done).all()
    assert run.done[0] == min(run.done)


def test_replicas_share_chains_and_the_slowest_counts():
    calls = calls_of([10] * 6, [5, 5, 5, 5, 60, 60], [2, -1, -1, -1, 5, -1])
    one, two = (run_model(engine(most=1), calls, np.zeros(6), replicas) for replicas in (1, 2))
    assert two.seconds < one.seconds
    assert two.done[2] > two.done[0] and two.done[5] > two.done[4]
    assert two.busy_s == pytest.approx(one.busy_s, rel=1e-9), "one sequence at a time is as long anywhere"
    assert two.work == pytest.approx(one.work)
    many = run_model(engine(), calls, np.zeros(6), 50)
    assert many.seconds == many.done.max() < np.inf


def test_what_cannot_fit_is_refused():
    for calls in (calls_of([500], [13]), calls_of([0], [3]), calls_of([4], [0])):
        with pytest.raises(InputError):
            run_model(engine(), calls, np.zeros(1))
    with pytest.raises(InputError, match="the cache 320"):
        run_model(engine(kv_tokens=320), calls_of([300], [30]), np.zeros(1))
    assert run_model(engine(), calls_of([500], [12]), np.zeros(1)).iterations == 12


@pytest.mark.skipif(not all_there(), reason="exegpt was installed without a C compiler")
def test_ten_thousand_calls_take_well_under_a_second():
    random = np.random.default_rng(0)
    calls = calls_of(random.integers(5, 128, 10_000), random.integers(1, 257, 10_000))
    began = time.perf_counter()
    run = run_model(engine(kv_tokens=60_000), calls, np.zeros(10_000))
    assert time.perf_counter() - began < 0.5
    assert np.isfinite(run.done).all()


def test_arrays_that_do_not_fit_together_are_refused():
    costs, one = engine().costs, np.zeros(1)
    tables, places = (costs.prefill, costs.prefill_sampled, costs.decode), np.array([1])
    settings = np.array([0.0, np.inf, 100.0, 1.0, 2048.0, 1.0, 1.0, 1.0])
    results = (np.full(1, np.inf), np.zeros(1), np.zeros(1))
    lists = (one, places, places, np.array([-1]), np.array([0]))
    assert batching_run(*tables, *lists, settings, *results)[2] == 1
    with pytest.raises(ValueError, match="sizes"):
        batching_run(*tables, np.zeros(2), *lists[1:], settings, *results)
    with pytest.raises(ValueError, match="sizes"):
        batching_run(*tables, *lists, settings[:7], *results)
    with pytest.raises(TypeError):
        batching_run(*tables, *lists, settings, results[0].astype(int), *results[1:])
