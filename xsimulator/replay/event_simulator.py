"""The event simulator: a finite list of requests through a policy's own decisions, ramp-up and drain included.

It follows the same policies and the same ledger as the runner; where the runner computes a step, it asks the profile
how long the step takes. On a pipeline every step is split into micro-batches (as many as stages, unless the schedule
says otherwise), a sequence always in the same one. The next step is decided when the first stage is free, as though it
knew already what ends in the step before. From one event to the next, decoding iterations that are alike but for their
growing contexts are followed at once.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import inf

from exegpt.batching import Ledger, MicroBatching, Sequence, deal
from exegpt.estimate import Estimate
from exegpt.orders import fcfs
from exegpt.policies import DisaggregatedPolicy, Policy, make_ledger, make_policy
from exegpt.profile import Profile
from exegpt.schedule import Schedule
from exegpt.served import Served, summarise
from exegpt.timeline import Span, Timeline
from exegpt.workload import RequestLengths
from xsimulator.replay.cells import Pipeline
from xsimulator.replay.disaggregated import Disaggregated
from xsimulator.replay.record import Record
from xsimulator.steady.scenario import Scenario


@dataclass(frozen=True)
class Replay:
    """What the simulated requests experienced."""

    served: tuple[Served, ...]
    """In order of completion."""
    timeline: Timeline
    """Without spans where they were not asked for."""
    seconds: float
    """Until the last piece of work was done."""
    estimate: Estimate


def replay(
    schedule: Schedule,
    profile: Profile,
    requests: Items[RequestLengths],
    timeline: bool = True,
    step_by_step: bool = False,
    adjustment: float | None = None,
) -> Replay:
    """Run `requests` through a schedule in simulated time.

    `timeline` keeps a span for every piece of work, which many requests make many of. `step_by_step` follows every
    iteration alone: the same result, slower. `adjustment` as in `make_policy`. Raises InputError for a request that the
    KV cache could not hold.
    """
    scenario = Scenario.of(schedule, profile, None, "exact", True)
    served: list[Served] = []
    spans: list[Span] = []
    busy: list[float] = []
    seconds = 0.0
    for r, own in enumerate(deal([(r.input, r.output) for r in requests], schedule.replicas)):
        record, pipelines = _follow(schedule, scenario, requests, r, own, timeline, step_by_step, adjustment)
        served += record.served
        for pipeline in pipelines:
            spans += pipeline.spans or ()
        busy += _by_rank(schedule, pipelines)
        seconds = max(seconds, *(pipeline.seconds for pipeline in pipelines))
    served.sort(key=lambda s: (s.finish_s, s.index))
    share = tuple(b / seconds if seconds else 0.0 for b in busy)
    spans.sort(key=lambda span: span.start_s)
    estimate = summarise(served, seconds, schedule.bound, utilisation=share)
    return Replay(tuple(served), Timeline("predicted", tuple(spans)), seconds, estimate)


def _follow(
    schedule: Schedule,
    scenario: Scenario,
    requests: Items[RequestLengths],
    replica: int,
    own: list[int],
    keep_spans: bool,
    step_by_step: bool,
    adjustment: float | None,
) -> tuple[Record, tuple[Pipeline, ...]]:
    """A replica's own requests, by their places, to their ends, and the stages that they went through."""
    policy = make_policy(schedule, adjustment)
    ledger = make_ledger(schedule, fcfs)
    ledger.submit(Sequence(i, requests[i].input, requests[i].output, requests[i].arrival_s) for i in own)
    micro_batches = schedule.micro_batches or len(scenario.decode.stages)
    micro_batching = MicroBatching(micro_batches, schedule.encode_micro_batches, schedule.replicas)
    decode = Pipeline(scenario, scenario.decode, micro_batching, keep_spans, replica)
    record = Record(len(requests), micro_batching.index, ledger.encoder_decoder)
    if isinstance(policy, DisaggregatedPolicy):
        encode = Pipeline(scenario, scenario.encode, MicroBatching(1), keep_spans, replica)
        Disaggregated(scenario, policy, ledger, encode, decode, record, step_by_step).run()
        return record, (encode, decode)
    _together(policy, ledger, decode, record, step_by_step)
    return record, (decode,)


def _together(policy: Policy, ledger: Ledger, pipeline: Pipeline, record: Record, step_by_step: bool) -> None:
    """Every step through one and the same pipeline."""
    now = 0.0
    while not ledger.idle:
        step = policy.next_step(ledger, now)
        if step is None:
            now = next_arrival(ledger, now)
            continue
        until = ledger.waiting.next_arrival(now) if step.arrivals else None
        record.start(step, now)
        ran = pipeline.run(step, now, 1 if step_by_step else step.repeats, inf if until is None else until)
        record.book(step, ran, ledger.advance(step, iterations=ran.iterations))
        now = ran.next_s


def next_arrival(ledger: Ledger, now: float) -> float:
    """When the next request arrives; one must, where nothing can run."""
    arrival = ledger.waiting.next_arrival(now)
    if arrival is None:
        raise RuntimeError("a waiting request can never be admitted")  # submit() refuses those
    return arrival


def _by_rank(schedule: Schedule, pipelines: Items[Pipeline]) -> list[float]:
    """Busy seconds of one replica's devices, stage by stage in the schedule's order."""
    busy = {s.devices: b for pipeline in pipelines for s, b in zip(pipeline.stages, pipeline.busy, strict=True)}
    return [float(busy[stage.devices]) for stage in schedule.stages for _ in stage.devices]
