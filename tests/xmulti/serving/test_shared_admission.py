"""Admission of models that take turns on one device: accepted answers to any of them are in time."""

from dataclasses import replace
from functools import partial

import pytest

from benchmarks.simulated_services import CAPACITY, PROFILES, SimulatedServices, capacity, served, services
from xcore.errors import Infeasible
from xcore.requests.engine_protocol import Opened
from xcore.requests.request import Request
from xcore.specs.cluster_plan import Share
from xmulti.serving.shared_admission import UnitAdmissions
from xmulti.serving.unit_bounds import check_bounds, keeps_bounds
from xmulti.sharing.unit_continuation import UnitContinuation
from xserver.engines.engine_link import Output
from xserver.http.api_error import ApiError
from xsimulator.replay.continuation import Standing

LOADS = (0.5, 1.0, 2.0, 4.0)


def bounded(**bounds_s):
    """The two services with other bounds."""
    return tuple(
        replace(m, schedule=replace(m.schedule, latency_bound_s=bounds_s.get(m.name, m.schedule.latency_bound_s)))
        for m in services()
    )


def admissions(unit, outputs, now=lambda: 0.0):
    """Each service's admission, with these sequences."""
    together, made = UnitAdmissions(unit, now), {}
    for model in unit:
        opened = Opened(model.schedule, PROFILES[model.name], None, (), 0.0)

        def accept(make, name=model.name, opened=opened):
            made[name] = make(opened, partial(outputs.get, name, []), 1000)

        together.opened(model.name, opened, accept)
    return together, made


def running(count, generated, inputs=128, most=900, due_s=1e9):
    return [
        Output(Request(str(i), (1,) * inputs, most), tokens=[0] * generated, first_s=-1.0, due_s=due_s)
        for i in range(count)
    ]


@pytest.mark.parametrize("loads", [{"chat": 1, "summary": 1}, {"chat": 20, "summary": 8}, {"chat": 60, "summary": 12}])
def test_a_cycle_takes_what_the_simulated_unit_takes(loads):
    """Without any prefills: the sequences run for the mean length around the mean context."""
    unit = services()
    outputs = {name: running(count, 10) for name, count in loads.items()}
    together, made = admissions(unit, outputs)
    together.changed()
    standing = {}
    for model in unit:
        lengths = model.schedule.workload
        inputs, tokens = round(lengths.input.mean), round(lengths.output.mean)
        standing[model.name] = [Standing(inputs, 500, tokens, 1)] * loads[model.name]
    least = min(rows[0].ends - 1 for rows in standing.values())  # until then all run
    standing = {name: [replace(row, ends=least + 1) for row in rows] for name, rows in standing.items()}
    after = UnitContinuation(unit, PROFILES).run(standing, 1e9)
    for name, admission in made.items():
        cycle_s = admission.pace.iteration_s(loads[name]) + admission.pace.other_iterations_s
        assert after[name][0].finish_s / least == pytest.approx(cycle_s, rel=0.08)
        assert admission.pace.token_s(loads[name]) > cycle_s, "with the prefills that come"


def test_a_request_that_would_make_another_models_answer_late_is_refused():
    """However much time its own answer has."""
    together, made = admissions(bounded(chat=20.0, summary=1000.0), outputs := {"chat": running(30, 10, due_s=15.0)})
    together.changed()
    made["summary"].admit([(256, 64)], 0.0)
    left_s = made["chat"]._shared_s(made["chat"]._left(outputs["chat"])).max()
    for output in outputs["chat"]:
        output.due_s = 1.01 * left_s
    with pytest.raises(ApiError, match="Some of 30 running requests to 'chat' would then miss their bound") as refused:
        made["summary"].admit([(256, 64)] * 8, 0.0)
    assert refused.value.status == 429 and int(refused.value.headers["Retry-After"]) >= 1


def test_a_model_without_a_bound_makes_no_other_late():
    unit = bounded(summary=None)
    assert keeps_bounds(unit)
    together, made = admissions(unit, outputs := {"chat": running(30, 10), "summary": running(10, 5, 256)})
    together.changed()
    assert made["summary"].admit([(256, 64)], 0.0).slack_s is None
    left_s = made["chat"]._shared_s(made["chat"]._left(outputs["chat"])).max()
    for output in outputs["chat"]:
        output.due_s = 1.01 * left_s
    with pytest.raises(ApiError, match="Some of 30 running requests to 'chat' would then miss their bound"):
        made["summary"].admit([(256, 64)] * 8, 0.0)


def test_while_nothing_runs_any_request_is_accepted():
    """Otherwise nothing would run, and no measurement could show that the machine is fast enough again."""
    _, made = admissions(bounded(chat=0.01, summary=0.01), {})
    for admission in made.values():
        assert admission.admit([(100, 50)], 0.0).finish_s > 0.01


