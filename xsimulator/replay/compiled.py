"""The event simulator for many requests: `replay` compiled, without a timeline; it stops as soon as a bound is broken.

Its decisions and times equal those of `event_simulator.py`, request by request.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from xcore.arrays import Array, Places
from xcore.batching import deal
from xcore.batching.admission import most_cached
from xcore.compiled_parts import EVENT_LOOP, is_there
from xcore.errors import InputError
from xcore.policies.from_schedule import adjustment_of, checked, drafted_of, shares_in_step
from xcore.specs.profile import LayerTables, Profile, Table
from xcore.specs.schedule import Schedule
from xcore.specs.speculation import Speculation
from xcore.specs.workload import RequestLengths
from xcore.traces.prefixes import Prefixes
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.cost.side import Side
from xsimulator.cost.stage import StageCost
from xsimulator.replay import python_loop
from xsimulator.replay.following_turns import Agents, FollowingTurns
from xsimulator.replay.replica import decides_ahead
from xsimulator.replay.watch import Watch

COMPILED = is_there(EVENT_LOOP)
"""Whether the event loop was compiled when exegpt was installed; if not, the lanes in Python do the same."""

COUNTS, COUNTS_FOR_LATENCY = 1.0, 2.0
"""Flags of a request: it counts for the bounds on tokens, and for the bound on latency."""


@dataclass(frozen=True)
class RequestArrays:
    """One replica's requests in order of arrival, as arrays [n]."""

    arrivals: Array
    """Seconds."""
    inputs: Array
    """Tokens."""
    outputs: Array
    """Tokens."""
    flags: Array
    """0, COUNTS, or COUNTS + COUNTS_FOR_LATENCY."""
    prefixes: Prefixes | None = None
    """The prefixes that prompts share, if prefixes are cached; None: no shared prefixes."""
    warm: Array | None = None
    """Tokens of each prompt from one text that all begin with, as in `prefixes`; None: there is no such text."""
    steps: Array | None = None
    """Iterations that give each output, with speculation; None: they are drawn."""
    received: Array | None = None
    """Tokens of each prompt whose keys and values come with it, from an engine that has prefilled it; None: none."""
    turns: FollowingTurns | None = None
    """The sessions of a closed loop: most requests then arrive after others, and `arrivals` has the first ones."""


def steps_of(outputs: Array, speculation: Speculation) -> Array:
    """Draw the iterations that give outputs of these tokens, always the same ones."""
    return 1.0 + speculation.draw(outputs - 1.0, np.random.default_rng(0)).astype(np.float64)


def dealt(
    requests: Sequence[RequestLengths], replicas: int, prefixes: Prefixes | None = None, steps: Array | None = None
) -> Iterator[tuple[list[int], RequestArrays]]:
    """Yield each replica's requests, with their indices in the list; a replica without requests is left out."""
    for own in deal([(r.input, r.output) for r in requests], replicas):
        if own:
            places = sorted(own, key=lambda i: requests[i].arrival_s)
            rows = [(requests[i].arrival_s, requests[i].input, requests[i].output) for i in places]
            arrivals, inputs, outputs = np.ascontiguousarray(np.array(rows, dtype=np.float64).T)
            alike = prefixes.take(places) if prefixes else None
            taken = None if steps is None else steps[places]
            yield places, RequestArrays(arrivals, inputs, outputs, np.zeros(len(rows)), alike, steps=taken)


@dataclass(frozen=True)
class EventTimes:
    """Event times of requests, arrays [n] in seconds."""

    arrived: Array
    started: Array
    first: Array
    finished: Array
    busy: Array
    """[stages]: seconds of work, in the schedule's order of stages."""
    hits: Array
    """Tokens of each prompt that were in the cache at its first admission."""
    reused: Array
    """Tokens that each request found in the cache, including those found after preemptions."""
    preemptions: Array
    """Number of preemptions of each request."""
    seconds: float
    """Seconds until all work was done."""


