"""Admission control: what is predicted of the queue, and what follows from it."""

import asyncio
import heapq
import math
from dataclasses import replace

import numpy as np
import pytest

from xcore.policies.chunked import ChunkedControl
from xcore.policies.orca import OrcaControl
from xcore.policies.rra import RRAControl
from xcore.requests.engine_protocol import Opened
from xcore.requests.request import Request
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule, Stage
from xcore.specs.workload import LengthDistribution, Workload, task
from xprofiler.roofline import roofline_profile
from xserver.admission.admission_control import Admission
from xserver.admission.arrival_rate import ArrivalRate
from xserver.admission.lengths import Lengths
from xserver.admission.retry_after import RetryAfter
from xserver.engines.engine_link import Output
from xserver.http.api_error import ApiError

MODEL, CLUSTER = builtin_model("opt-13b"), parse_cluster("1xA100-80GB")
PROFILE = roofline_profile(MODEL, CLUSTER)
SCHEDULE = Schedule(
    version=Schedule.VERSION,
    policy="orca",
    control=OrcaControl(max_num_seqs=16, prefills_per_step=1),
    model=ModelReference(MODEL, MODEL.fingerprint),
    cluster=CLUSTER,
    workload=task("T"),
    profile=ProfileReference("roofline", "0"),
    stages=(Stage((0,), 1, "both", None, (0, MODEL.layers)),),
    kv_blocks=2000,
    dtype="fp16",
    kv_dtype="fp16",
    admission="grow",
    latency_bound_s=20.0,
)


class Clock:
    def __init__(self):
        self.s = 100.0

    def __call__(self):
        return self.s


def outputs(running: int, waiting: int, generated: int = 30, most: int = 900) -> list[Output]:
    made = [Output(Request(str(i), (1,) * 100, most), tokens=[0] * generated) for i in range(running)]
    return made + [Output(Request(str(running + i), (1,) * 100, most)) for i in range(waiting)]


def admission(present: list[Output], bound_s: float | None = 20.0, **changes) -> Admission:
    schedule = replace(SCHEDULE, latency_bound_s=bound_s, **changes)
    clock = Clock()
    made = Admission(Opened(schedule, PROFILE, None, (), 0.0), lambda: present, 1000, clock)
    made._clock, made.others = clock, 0.0
    made._accepted = sum(1 for output in present if not output.tokens)
    asyncio.run(made.update())
    return made


def test_an_idle_engine_starts_at_once():
    promise = admission([]).admit([(100, 50)], 100.0)
    assert promise.start_s == 100.0 < promise.finish_s < 120.0


def test_starts_come_later_the_more_wait():
    starts = [admission(outputs(16, n)).admit([(100, 50)], 100.0).start_s for n in (0, 4, 8, 16, 32)]
    assert starts == sorted(starts) and starts[0] > 100.0 and starts[-1] > starts[1] + 0.5


def test_every_accepted_sequence_takes_a_place():
    made, present = admission(outputs(16, 8)), []
    starts = [made.admit([(100, 50)], 100.0).start_s for _ in range(30)]
    assert starts == sorted(starts) and starts[-1] > starts[0]
    several = admission(outputs(16, 8)).admit([(100, 50)] * 30, 100.0)
    assert several.start_s == pytest.approx(starts[-1]) and not present


def test_predictions_are_plain_numbers():
    """Also beyond the table, whose gaps were numpy's: a log line compared them with other values."""
    made = admission(outputs(16, 8))
    for _ in range(40):
        promise = made.admit([(100, 50)], 100.0)
        assert {type(value) for value in (promise.start_s, promise.finish_s, promise.token_s, promise.due_s)} == {float}


def test_what_would_be_late_is_refused_with_the_time_to_wait():
    made = admission(outputs(16, 4), bound_s=14.0)
    accepted = 0
    with pytest.raises(ApiError) as refused:
        while True:
            made.admit([(100, 900)], 100.0)
            accepted += 1
    error = refused.value
    assert error.status == 429 and error.code == "latency_bound" and accepted > 0
    assert int(error.headers["Retry-After"]) >= int(error.headers["retry-after-ms"]) / 1000 > 0
    assert made.admit([(100, 2)], 100.0)  # shorter answers are still in time


def test_without_a_bound_only_the_queue_is_limited():
    made = admission(outputs(16, 900), bound_s=None)
    for _ in range(50):
        made.admit([(100, 900)], 100.0)
    with pytest.raises(ApiError) as refused:
        made.admit([(100, 900)] * 200, 100.0)
    assert refused.value.code == "concurrency_limit"