def test_what_others_run_counts_although_the_model_itself_has_nothing():
    _, made = admissions(services(), {"summary": running(94, 5, 256)})
    alone = admissions(services(), {})[1]["chat"].admit([(128, 300)], 0.0)
    with pytest.raises(ApiError, match="The answer would take longer than the latency bound of 20 s"):
        made["chat"].admit([(128, 300)], 0.0)
    _, made = admissions(services(), {"summary": running(10, 5, 256)})
    assert made["chat"].admit([(128, 300)], 0.0).finish_s > 1.5 * alone.finish_s


def test_entitled_loads_fill_the_cycle_that_the_tightest_bound_allows():
    unit = services()
    _, made = admissions(unit, {})
    cycle_s = min(admission.most_cycle_s for admission in made.values())
    assert cycle_s == made["chat"].most_cycle_s
    assert sum(a.pace.part_s(a.entitled) for a in made.values()) == pytest.approx(cycle_s, rel=0.03), (
        "but for a sequence"
    )
    factors = {name: admission.entitled / admission.mean_load(cycle_s) for name, admission in made.items()}
    assert factors["chat"] == pytest.approx(factors["summary"])


def test_models_accept_requests_together_also_after_a_restart():
    unit = services()
    together, accepted = UnitAdmissions(unit), []
    opened = {m.name: Opened(m.schedule, PROFILES[m.name], None, (), 0.0) for m in unit}
    for start in (1, 2):
        together.opened("chat", opened["chat"], lambda make: accepted.append(make(opened["chat"], list, 1000)))
        assert len(accepted) == 2 * (start - 1)
        together.opened("summary", opened["summary"], lambda make: accepted.append(make(opened["summary"], list, 1000)))
        assert [admission.name for admission in accepted] == ["chat", "summary"] * start
    assert list(together.each.values()) == accepted[2:]


def test_the_slowdown_is_learned_although_prefills_come_in_a_burst():
    """It is the machine's, in spite of the prefills of all requests at once."""
    for slowdown in (1.0, 1.5):
        unit = bounded(chat=60.0, summary=60.0)
        server = SimulatedServices(unit, PROFILES, 100, slowdown)
        for i in range(40):
            server.send("chat", Request(str(i), (1,) * 128, 300), 120)
        for i in range(8):
            server.send("summary", Request(str(i), (1,) * 256, 200), 150)
        server.run(12.0)
        for admission in server.admissions.values():
            assert admission.scale == pytest.approx(slowdown, rel=0.15)


def in_time(answers):
    return all(each.late <= 0.01 * each.accepted for each in answers.values())


def test_accepted_answers_are_in_time_under_overload():
    at_capacity = served(services(), PROFILES, CAPACITY, 6.0)
    overload = served(services(), PROFILES, 4 * CAPACITY, 6.0)
    assert in_time(at_capacity) and in_time(overload)
    assert all(each.accepted > 0.5 * each.offered for each in at_capacity.values())
    assert goodput(overload) >= 0.9 * goodput(at_capacity)


def goodput(answers):
    return sum(each.goodput_seq_s for each in answers.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("slowdown", [1.0, 1.3])
@pytest.mark.parametrize("pool", ["quotas", "merged"])
def test_goodput_stays_at_any_load(pool, slowdown):
    """Each service is tested at half to four times the capacity, also on a slower machine than predicted."""
    unit = services(pool)
    answers = {load: served(unit, PROFILES, load * CAPACITY / slowdown, 60.0, slowdown) for load in LOADS}
    assert all(in_time(of_load) for of_load in answers.values())
    assert goodput(answers[4.0]) >= 0.9 * goodput(answers[1.0])
    least = {name: each.goodput_seq_s for name, each in answers[1.0].items()}
    assert all(each.goodput_seq_s >= 0.7 * least[name] for name, each in answers[4.0].items()), "none is starved"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_capacity_is_that_of_replays_without_admission():
    assert capacity(services(), PROFILES, 120.0) == pytest.approx(CAPACITY, rel=0.03)


@pytest.mark.parametrize(
    ("share", "kept"),
    [
        (Share("time"), True),
        (Share("time", pool="merged"), True),
        (Share("priority"), False),
        (Share("space", 0.5), False),
    ],
)
def test_bounds_are_kept_where_models_take_turns(share, kept):
    unit = tuple(replace(model, share=share) for model in services())
    assert keeps_bounds(unit) is kept
    unbounded = tuple(replace(m, schedule=replace(m.schedule, latency_bound_s=None)) for m in unit)
    assert not keeps_bounds(unbounded) and not keeps_bounds(unit[:1])


def test_a_bound_that_no_request_can_meet_is_refused():
    check_bounds(services(), PROFILES)
    sentence = "Model 'summary' can't keep its latency bound of 500 ms: on this machine a request with 63 output tokens"
    with pytest.raises(Infeasible, match=sentence) as refused:
        check_bounds(bounded(summary=0.5), PROFILES)
    assert 0.5 < refused.value.lowest_latency_s < 8.0