class Replicas:
    """Replicas of schedules for one model, cluster and profile; the stages' costs are packed once for all of them."""

    def __init__(self, profile: Profile):
        self._profile = profile
        self._replica_costs: dict[object, ReplicaCost] = {}
        self._packed: dict[object, Array] = {}
        self._drawn: dict[object, tuple[Array, Array]] = {}
        """Outputs, and the iterations drawn for them, by the outputs' identity and the speculation."""

    def serve(self, schedule: Schedule, requests: RequestArrays, watch: Watch | None = None) -> EventTimes | None:
        """Run one replica's own requests through a schedule.

        Returns:
            The times; None if a bound of `watch` was certainly broken.

        Raises:
            InputError: The KV cache cannot hold one of the requests.
        """
        assert requests.received is None or not schedule.prefix_caching, "received prompts share no prefixes"
        assert requests.turns is None or watch is None or np.isinf(watch.limits).all(), "turns have no early end"
        replica_cost = self._replica_cost(schedule)
        _check_blocks(schedule, requests, replica_cost.encoder_decoder)
        watch = watch or Watch.nothing()
        front_end = self._profile.front_end_s * np.array([1.0, 0.0, 1.0])
        figures, busy = np.empty((len(requests.arrivals), 7)), np.zeros(len(schedule.stages))
        inside = replace(watch, limits=watch.limits - front_end)  # of the engine; what it counts is `watch`'s
        run = self._run_compiled if COMPILED else self._run_in_python
        seconds = run(schedule, replica_cost, requests, inside, figures, busy)
        if seconds is None:
            return None
        arrived, started, first, finished, hits, reused, preemptions = np.ascontiguousarray(figures.T)
        times = arrived, started, first + front_end[0], finished + front_end[2]
        return EventTimes(*times, busy, hits, reused, preemptions, seconds)

    def _run_compiled(
        self,
        schedule: Schedule,
        replica_cost: ReplicaCost,
        requests: RequestArrays,
        watch: Watch,
        figures: Array,
        busy: Array,
    ) -> float | None:
        from xsimulator.replay import event_loop

        prefixes, warm = _prefixes(schedule, requests), _warm(schedule, requests)
        common = int(warm.max()) // schedule.block_size if warm.size else 0
        watch.used[1] -= common
        seconds = event_loop.run(
            requests.arrivals,
            requests.inputs,
            requests.outputs,
            self._steps(schedule.speculation, requests),
            requests.flags,
            self._sides(schedule, replica_cost),
            _settings(replace(schedule, kv_blocks=schedule.kv_blocks - common), replica_cost, not warm.size),
            watch.limits,
            watch.allowed,
            watch.missed,
            watch.used,
            prefixes.places,
            prefixes.parents,
            prefixes.shared,
            warm,
            _received(requests),
            *_turns(requests),
            figures,
            busy,
        )
        watch.used[1] += common
        return seconds

    def _run_in_python(
        self,
        schedule: Schedule,
        replica_cost: ReplicaCost,
        requests: RequestArrays,
        watch: Watch,
        figures: Array,
        busy: Array,
    ) -> float | None:
        _check_compiled(schedule)
        columns = (requests.inputs.astype(int), requests.outputs.astype(int), requests.arrivals)
        rows = [RequestLengths(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        flags, prefixes = requests.flags.astype(int).tolist(), requests.prefixes if schedule.prefix_caching else None
        warm = _warm(schedule, requests).astype(int).tolist()
        steps = self._steps(schedule.speculation, requests).astype(int).tolist() if schedule.speculation else None
        received, texts = _received(requests).astype(int).tolist(), python_loop.SharedTexts(prefixes, warm)
        agents = Agents(requests.turns, self._profile.front_end_s) if requests.turns else None
        arguments = rows, flags, steps, received, texts, agents
        return python_loop.run(schedule, replica_cost, *arguments, watch, figures, busy)

    def _steps(self, speculation: Speculation | None, requests: RequestArrays) -> Array:
        """Return the iterations that give each output; they are drawn once for the same array of outputs."""
        if speculation is None or requests.steps is not None:
            return requests.outputs if requests.steps is None else requests.steps
        key = (id(requests.outputs), speculation)
        if key not in self._drawn:
            self._drawn[key] = requests.outputs, steps_of(requests.outputs, speculation)
        return self._drawn[key][1]

    def _replica_cost(self, schedule: Schedule) -> ReplicaCost:
        key = (schedule.stages, schedule.kv_dtype, schedule.speculation)
        if key not in self._replica_costs:
            self._replica_costs[key] = ReplicaCost.of(schedule, self._profile)
        return self._replica_costs[key]

    def _sides(self, schedule: Schedule, replica_cost: ReplicaCost) -> Array:
        """Pack the stages of the side, or of both sides, and how steps are split into micro-batches on them."""
        split = schedule.control.micro_batching(len(replica_cost.decode.stages))
        key = (replica_cost, split)
        if key not in self._packed:
            disaggregated = replica_cost.disaggregated
            takes_over = disaggregated and replica_cost.encoder_decoder
            head = [split.count, split.encode_count or 0, takes_over]
            sides = [_side(replica_cost.encode, [1, 0, 0])] if disaggregated else []
            sides.append(_side(replica_cost.decode, head))
            transfer = _kv_transfer(replica_cost) if disaggregated else _table(None)
            self._packed[key] = np.concatenate([*sides, transfer])
        return self._packed[key]


def is_compiled(schedule: Schedule) -> bool:
    """Return whether the compiled event loop covers a schedule's policy with its admission."""
    traits = schedule.traits
    return traits.compiled is not None and (schedule.admission == "reserve" or traits.mixed)


def _prefixes(schedule: Schedule, requests: RequestArrays) -> Prefixes:
    """Return the prefixes that prompts share: none if they are unknown or not cached."""
    if not schedule.prefix_caching:
        return Prefixes(*np.zeros((3, 0), dtype=np.intp))
    if requests.prefixes is not None:
        return requests.prefixes
    places = np.arange(len(requests.arrivals), dtype=np.intp)
    return Prefixes(np.full_like(places, -1), np.zeros_like(places), places)


def _warm(schedule: Schedule, requests: RequestArrays) -> Array:
    """Return the tokens that are always in the cache: counting them takes less time than keeping each block.

    Under *grow*, a preempted request may find its own blocks too.
    """
    counted = schedule.prefix_caching and schedule.admission == "reserve" and requests.warm is not None
    return requests.warm if counted and requests.warm is not None else np.zeros(0)


def _received(requests: RequestArrays) -> Array:
    return np.zeros(0) if requests.received is None else requests.received


def _turns(requests: RequestArrays) -> tuple[Array, Places, Places]:
    if requests.turns is None:
        return np.zeros(0), np.zeros(0, dtype=np.intp), np.zeros(0, dtype=np.intp)
    return requests.turns.pauses, requests.turns.next, requests.turns.sessions


def _check_blocks(schedule: Schedule, requests: RequestArrays, encoder_decoder: bool) -> None:
    tokens = most_cached(requests.inputs, requests.outputs, encoder_decoder) + drafted_of(schedule)
    longest = int(tokens.argmax())
    need = -(-int(tokens[longest]) // schedule.block_size)
    if need > schedule.kv_blocks:
        raise InputError(
            f"Request {longest} needs {need} KV blocks for {requests.inputs[longest]:.0f} + "
            f"{requests.outputs[longest]:.0f} tokens, but the cache has {schedule.kv_blocks}: shorten the request "
            "or give the cache more memory."
        )


def _check_compiled(schedule: Schedule) -> int:
    """Return the number of a schedule's policy in the event loop; InputError if it doesn't cover the schedule."""
    policy = checked(schedule).traits.compiled
    if policy is None:
        raise InputError(
            f"Policy '{schedule.policy}' has no compiled replay: use the event simulator, or search without --rate."
        )
    if not is_compiled(schedule):
        raise InputError(
            f"Admission '{schedule.admission}' of policy {schedule.policy} has no compiled replay: use the event "
            "simulator, or admission reserve."
        )
    return policy


def _settings(schedule: Schedule, replica_cost: ReplicaCost, keeps: bool) -> Array:
    policy = _check_compiled(schedule)
    control = schedule.control
    cache = schedule.admission == "grow", schedule.prefix_caching and keeps, shares_in_step(schedule)
    ahead = decides_ahead(schedule, replica_cost)
    sizes = schedule.kv_blocks, schedule.block_size
    numbers = (policy, control.batch, control.limit, *sizes, replica_cost.encoder_decoder, *cache, ahead)
    front_end_s = replica_cost.cost_model.profile.front_end_s
    return np.array([*numbers, drafted_of(schedule), *_adjustment(schedule), front_end_s], dtype=np.float64)


def _adjustment(schedule: Schedule) -> tuple[float, ...]:
    """Return the numbers of an adjustment; its share is negative if batches aren't adjusted."""
    adjustment = adjustment_of(schedule)
    if adjustment is None:
        return -1.0, 0.0, 0.0, 0.0, 0.0
    return adjustment.share, adjustment.tokens, adjustment.weight, adjustment.level, adjustment.follows


def _side(side: Side, head: list[int]) -> Array:
    kinds = list(dict.fromkeys(side.costs))
    places = [kinds.index(cost) for cost in side.costs]
    numbers = [len(side.stages), *head, len(kinds), *places]
    return np.concatenate([np.array(numbers, dtype=np.float64), *map(_kind, kinds), *_hops(side)])


def _kind(cost: StageCost) -> Array:
    tables = cost.tables
    numbers = np.array([cost.layers, cost.encoder_layers, cost.first, cost.last, cost.group.rows], dtype=np.float64)
    ends = [_table(table) for table in (tables.embedding, tables.head, cost.overhead)]
    return np.concatenate([numbers, *ends, _layer(tables.decoder), _layer(tables.encoder)])


def _layer(tables: LayerTables | None) -> Array:
    names = ("rest", "encode_attention", "chunk_attention", "decode_attention", "mixed_attention", "cross_projection")
    return np.concatenate([_table(getattr(tables, name) if tables else None) for name in names])


def _table(table: Table | None) -> Array:
    if table is None:
        return np.zeros(1)
    sizes = [len(points) for points in table.points]
    return np.array([len(sizes), *sizes, *(x for points in table.points for x in points), *table.values])


def _hops(side: Side) -> list[Array]:
    """Pack the seconds from the previous stage to each stage, by tokens.

    They are linear between the points of the profile's two tables.
    """
    tables, sent = (side.links.within_node, side.links.between_nodes), side.links.token_bytes
    tokens = np.unique([point / sent for table in tables for point in table.points[0]])
    seconds = np.array([side.hops(float(n)) for n in tokens])
    return [_along(tokens, column) for column in seconds.T]


def _kv_transfer(replica_cost: ReplicaCost) -> Array:
    """Pack the seconds of a KV transfer from the encoding side to the decoding side, by tokens."""
    each, table = replica_cost.kv_transfer_link
    tokens = np.array(table.points[0]) / each
    return _along(tokens, np.array([replica_cost.kv_transfer_seconds(float(n)) for n in tokens]))


def _along(points: Array, values: Array) -> Array:
    return np.concatenate([[1.0, len(points)], points, values])