def test_prompts_longer_than_planned_are_outside_the_promise_and_few():
    longest = SCHEDULE.workload.input.quantile(0.99)
    assert admission(outputs(4, 0)).admit([(longest + 1, 50)], 100.0).long
    present = [Output(Request(str(i), (1,) * (longest + 1), 50), tokens=[0]) for i in range(3)]
    with pytest.raises(ApiError):
        admission(present).admit([(longest + 1, 50)], 100.0)
    assert not admission(present).admit([(100, 50)], 100.0).long


def test_an_engine_may_be_silent_for_longer_while_it_has_a_long_prompt():
    """Otherwise it counts as stalled within the prefill, and the next engine again."""
    present = outputs(4, 0)
    made = admission(present)
    before_s = made.cycle_s
    present.append(Output(Request("9", (1,) * 5000, 50)))
    assert made.cycle_s - before_s > made._pace.prefill_s(4000, 0)


def test_a_slower_machine_makes_predictions_longer():
    present = outputs(16, 0)
    made = admission(present)
    before = made.admit([(100, 50)], 100.0)
    serve(made, present, 17, 40, 2.0)
    after = made.admit([(100, 50)], made._now())
    assert made.scale == pytest.approx(2.0, rel=0.2)
    assert after.finish_s - after.start_s > 1.5 * (before.finish_s - before.start_s)


def serve(made: Admission, present: list[Output], load: int, seconds: float, slower: float) -> None:
    """An engine that `load` sequences share, so much slower than predicted."""
    begin_s = made._clock.s
    for step in range(1, 41):
        made._clock.s = begin_s + seconds * step / 40
        token_s = made._pace._predicted_s(load) * slower
        first_s = made._clock.s - 20 * token_s
        if first_s >= begin_s:
            present.append(Output(Request("x", (1,) * 100, 50), [], [0] * 21, first_s=first_s, last_s=made._clock.s))
            made.ended(present.pop())
        record(made, load, seconds / 40 / slower)


def record(made: Admission, load: int, seconds: float, cached: int = 0) -> None:
    """Record that `load` sequences have shared the engine for these predicted seconds, with steady prefills.

    A sequence is delayed by the prefills of the others. What is left of a prefill counts the next time.
    """
    pace = made._pace
    _, _, rate, delay_s = pace._rows[min(load, len(pace._rows) - 1)]
    made.others += (1 - 1 / load) * seconds / (1 / rate - delay_s * pace._saved)
    while made.others >= 1:
        made.others -= 1
        pace.began(round(made._inputs.mean), cached)
    pace.shared_by(load, made._clock.s)


@pytest.mark.parametrize("generated", [0, 1, 50, 127, 128, 400])
def test_supposed_lengths_have_the_conditional_distribution(generated):
    """The oracle: draws from the distribution, those that are no longer than what was generated left out."""
    lengths = LengthDistribution.truncated_normal(100.0, 40.0, 250)
    supposed = [Lengths(lengths).supposed(n, generated, 10**6) for n in range(4000)]
    assert min(supposed) > generated
    drawn = lengths.sample(400_000, np.random.default_rng(0))
    beyond = drawn[drawn > generated]
    if len(beyond) > 1000:
        assert np.mean(supposed) == pytest.approx(beyond.mean(), rel=0.02)
        assert np.percentile(supposed, 90) == pytest.approx(np.percentile(beyond, 90), rel=0.02)


def test_supposed_lengths_stay_within_the_cap():
    lengths = Lengths(LengthDistribution.fixed(100))
    assert lengths.supposed(3, 0, 40) == 40 and lengths.supposed(3, 120, 130) == 130


WIDE = {"policy": "chunked", "control": ChunkedControl(max_num_seqs=512, max_num_batched_tokens=512)}


def test_nobody_is_accepted_who_makes_others_late():
    """With 512 residents the answers would be late: as many are accepted as stay in time together."""
    present = []
    made = admission(present, bound_s=12.0, **WIDE)
    for tokens, why in ((300, "longer than the latency bound"), (2, "Some of .* requests")):  # however short they are
        with pytest.raises(ApiError, match=why):
            while True:
                promise = made.admit([(100, tokens)], 100.0)
                present.append(Output(Request("x", (1,) * 100, tokens), tokens=[0], due_s=promise.due_s))
    assert 16 < len(present) < 512
    for output in present:
        output.tokens += [0] * 150
    made._clock.s += 0.02
    made.stepped()
    assert made.admit([(100, 2)], 100.0)  # half of each is done, and hardly any time has gone


