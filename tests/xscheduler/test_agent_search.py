"""The search for agents in a closed loop, against replays of stated grids in the Python lanes' figures."""

import itertools

import numpy as np
import pytest

from xcore.specs.bound import BoundMeaning
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.workload import RequestLengths, Workload, task
from xcore.traces.prompt_identity import PromptIdentity
from xprofiler.roofline import roofline_profile
from xscheduler import agent_sample, agent_search
from xscheduler.agent_sample import AgentWork
from xscheduler.agent_search import AgentSearch, tune_agents
from xscheduler.list_meter import Played
from xscheduler.list_search import ListLead
from xscheduler.loop_meter import LoopMeter
from xscheduler.most_agents import MostAgents, largest, most_agents
from xscheduler.search_problem import Limits
from xscheduler.setting_search import SearchOptions
from xscheduler.settings import Setting
from xscheduler.spaces import spaces
from xsimulator.replay.closed_loop import replay_closed_loop

MODEL, WHERE, AGENTS = builtin_model("opt-13b"), parse_cluster("1xA40"), 12
PROFILE = roofline_profile(MODEL, WHERE, overhead_s=2e-3)
BOUNDS = [Limits(), Limits(ttft_s=0.35), Limits(6.0, tpot_s=0.05)]


@pytest.fixture(autouse=True)
def few_turns(monkeypatch):
    monkeypatch.setattr(agent_sample, "LEAST_TURNS", 120)
    monkeypatch.setattr(agent_search, "MOST", 120)


def work(sessions: int = 30, pause_s: float = 0.5) -> AgentWork:
    """Sessions of one to four turns, whose prompts repeat the session so far."""
    rng, rows, turns, pauses_s = np.random.default_rng(1), [], [], []
    for name in range(sessions):
        context, first = 0, len(rows)
        for _ in range(rng.integers(1, 5)):
            input, output = context + int(rng.integers(20, 300)), int(rng.integers(5, 80))
            rows.append(RequestLengths(input, output, identity=PromptIdentity(conversation=str(name))))
            context = input + output
            pauses_s.append(pause_s * (len(rows) > first + 1))
        turns.append(tuple(range(first, len(rows))))
    return AgentWork(tuple(rows), tuple(turns), tuple(pauses_s))


def tuned(own: AgentWork, limits: Limits, policies: tuple[str, ...], agents: int = AGENTS, where=WHERE):
    profile = PROFILE if where is WHERE else roofline_profile(MODEL, where, overhead_s=2e-3)
    setting = Setting(MODEL, where, Workload.from_requests("turns", own.requests), profile, "bf16", ())
    options = SearchOptions(BoundMeaning("requests", 99.0), None, None, policies, "bnb", 0.0)
    return tune_agents(setting, own.sample(agents), limits, options)


@pytest.fixture
def searches(monkeypatch):
    """The searches of the last call."""
    kept, within = [], AgentSearch.within
    monkeypatch.setattr(AgentSearch, "within", lambda self, share: kept.append(self) or within(self, share))
    return kept


@pytest.mark.parametrize(
    ("policy", "seconds"), [("orca", range(12)), ("chunked", range(0, 60, 4)), ("rra", range(0, 12, 2))]
)
@pytest.mark.parametrize("limits", BOUNDS, ids=["free", "ttft", "latency"])
def test_no_point_of_a_grid_serves_turns_more_than_one_percent_faster(searches, policy, seconds, limits):
    """The grid has every batch up to the number of agents, with some values of the other variable."""
    own = work()
    answer = tuned(own, limits, (policy,))
    search = searches[0]
    assert search.replayed <= 1.5 * 120
    (space,), search.replays, played = spaces(policy, search.problem), 10**9, []
    for batch, other in itertools.product(range(AGENTS), seconds):
        if other < len(space.variables[1].values):
            lead = search._lead(space, (batch, other))
            played += [(lead.played.excess, lead.played.seconds)] if lead else []
    excess, seconds_of_a_turn = min(played)
    assert len(played) >= 60
    if answer.tuned.schedule is None:
        assert excess > 0
        return
    assert answer.tuned.estimate.throughput_seq_s >= (1 - 0.01) / seconds_of_a_turn or excess > 0
    meter = LoopMeter(PROFILE, own.sample(AGENTS), limits)
    assert meter.play(answer.tuned.schedule).excess == 0


