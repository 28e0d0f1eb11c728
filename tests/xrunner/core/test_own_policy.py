"""A policy and an order of this file alone: registered, it is simulated, searched, replayed and run, on several
ranks too, without a change elsewhere.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.xcore import small_specs
from tests.xcore.small_specs import changed, profile
from tests.xrunner import cells
from tests.xrunner.cells import LENGTHS, requests, schedule
from tests.xrunner.core.test_job import check_tokens, run_cells
from xcore.batching import ENDLESS, Ledger, Sequence, Step
from xcore.batching.step import StagePhase
from xcore.console.schedule_text import schedule_text
from xcore.errors import InputError
from xcore.policies import TRAITS, Traits, register, runs
from xcore.policies.control import Control, Prompts, Residents
from xcore.specs.cluster import parse_cluster
from xcore.specs.model import ModelSpec
from xcore.specs.workload import RequestLengths, task
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xscheduler.tune import check_asked, tune
from xsimulator import estimate
from xsimulator.replay.compiled import Replicas, RequestArrays
from xsimulator.replay.event_simulator import replay


class PrefillFirst:
    """At most `max_num_seqs` resident; whenever one fits, up to `encode_batch` encode while decoding waits (vLLM 0)."""

    def __init__(self, encode_batch: int, max_num_seqs: int):
        self.encode_batch = encode_batch
        self.max_num_seqs = max_num_seqs

    def next_step(self, ledger: Ledger, now: float, phase: StagePhase = "both") -> Step | None:
        room = min(self.encode_batch, self.max_num_seqs - ledger.residents)
        admitted = ledger.admit(room, now) if room > 0 else []
        if admitted:
            return Step(tuple((s, s.input_tokens) for s in admitted))
        decode = tuple(ledger.decoding)
        return Step(decode=decode, repeats=ENDLESS, arrivals=room > 0) if decode else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillFirstControl(Control):
    """Variables of PrefillFirst."""

    encode_batch: Prompts
    max_num_seqs: Residents

    def make(self, context):
        return PrefillFirst(self.encode_batch, self.max_num_seqs)


OWN = Traits(name="prefill-first", what="prompts before decoding", control=PrefillFirstControl)


class Aging:
    """Short prompts first, and every prompt sooner the longer it has waited."""

    changes = True

    def key(self, sequence: Sequence, now: float) -> float:
        return sequence.input_tokens / (0.01 + now - sequence.arrival_s)


VARIABLES = {"encode_batch": 2, "max_num_seqs": 5}
HOW = ({}, {"order": Aging()})


@pytest.fixture
def registered():
    register(OWN)
    yield
    del TRAITS[OWN.name]


@pytest.fixture(scope="module")
def model(directories):
    return load_model(directories["llama"])


def decisions(spans):
    """What was encoded and what was decoded, in order."""
    return [(span.phase, span.sequences, span.tokens) for span in sorted(spans, key=lambda span: span.start_s)]


def test_it_runs_as_it_is_replayed(registered, model):
    plan = schedule(model.spec, OWN.name, **VARIABLES)
    run = Engine(model, plan).run(requests(LENGTHS))
    lengths = [RequestLengths(prompt, output) for prompt, output in LENGTHS]
    predicted = replay(plan, profile(model.spec), lengths, step_by_step=True)
    assert decisions(run.timeline.spans) == decisions(predicted.timeline.spans)
    encoded = [count for phase, count, _ in decisions(run.timeline.spans) if phase == "encode"]
    assert max(encoded) == 2 and sum(encoded) == len(LENGTHS)
    builtin = Engine(model, schedule(model.spec, "orca")).run(requests(LENGTHS))
    assert {r.id: r.output_ids for r in run.results} == {r.id: r.output_ids for r in builtin.results}
    assert schedule_text(plan) == "prefill-first encode_batch=2 max_num_seqs=5 on TP1"


def test_it_is_simulated_as_it_is_replayed(registered):
    """A long replay of its own, which the estimate's shorter one hasn't seen."""
    plan = small_specs.schedule(OWN.name, kv_blocks=900, encode_batch=2, max_num_seqs=16)
    estimated = estimate(plan, profile())
    done = replay(plan, profile(), plan.workload.draw(4000, seed=9), timeline=False)
    middle = [request.finish_s for request in done.served[800:3200]]
    assert estimated.throughput_seq_s == pytest.approx(2400 / (middle[-1] - middle[0]), rel=0.03)
    latencies = sorted(request.finish_s - request.start_s for request in done.served)
    assert estimated.latency_p50_s == pytest.approx(latencies[2000], rel=0.1)
    assert estimated.memory_bytes[0] > 0 and 0 < estimated.utilisation[0] <= 1


def test_it_is_searched(registered):
    """The best of its grid."""
    options = {"policies": (OWN.name, "orca"), "fixed": {"max_num_seqs": 8}}
    tuned = tune(small_specs.MODEL, parse_cluster("1xA40"), task("S"), profile(), **options)
    ours = next(alternative for alternative in tuned.alternatives if alternative.policy == OWN.name)
    assert ours.schedule.policy == OWN.name and ours.schedule.control.max_num_seqs == 8 and ours.estimate.feasible
    rates = []
    for batch in (1, 2, 4, 8):
        plan = changed(ours.schedule, encode_batch=batch)
        rates.append(estimate(plan, profile()).throughput_tok_s)
    assert ours.estimate.throughput_tok_s == pytest.approx(max(rates), rel=0.01)
    with pytest.raises(InputError, match="'nobody' can't be searched"):
        check_asked(("nobody",), {})


def test_an_order_that_changes_with_time(registered, model):
    """Short prompts overtake at first, and none waits for ever."""
    plan = schedule(model.spec, OWN.name, encode_batch=1, max_num_seqs=1)
    short = replay(plan, profile(model.spec), [RequestLengths(20, 8)]).seconds
    lengths = [RequestLengths(60, 8), *(RequestLengths(20, 8, short * i) for i in range(40))]
    done = replay(plan, profile(model.spec), lengths, timeline=False, order=Aging())
    place = [request.index for request in done.served].index(0)
    assert 0 < place < 40 and len(done.served) == 41
    todo = requests(LENGTHS)
    first_come, aging = (Engine(model, schedule(model.spec, OWN.name, **VARIABLES)).run(todo, **how) for how in HOW)
    assert [r.id for r in first_come.results] != [r.id for r in aging.results]
    assert {r.id: r.output_ids for r in first_come.results} == {r.id: r.output_ids for r in aging.results}


@pytest.mark.slow
def test_both_on_two_ranks(registered, job, tmp_path, directories, theirs):
    """This file is the program of every rank: each registers the policy."""
    spec = ModelSpec.from_directory(directories["llama"])
    plans = {
        name: ("llama", schedule(spec, OWN.name, degrees, **VARIABLES))
        for name, degrees in {"stages": (1, 1), "shards": (2,)}.items()
    }
    facts = run_cells(job, tmp_path, directories, 2, plans, program="core.test_own_policy")
    for name in plans:
        check_tokens(facts[name], theirs["llama"])


def test_what_it_does_not_have_is_refused(registered, model):
    with pytest.raises(InputError, match="variable encode_batch can't be 0: it must be from 1"):
        schedule(model.spec, OWN.name, encode_batch=0, max_num_seqs=5)
    with pytest.raises(InputError, match="policy prefill-first needs encode_batch: its variables are"):
        OWN.record({"max_num_seqs": 5})
    plan = schedule(model.spec, OWN.name, **VARIABLES)
    with pytest.raises(InputError, match="has no compiled replay"):
        Replicas(profile(model.spec)).serve(plan, RequestArrays(*np.ones((4, 1))))
    assert runs("exegpt", OWN.name) and not runs("vllm", OWN.name)


def test_a_name_is_registered_once(registered):
    with pytest.raises(InputError, match="already a policy 'prefill-first'"):
        register(OWN)


def test_an_unregistered_policy_is_refused_by_name(model):
    with pytest.raises(InputError, match="There is no policy 'prefill-first': use one of static, hybrid"):
        Engine(model, schedule(model.spec, OWN.name, **VARIABLES)).run(requests(LENGTHS))


if __name__ == "__main__":
    register(OWN)
    cells.run_cells(Path(sys.argv[1]), Aging())