def test_the_rate_of_arrival_forgets():
    rate = ArrivalRate(10.0)
    for number in range(300):
        rate.come(1, number / 5)
    assert rate.rate(60.0) == pytest.approx(5.0, rel=0.05)
    assert rate.rate(70.0) == pytest.approx(rate.rate(60.0) / math.e)


def test_more_are_accepted_where_few_others_come():
    """A load that ends leaves the engine to those that stay; one that is replaced doesn't."""
    accepted = []
    for come in (0, 5000):
        present = outputs(100, 0)
        for number, output in enumerate(present):
            output.request = replace(output.request, max_tokens=1 + number)
        made = admission(present, bound_s=8.0, **WIDE)
        made._acceptances.come(come, 100.0)
        accepted.append(0)
        with pytest.raises(ApiError, match="latency bound"):
            while True:
                promise = made.admit([(100, 128)], 100.0)
                present.append(Output(Request("x", (1,) * 100, 128), tokens=[0], due_s=promise.due_s))
                accepted[-1] += 1
    assert accepted[0] > accepted[1]


def test_who_is_late_anyway_or_never_due_holds_up_nobody():
    for due_s in (90.0, float("inf")):
        present = [Output(Request(str(i), (1,) * 100, 900), tokens=[0], due_s=due_s) for i in range(8)]
        assert admission(present, bound_s=12.0, **WIDE).admit([(100, 50)], 100.0)


def test_short_answers_are_accepted_where_long_ones_are_not():
    made = admission([*outputs(200, 0)], bound_s=12.0, **WIDE)
    with pytest.raises(ApiError, match="longer than the latency bound"):
        made.admit([(100, 300)], 100.0)
    assert made.admit([(100, 20)], 100.0)


def test_a_schedule_without_a_closed_form_has_a_pace_too():
    """RRA that grows is replayed: what it holds follows from what it serves."""
    control = RRAControl(encode_batch=16, decode_batch=64, decode_iterations=16)
    pace = admission([], policy="rra", control=control)._pace
    assert 16 < pace.most <= 64 and 0 < pace.token_s(1) <= pace.token_s(16) <= pace.token_s(64)


