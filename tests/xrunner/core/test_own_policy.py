"""A policy that only this file knows: registered, it is replayed and run, and nothing else has heard of it."""

import numpy as np
import pytest

from exegpt.batching import ENDLESS, Ledger, Step
from exegpt.cli.export import export
from exegpt.errors import InputError
from exegpt.models import load_model
from exegpt.policies import TRAITS, Traits, register
from exegpt.report.schedule_text import schedule_text
from exegpt.schedule import StagePhase
from exegpt.workload import RequestLengths
from tests.exegpt.nouns import profile
from tests.xrunner.cells import LENGTHS, requests, schedule
from xrunner.core.engine import Engine
from xscheduler.tune import check_asked
from xsimulator import estimate
from xsimulator.replay.compiled import Replicas, Requests
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


OWN = Traits(
    name="prefill-first",
    what="prompts before decoding",
    variables={"max_num_seqs": "residents", "encode_batch": "prompts"},
    make=lambda schedule, _: PrefillFirst(schedule.encode_batch, schedule.max_num_seqs),
)
VARIABLES = {"encode_batch": 2, "max_num_seqs": 5}


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


def test_what_it_does_not_have_is_refused(registered, model):
    with pytest.raises(InputError, match="needs encode_batch from 1"):
        Engine(model, schedule(model.spec, OWN.name, max_num_seqs=5)).run(requests(LENGTHS))
    plan = schedule(model.spec, OWN.name, **VARIABLES)
    with pytest.raises(InputError, match="no steady state in closed form: replay it"):
        estimate(plan, profile(model.spec))
    with pytest.raises(InputError, match="isn't compiled"):
        Replicas(profile(model.spec)).serve(plan, Requests(*np.ones((4, 1))))
    with pytest.raises(InputError, match="'prefill-first' can't be searched"):
        check_asked((OWN.name,), {})
    with pytest.raises(InputError, match="leave --export out"):
        export(plan, "vllm")


def test_a_name_is_registered_once_and_for_variables_that_schedules_have(registered):
    with pytest.raises(InputError, match="a policy 'prefill-first' already"):
        register(OWN)
    with pytest.raises(InputError, match="has batch, and schedules have encode_batch"):
        register(Traits(name="other", what="", variables={"batch": "prompts"}, make=OWN.make))


def test_an_unregistered_policy_is_refused_by_name(model):
    with pytest.raises(InputError, match="There is no policy 'prefill-first': use one of static, hybrid"):
        Engine(model, schedule(model.spec, OWN.name, **VARIABLES)).run(requests(LENGTHS))
