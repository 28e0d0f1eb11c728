"""The spaces of each policy: which control variables it has, how they are oriented, on which allocations."""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from xcore.batching.admission import Admission
from xcore.policies import TRAITS
from xcore.policies.control import Kind, OneOf, kinds
from xcore.specs.workload import LengthDistribution
from xscheduler import ceilings
from xscheduler.allocation import Layout
from xscheduler.candidates import CandidateFamily, Candidates, candidates
from xscheduler.ceilings import Bounds
from xscheduler.question import Question, variables_of
from xscheduler.space import Variable
from xsimulator.steady import lockstep
from xsimulator.steady.scenario import Scenario

PREFILLS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Prompts an iteration that Orca's spaces enumerate, as far as there are so many sequences."""
FINE_PREFILLS = (1, 2, 3, 4, 6, 8, 12, 16)
"""And those that are looked at for an open system, where prompts come in bursts."""
TOKEN_BUDGETS = tuple(sorted({2**i for i in range(6, 19)} | {3 * 2**i for i in range(13, 18)}))
"""Tokens an iteration that chunked prefill's spaces enumerate, as far as memory holds their activations."""
FINE_TOKEN_BUDGETS = tuple(2**i * part // 8 for i in range(6, 18) for part in range(8, 16))
"""And those that are looked at for an open system, where a budget is the longest that tokens wait for prompts."""
FEW_DEVICES = 8
"""Devices of which WAA's spaces enumerate all splits: rounding decides more there than the proportion does."""
MOST = 2048
"""Largest batch that is looked at."""


def iteration_counts(output: LengthDistribution, longest: int) -> tuple[int, ...]:
    """Values of N_D that are looked at, falling: all up to 64, beyond that steps of 3 % and the least N_D that brings
    a query of the bound's length, `longest`, through in j phases, for every j.
    """
    counts = {*range(1, 65), output.max}
    counts.update(int(64 * 1.03**k) for k in range(1, math.ceil(math.log(max(output.max, 65) / 64, 1.03))))
    counts.update(-(-(longest - 1) // phases) for phases in range(1, longest // 64 + 1))
    return tuple(sorted((n for n in counts if 1 <= n <= output.max), reverse=True))


def spaces(policy: str, question: Question) -> list[Candidates | CandidateFamily]:
    """The spaces of a policy, in whose scenarios the weights fit into memory."""
    possible = question.admissions(policy) and set(question.fixed) <= set(variables_of(policy))
    members = list(SPACES.get(policy, _declared)(policy, question)) if possible else []
    for number, space in enumerate(members):
        space.name = f"{policy}-{number}"
    return members


def _ascending(question: Question, name: str, most: int) -> Variable:
    return Variable(name, (question.fixed[name],) if name in question.fixed else range(1, min(most, MOST) + 1))


def _within(variable: Variable, most: int) -> Variable:
    """The values up to `most`: vLLM refuses a token budget below the number of sequences."""
    return replace(variable, values=variable.values[: bisect.bisect_right(variable.values, most)])


def _batches(question: Question, scenario: Scenario) -> Variable:
    """The batches that memory might hold."""
    return _ascending(question, "encode_batch", ceilings.batch_that_fits(scenario))


def _residents(question: Question, scenario: Scenario, admission: Admission) -> Variable:
    """The residents of iteration-level scheduling that memory might hold."""
    most = ceilings.batch_that_fits(scenario)
    if admission == "grow":
        most = max(most, int(ceilings.residents_that_fit(scenario.replica, scenario.load, admission)) + 1)
    return _ascending(question, "max_num_seqs", most)


def _enumerated(question: Question, name: str, values: tuple[int, ...]) -> tuple[int, ...]:
    return (question.fixed[name],) if name in question.fixed else values


def _rra(policy: str, question: Question) -> Iterator[Candidates]:
    values = iteration_counts(question.load.workload.output, question.longest)
    counts = _enumerated(question, "decode_iterations", values)
    for layout in _pipelines(question, uniform=False):
        scenario = question.both(layout)
        bounds = question.phased_bounds(layout, interleaved=True)
        batches, smooth = _batches(question, scenario), question.cost_model.profile.source != "measured"
        for values in _by_drain(counts, len(layout.degrees)):
            variables = (batches, Variable("decode_iterations", values, smooth))
            for encode_count in _encode_micro_batches(question, layout):
                where = functools.partial(question.both, layout)
                yield candidates(policy, question, where, variables, bounds, encode_micro_batches=encode_count)


def _by_drain(counts: tuple[int, ...], stages: int) -> tuple[tuple[int, ...], ...]:
    """N_D's values in the groups along which throughput rises: a pipeline drains at the end of a phase, and where a
    phase has no more iterations than there are stages, that costs more than a fuller batch gives.
    """
    if stages == 1:
        return (counts,)
    long = tuple(n for n in counts if n > stages)
    return (*((long,) if long else ()), *((n,) for n in counts if n <= stages))


def _pipelines(question: Question, uniform: bool) -> Iterator[Layout]:
    """The layouts of all replica sizes on which the weights fit."""
    for devices in question.replica_sizes():
        for layout in question.layouts(devices, uniform):
            if ceilings.residents_that_fit(question.both(layout).replica, question.load) >= 1:
                yield layout


def _encode_micro_batches(question: Question, layout: Layout) -> tuple[int, ...]:
    stages = len(layout.degrees)
    if "encode_micro_batches" in question.fixed:
        return (question.fixed["encode_micro_batches"],)
    return tuple(stages * times for times in question.encode_micro_batches) if stages > 1 else (1,)


def _line(
    policy: str, question: Question, layout: Layout, batches: Variable, bounds: Bounds, **constants: Any
) -> Candidates:
    """The space of batches alone, on stages that encode and decode."""
    return candidates(policy, question, functools.partial(question.both, layout), (batches,), bounds, **constants)


def _grid(
    policy: str, question: Question, layout: Layout, variables: tuple[Variable, ...], bounds: Bounds, **constants: Any
) -> Candidates:
    """The space of several variables, on stages that encode and decode."""
    return candidates(policy, question, functools.partial(question.both, layout), variables, bounds, **constants)


def _static(policy: str, question: Question) -> Iterator[Candidates]:
    for layout in _pipelines(question, uniform=True):
        scenario = question.both(layout)
        yield _line(policy, question, layout, _batches(question, scenario), question.phased_bounds(layout))


def _hybrid(policy: str, question: Question) -> Iterator[Candidates]:
    for layout in _pipelines(question, uniform=True):
        scenario, stages = question.both(layout), len(layout.degrees)
        for encode_count in _encode_micro_batches(question, layout):
            for parts in _enumerated(question, "micro_batches", tuple(sorted({1, -(-stages // 2), stages}))):
                bounds = question.phased_bounds(layout)
                counts = {"encode_micro_batches": encode_count, "micro_batches": parts}
                yield _line(policy, question, layout, _batches(question, scenario), bounds, **counts)


def _orca(policy: str, question: Question) -> Iterator[Candidates]:
    for layout, rule in itertools.product(_pipelines(question, uniform=True), question.admissions(policy)):
        batches = _residents(question, question.both(layout), rule)
        bounds = question.mixed_bounds(layout, rule)
        if question.open_system:
            prefills_too = Variable("prefills_per_step", _enumerated(question, "prefills_per_step", FINE_PREFILLS))
            yield _grid(policy, question, layout, (batches, prefills_too), bounds, admission=rule)
            continue
        slack, most = lockstep.ttft_slack(question.both(layout)), batches.values[-1]
        few = {prefills for prefills in PREFILLS if prefills <= most}
        if lockstep.in_step(question.both(layout)):
            few.add(most)  # where all begin together, no prompt interrupts another's decoding
        for prefills in _enumerated(question, "prefills_per_step", tuple(sorted(few))):
            constants = {"prefills_per_step": prefills, "admission": rule, "ttft_slack": slack}
            yield _line(policy, question, layout, batches, bounds, **constants)


def _chunked(policy: str, question: Question) -> Iterator[Candidates]:
    if question.load.encoder_decoder:
        return  # an encoder reads its whole input at once
    for layout, rule in itertools.product(_pipelines(question, uniform=True), question.admissions(policy)):
        scenario = question.both(layout)
        batches, bounds = _residents(question, scenario, rule), question.mixed_bounds(layout, rule)
        if question.open_system:
            if not (budgets := _budgets(question, scenario, FINE_TOKEN_BUDGETS, rule)):
                continue
            variables = _within(batches, budgets[-1]), Variable("max_num_batched_tokens", budgets)
            yield _grid(policy, question, layout, variables, bounds, admission=rule)
            continue
        for budget in _budgets(question, scenario, TOKEN_BUDGETS, rule):
            constants = {"max_num_batched_tokens": budget, "admission": rule}
            constants["ttft_slack"] = lockstep.ttft_slack(scenario)
            yield _line(policy, question, layout, _within(batches, budget), bounds, **constants)


def at_value(question: Question, name: str, like: Candidates, value: int) -> Candidates | None:
    """The space like another one at another value of a variable; None where the activations of so many tokens leave no
    room for a sequence, or there are no more prompts, or fewer tokens than sequences.
    """
    scenario, batches = like.where, like.variables[0]
    if name == "prefills_per_step" and value > batches.values[-1]:
        return None
    if name == "max_num_batched_tokens":
        rule = like.constants["admission"]
        if scenario.replica.room((float(value), 1.0)) < scenario.load.resident_blocks(rule).mean:
            return None
        batches = _within(_residents(question, scenario, rule), value)
        if not batches.values:
            return None
    bounds = Bounds(like.ceiling, like.quickest_s)
    slack = next((c.slack for c in like.constraints if c.name == "ttft"), 0.0)
    constants = like.constants | {name: value, "ttft_slack": slack}
    return candidates(like.policy, question, lambda: scenario, (batches,), bounds, **constants)


def _budgets(question: Question, scenario: Scenario, budgets: tuple[int, ...], admission: Admission) -> tuple[int, ...]:
    """The token budgets with which the activations leave room for a sequence, and the smallest in any case; none below
    a fixed number of sequences.
    """
    need, least = scenario.load.resident_blocks(admission).mean, question.fixed.get("max_num_seqs", 1)
    asked = sorted({max(budget, least) for budget in budgets})
    if fixed := question.fixed.get("max_num_batched_tokens"):
        asked = [fixed] if fixed >= least else []
    return tuple(
        budget for budget in asked if budget == asked[0] or scenario.replica.room((float(budget), 1.0)) >= need
    )


def _waa(by_memory: bool, policy: str, question: Question) -> Iterator[CandidateFamily]:
    """All pairs of layouts of the two sides, for GPU splits around the proportional one."""
    for devices in question.replica_sizes():
        for encoding in _gpu_splits(by_memory, question, devices):
            encoders = question.encoders(encoding)
            for decode in question.layouts(devices - encoding, uniform=False) if encoders else ():
                if question.decoder(decode):
                    yield _waa_family(policy, question, encoders, decode)


def _gpu_splits(by_memory: bool, question: Question, devices: int) -> range:
    """Encoding devices: any number of few; of many, WAA-C's around the share of computing time, WAA-M's around equal
    memory in use.

    Decoding devices are taken as filled with keys and values, so memory is equal where the encoders' weights fill
    theirs. On many devices neighbouring splits hardly differ: then some are left out.
    """
    cost_model, near = question.cost_model, max(1, devices // 8)
    if asked := question.fixed.get("encode_devices"):
        return range(asked, asked + 1) if asked < devices else range(0)
    if devices <= FEW_DEVICES:
        return range(1, devices)
    if by_memory:
        model, cluster = cost_model.model, cost_model.cluster
        usable = cost_model.engine_memory.usable_bytes(cluster)
        layers = model.encoder_layers or model.layers
        weights = layers * model.layer_bytes(1, cost_model.profile.dtype, encoder=model.encoder_layers > 0)
        share = weights / usable
    else:
        speed = question.speeds[min(question.speeds)]
        share = devices * speed.encode / (speed.encode + speed.decode)
    middle = min(max(round(share), 1), devices - 1)
    return range(max(1, middle - near), min(devices - 1, middle + near) + 1, max(1, near // 8))


def _waa_family(
    policy: str, question: Question, encoders: dict[Layout, ceilings.EncodeReach], decode: Layout
) -> CandidateFamily:
    """A decoding side with every layout of the encoding side and every B_m."""
    decoder, devices = question.decoder(decode), next(iter(encoders)).devices + decode.devices
    assert decoder is not None
    parts = _enumerated(question, "micro_batches", _micro_batches(len(decode.degrees)))
    batches = _ascending(question, "encode_batch", int(decoder.batch[-1]) + 1)
    mean, longest = question.needs
    bound = question.limits.latency_s

    def bounds(encoder: ceilings.EncodeReach) -> Bounds:
        """With an encoding side that can do this."""
        quickest = (encoder.latency + longest * float(decoder.iteration[0])) / ceilings.MARGIN
        if bound is not None and quickest > bound:
            return Bounds(0.0, quickest)
        budget = None if bound is None else bound - encoder.latency / ceilings.MARGIN
        ceiling = min(encoder.rate, ceilings.decode_rate(decoder, mean, longest, budget))
        return Bounds(question.tokens_s(ceiling, devices), quickest)

    def make() -> list[Candidates]:
        return [
            candidates(
                policy,
                question,
                functools.partial(question.split, encode, decode),
                (batches,),
                bounds(encoder),
                micro_batches=count,
            )
            for encode, encoder in encoders.items()
            for count in parts
        ]

    reach = encoders.values()
    best = bounds(ceilings.EncodeReach(max(e.rate for e in reach), min(e.latency for e in reach)))
    return CandidateFamily(
        policy,
        best.ceiling,
        len(encoders) * len(parts) * len(batches.values),
        make,
        quickest_s=best.quickest_s,
    )


def _micro_batches(stages: int) -> tuple[int, ...]:
    """B_m's values: more than there are stages neither shorten an iteration nor fill the pipeline further."""
    return tuple(sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if n < stages} | {stages}))


def _declared(policy: str, question: Question) -> Iterator[Candidates]:
    """Every combination of a few values of the variables that a policy declares, each a space of one point: nothing is
    known of what rises.
    """
    for layout in _pipelines(question, uniform=True):
        where, bounds = functools.partial(question.both, layout), question.mixed_bounds(layout, "reserve")
        few: dict[str, tuple[int, ...]] = {
            "prompts": _powers(8),
            "residents": _powers(ceilings.batch_that_fits(where())),
            "tokens": _budgets(question, where(), TOKEN_BUDGETS, "reserve"),
            "period": _powers(question.load.workload.output.max),
            "micro-batches": (len(layout.degrees),),
            "encode-micro-batches": (len(layout.degrees),),
        }
        traits = TRAITS[policy]
        budget, residents = traits.name_of("tokens"), traits.name_of("residents")
        kind_of = kinds(traits.control)
        grid = [_enumerated(question, name, _few(kind_of[name], few)) for name in traits.searched]
        for values in itertools.product(*grid):
            controls = dict(zip(traits.searched, values, strict=True))
            if budget and residents and controls[budget] < controls[residents]:
                continue
            name, value = controls.popitem()
            yield candidates(policy, question, where, (Variable(name, (value,)),), bounds, **controls)


def _few(kind: Kind | OneOf | None, of_kind: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    return kind.values if isinstance(kind, OneOf) else of_kind[str(kind)]


def _powers(most: int) -> tuple[int, ...]:
    """Powers of two up to `most`."""
    return tuple(2**i for i in range(most.bit_length()))


SPACES: dict[str, Callable[[str, Question], Iterator[Candidates | CandidateFamily]]] = {
    "static": _static,
    "hybrid": _hybrid,
    "orca": _orca,
    "chunked": _chunked,
    "rra": _rra,
    "waa-c": functools.partial(_waa, False),
    "waa-m": functools.partial(_waa, True),
}
REFINED = {
    "hybrid": "encode_micro_batches",
    "orca": "prefills_per_step",
    "chunked": "max_num_batched_tokens",
}
"""A variable of which each space has one value: `refine.py` looks between them."""
POLICIES = tuple(SPACES)
"""What is searched unless others are asked for."""