@pytest.mark.parametrize("share", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("bound_s", [6.0, pytest.param(12.0, marks=pytest.mark.slow)])
def test_all_accepted_are_in_time_on_an_engine_that_is_as_predicted(bound_s, share):
    """The oracle: sequences that share an engine, each of them as fast as the load allows. Shares are of what is
    answered with as many residents as stay in time if all are as long as the longest.
    """
    pace, outputs = admission([], **WIDE)._pace, SCHEDULE.workload.output
    alone = pace.load_within(0.96 * bound_s, outputs.quantile(0.99))
    rate = share * alone / (outputs.mean * pace.token_s(alone))
    answered = {"admitting": 0, "capped": 0}  # over both seeds: one alone varies by some percents
    for seed in range(2):
        done = shared_engine(admitting, rate, bound_s, seed)
        capped = shared_engine(
            lambda present, bound_s: lambda tokens, clock: capped_at(alone, present), rate, bound_s, seed
        )
        assert done["late"] == 0
        answered["admitting"] += done["answered"]
        answered["capped"] += capped["answered"]
    assert answered["admitting"] >= {0.5: 0.95, 1.0: 0.95, 2.0: 1.05}[share] * answered["capped"]


def admitting(present, bound_s):
    """Whether admission accepts an answer of so many tokens, and when it is due."""
    made = admission(present, bound_s=bound_s, **WIDE)
    made._idle_starts = (), 1, None  # nothing ever waits

    def accept(tokens, s):
        made._clock.s = s
        try:
            return made.admit([(50, tokens)], s).due_s
        except ApiError:
            return None

    return accept


def capped_at(most, present):
    return 1e9 if len(present) < most else None


def shared_engine(policy, rate, bound_s, seed):
    """Requests at a rate, of known lengths, for 10 bounds: how many were answered in time, and how many of
    those that the promise is for late.
    """
    rng, pace = np.random.default_rng(seed), admission([], **WIDE)._pace
    present: list[Output] = []
    promised = SCHEDULE.workload.output.quantile(0.99)
    accept, left, s, counts = policy(present, bound_s), {}, 100.0, {"answered": 0, "late": 0}
    next_s = s
    while s < 100.0 + 10 * bound_s:
        token_s = pace.token_s(max(1, len(present)))
        until_s = min([next_s, *(s + left[id(output)] * token_s for output in present)])
        for output in present:
            left[id(output)] -= (until_s - s) / token_s
            output.tokens = [0] * max(1, int(output.request.max_tokens - left[id(output)]))
        s = until_s
        for output in [output for output in present if left[id(output)] <= 1e-6]:
            present.remove(output)
            late = s > min(output.due_s, output.added_s + bound_s) + 1e-6
            if not late or output.request.max_tokens <= promised:
                counts["late" if late else "answered"] += 1
        if s == next_s:
            next_s += rng.exponential(1 / rate)
            tokens = int(SCHEDULE.workload.output.sample(1, rng)[0])
            due_s = accept(tokens, s)
            if due_s is not None:
                present.append(Output(Request("x", (1,) * 50, tokens), added_s=s, due_s=due_s))
                left[id(present[-1])] = tokens
    return counts


@pytest.mark.parametrize(("bound_s", "goodput"), [(7.0, 8.9), (8.0, 11.8)])
def test_after_a_burst_who_comes_back_when_told_is_accepted(bound_s, goodput):
    """Half a minute of twice the goodput, then 60 % of it: four of five first retries should be accepted."""
    tried = accepted = 0
    for seed in range(3):
        for came, told in retries_of(bound_s, goodput, seed):
            assert told <= 60
            tried, accepted = tried + 1, accepted + came
    assert tried > 100 and accepted >= 0.8 * tried


def retries_of(bound_s, goodput, seed):
    """Whether each first retry was accepted, and for how long it waited. Engine as in `shared_engine`."""
    rng, outputs, pace = np.random.default_rng(seed), SCHEDULE.workload.output, admission([], **WIDE)._pace
    present, left, retried = [], {}, []
    made = admission(present, bound_s=bound_s, **WIDE)
    made._idle_starts = (), 1, None
    todo = []
    for begin_s, rate in ((100.0, 2 * goodput), (130.0, 0.6 * goodput)):
        arrivals = begin_s + np.cumsum(rng.exponential(1 / rate, round(30 * rate)))
        todo += [(s, 0.0, int(tokens)) for s, tokens in zip(arrivals, outputs.sample(len(arrivals), rng), strict=True)]
    heapq.heapify(todo)
    s = 100.0
    while todo:
        token_s = pace.token_s(max(1, len(present)))
        until_s = min([todo[0][0], *(s + left[id(output)] * token_s for output in present)])
        for output in present:
            left[id(output)] -= (until_s - s) / token_s
            output.tokens = [0] * max(1, int(output.request.max_tokens - left[id(output)]))
        s = made._clock.s = until_s
        for output in [output for output in present if left[id(output)] <= 1e-6]:
            present.remove(output)
            made._retry.ended(s)
        if s < todo[0][0]:
            continue
        came_s, told_s, tokens = heapq.heappop(todo)
        try:
            due_s = made.admit([(50, tokens)], s).due_s
        except ApiError as error:
            if told_s:
                retried.append((False, told_s))
            elif came_s < 130.0:
                wait_s = int(error.headers["retry-after-ms"]) / 1000
                heapq.heappush(todo, (s + wait_s, wait_s, tokens))
            continue
        if told_s:
            retried.append((True, told_s))
        present.append(Output(Request("x", (1,) * 50, tokens), added_s=s, due_s=due_s))
        left[id(present[-1])] = tokens
    return retried


def test_a_few_refusals_are_no_overload():
    retry = RetryAfter(10.0)
    for number in range(100):
        retry.accepted(number / 10)
    assert retry.refused(1.5, 10.0, 2.0) == 1.5


def test_an_overload_is_taken_to_last_twice_as_long_as_it_has_and_all_take_turns():
    retry = RetryAfter(10.0)
    told = [retry.refused(1.5, 100.0 + s, 0.1) for s in range(30)]
    assert told == sorted(told) and told[0] == 1.5 and told[12] >= 24.0 and told[-1] == 42.0
    for _ in range(50):
        retry.ended(129.0)
    turns = [retry.refused(1.5, 129.0 + 0.01 * number, 0.1) for number in range(3)]
    assert all(wait == 42.0 for wait in turns)
    assert retry.refused(1.5, 300.0, 0.1) == 1.5  # another one begins


def test_a_cache_smaller_than_a_long_request_is_no_obstacle():
    made = admission(outputs(1, 1, most=100), kv_blocks=22)
    assert made.admit([(100, 50)], 100.0).start_s >= 100.0 and made._table.starts_s


def test_a_schedule_for_shorter_prompts_does_not_make_usual_requests_long():
    """After a drift to short prompts, those that the server was started for were outside the bound."""
    first = admission([])
    short = replace(SCHEDULE, latency_bound_s=20.0, workload=Workload.fixed(10, 10))
    opened = Opened(short, PROFILE, None, (), 0.0)
    narrow = Admission(opened, list, 1000, first._clock)
    asyncio.run(narrow.update())
    assert narrow.admit([(100, 5)], 100.0).long
    kept = Admission(opened, list, 1000, first._clock, usual_input=first.usual_input)
    asyncio.run(kept.update())
    assert first.usual_input >= 100 and not kept.admit([(100, 5)], 100.0).long


CACHING = {**WIDE, "prefix_caching": True}
LONG = {**CACHING, "workload": Workload.fixed(1500, 20), "kv_blocks": 20_000}
PROMPT, HIT = 1500, 1488


def filled(made, present, prompts=PROMPT, most=20):
    """Accept requests until one is refused."""
    with pytest.raises(ApiError):
        while True:
            promise = made.admit([(prompts, most)], 100.0)
            present.append(Output(Request("x", (1,) * prompts, most), due_s=promise.due_s))


def test_a_request_counts_on_its_cached_tokens_only_where_it_would_be_refused():
    present = []
    made = admission(present, bound_s=4.0, **LONG)
    assert made.admit([(PROMPT, 20)], 100.0, [HIT]).cached == ()
    filled(made, present)
    promise = made.admit([(PROMPT, 20)], 100.0, [HIT])
    assert promise.cached == (HIT,)
    with pytest.raises(ApiError):
        made.admit([(PROMPT, 20)], 100.0, [0])
    with pytest.raises(ApiError):
        made.admit([(PROMPT, 20)] * 500, 100.0, [HIT] * 500)


def test_what_the_engine_keeps_for_waiting_requests_makes_room_for_others():
    accepted = []
    for held in (None, 0, HIT):
        keys = range(HIT // SCHEDULE.block_size)
        waiting = (Request(str(i), (1,) * PROMPT, 20) for i in range(10))
        present = [Output(request, keys=keys, held=held, due_s=103.8) for request in waiting]
        made = admission(present, bound_s=4.0, **LONG)
        before = len(present)
        filled(made, present)
        accepted.append(len(present) - before)
    assert accepted[0] == accepted[1] < accepted[2]


def test_a_lost_prefix_is_an_overload_with_a_time_to_wait():
    error = admission([], **CACHING).lost_prefix()
    assert error.status == 429 and error.code == "latency_bound" and int(error.headers["retry-after-ms"]) > 0


@pytest.mark.parametrize("cached", [0, 600, 900])
def test_the_pace_does_not_take_savings_for_a_faster_machine(cached):
    """The oracle: an engine whose prefills save what the cost model says. Its scale stays that of the machine."""
    present, load, slower = [], 4, 1.25
    made = admission(present, **LONG)
    whole_s, first_s = made._pace.token_s(load), made._pace.first_s(load)
    for _ in range(200):
        made._pace.found(PROMPT, cached)
    for number in range(1, 401):
        made._clock.s += 0.2
        token_s = made._pace._predicted_s(load) * slower
        begun_s = made._clock.s - 20 * token_s
        record(made, load, 0.2 / slower, cached)
        if number > 50:
            made._pace.served(21, begun_s, made._clock.s)
    assert made._pace.scale(load) == pytest.approx(slower, rel=0.05)
    less_s = made._pace.less_s(PROMPT, cached)
    _, alone_s, *_ = made._pace._rows[load]
    prefill_s, token_s = made._pace._mixed_s([(PROMPT - cached, cached)], load), whole_s
    for _ in range(100):  # each of the others begins once per answer
        token_s = alone_s + (load - 1) * prefill_s * token_s / (first_s - less_s + 19 * token_s)
    assert made._pace.token_s(load) / made._pace.scale(load) == pytest.approx(token_s, rel=0.05)
    assert (token_s < 0.85 * whole_s) == (cached > 0)


def test_cached_tokens_save_at_most_a_mean_prompt():
    pace = admission([], **CACHING)._pace
    assert pace.less_s(100, 0) == 0.0
    saved = [pace.less_s(500, cached) for cached in (16, 160, 320, 480)]
    assert saved == sorted(saved) and saved[0] == 0.0 < saved[-1] < pace.first_s(1)  # first_s is for the mean prompt


def test_one_slow_table_does_not_stay_for_long(monkeypatch):
    made = admission(outputs(16, 4))
    took = iter([0.001, 1.0, 0.001])
    monkeypatch.setattr(made, "_timed_starts", lambda standing: (made._starts(standing), next(took)))
    made._next_s = 0.0
    for _ in range(2):
        asyncio.run(made.update())
        assert made._next_s <= made._clock.s + 0.2
        made._clock.s = made._next_s