@pytest.mark.parametrize("limits", [Limits(), Limits(ttft_s=0.4)], ids=["free", "ttft"])
def test_no_layout_of_several_devices_serves_turns_faster_on_a_coarse_grid(searches, limits):
    """Replicas, pipelines and tensor parallelism, each with four batches and three numbers of prompts."""
    answer = tuned(work(), limits, ("orca",), 24, parse_cluster("4xA40"))
    search, played = searches[0], []
    layouts, search.replays = spaces("orca", search.problem), 10**9
    for space in layouts:
        share = search._share(space)
        for batch, other in itertools.product({share, -(-share // 2), -(-share // 4), 2}, range(3)):
            lead = search._lead(space, (batch - space.variables[0].values[0], other))
            played += [(lead.played.excess, lead.played.seconds)] if lead else []
    assert len(layouts) > 5 and len(played) > 40
    excess, seconds = min(played)
    assert answer.tuned.schedule is not None or excess > 0
    if not excess:
        assert answer.tuned.estimate.throughput_seq_s >= (1 - 0.01) / seconds


def test_figures_are_those_of_the_python_lanes():
    """The turns that end after the first tenth, at least one of each agent, until an agent has no session left."""
    own = work(sessions=60)
    answer, sample = tuned(own, Limits(), ("chunked", "rra")), own.sample(AGENTS)
    assert len(sample.sessions.turns) <= 60, "none is repeated"
    for other in answer.tuned.alternatives:
        loop = replay_closed_loop(other.schedule, PROFILE, sample.requests, sample.sessions, lanes=True)
        served = [one for one in loop.replay.served if one.finish_s <= loop.full_s]
        skipped = max(AGENTS, round(0.1 * len(served)))
        begin_s = served[skipped - 1].finish_s  # several may end at once
        served = [one for one in served if one.finish_s > begin_s * (1 + 1e-9)]
        assert len(served) > 50
        latency = [one.finish_s - one.arrival_s for one in served]
        assert other.estimate.throughput_seq_s == pytest.approx(len(served) / (loop.full_s - begin_s))
        assert other.estimate.latency_s == pytest.approx(np.percentile(latency, 99))
        cached = sum(one.cached_tokens for one in served) / sum(one.input_tokens for one in served)
        assert answer.cached_shares[other.policy] == pytest.approx(cached)
        assert (cached > 0.4) == other.schedule.prefix_caching == (other.policy == "chunked")


def test_a_sample_with_more_sessions_than_there_are_repeats_them_with_new_texts():
    own = work(sessions=5)
    sample = own.sample(AGENTS)
    assert len(sample.sessions.turns) >= 2 * AGENTS and len(sample.requests) >= 120
    assert sorted(place for turns in sample.sessions.turns for place in turns) == [*range(len(sample.requests))]
    lengths = [[sample.requests[place].input for place in turns] for turns in sample.sessions.turns]
    assert lengths[:5] == lengths[5:10] == [[own.requests[place].input for place in turns] for turns in own.turns]
    firsts = [turns[0] for turns in sample.sessions.turns]
    keys = [sample.prefixes.keys(place, 16, 16)[0] for place in firsts]
    assert len(set(keys)) == len(keys), "no session finds another one's text"
    again = own.sample(AGENTS)
    assert again is sample, "taken once"


def test_the_most_agents_are_found_as_by_trying_each_number():
    for most, first in itertools.product((0, 1, 7, 40, 64), (1, 8, 64)):
        assert largest(lambda count, most=most: count <= most, first, 64) == MostAgents(most, most == 64)
    own, limits = work(), Limits(ttft_s=0.6)
    plan = tuned(own, limits, ("orca",), agents=4).tuned.schedule
    found = most_agents(own, plan, PROFILE, limits, 4)
    held = [not LoopMeter(PROFILE, own.sample(n), limits).play(plan).excess for n in range(1, found.agents + 2)]
    assert held[found.agents - 1] and not held[found.agents] and not found.more


def test_without_an_answer_the_closest_schedule_is_kept():
    answer = tuned(work(), Limits(ttft_s=1e-3), ("orca", "static"))
    assert answer.tuned.schedule is None and answer.closest is not None
    assert all("exceed the bounds" in other.reason for other in answer.tuned.alternatives)


@pytest.mark.parametrize(("agents", "turns"), [(3, 2), (30, 50)])
def test_drawn_sessions_keep_every_agent_busy(agents, turns):
    """There are two for each agent, ten turns for each agent, and no fewer turns than the least of a sample."""
    rows = agent_sample.drawn_for(task("S"), agents, turns, 0, None)
    assert len({row.identity.conversation for row in rows}) >= 2 * agents
    assert len(rows) >= max(agent_sample.LEAST_TURNS, 10 * agents)


def test_layers_with_windows_keep_a_part_of_whole_turns_though_prefixes_are_cached():
    """A cache saves work on prompts, and no request is shorter for it."""
    own = work()
    sample = own.sample(AGENTS)
    options = SearchOptions(BoundMeaning("requests", 99.0), None, None, ("orca",), "bnb", 0.0)
    setting = Setting(MODEL, WHERE, Workload.from_requests("turns", own.requests), PROFILE, "bf16", ())
    problem = agent_search.agent_searches(setting, sample, Limits(), options)["orca"].problem
    whole = Workload.from_requests("whole", sample.requests)
    assert problem.cost_model.tokens == pytest.approx(whole.mean_tokens)
    assert problem.load.workload.input.mean < 0.9 * whole.input.mean


def test_a_policy_is_close_by_its_excess_where_nothing_keeps_the_bounds_and_else_by_its_seconds():
    def lead(excess, seconds):
        return ListLead(Played(excess, seconds, 1.0), None)

    late, near = agent_search.LATE, 1.0 / agent_search.CLOSE
    assert [agent_search._is_close(lead(excess, 9.0), 0.5, 1.0) for excess in (0.5, 0.5 + late, 0.6 + late)] == [
        True,
        True,
        False,
    ]
    assert agent_search._is_close(lead(late, 0.9 * near), 0.0, 1.0)
    assert not agent_search._is_close(lead(0.0, 1.1 * near), 0.0, 1.0)
    assert not agent_search._is_close(lead(2 * late, 1.0), 0.0, 1.0)
