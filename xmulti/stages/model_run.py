"""One model's run of its calls on data-parallel replicas: first come, first served, with prompts before decoding.

The most recently admitted call is preempted first, by recomputation.

The event simulator of xsimulator/replay isn't used: it takes costs from a Profile, and has neither dependent calls nor
padded prompts. It also can't be stopped and continued with the remaining calls. And a search simulates complete models
thousands of times; this takes a few milliseconds each.
"""

from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array, Integers
from xcore.errors import InputError
from xmulti.stages.batching_run import batching_run
from xmulti.stages.line_costs import BLOCK, LineCosts

WATERMARK = 0.01
"""Share of the blocks that admission leaves free (vLLM)."""
_CURVE_POINTS = 512


@dataclass(frozen=True)
class ModelWork:
    """Multiply-adds of a model on all its GPUs together: the same for every number of GPUs."""

    per_token: float
    per_position: float

    def of(self, positions: Array) -> float:
        """Return the multiply-adds to compute sequences up to these numbers of positions."""
        return float((positions * self.per_token + positions * (positions + 1) / 2 * self.per_position).sum())


@dataclass(frozen=True, eq=False)
class RemainingCalls:
    """A model's remaining calls, as arrays of n."""

    prompts: Integers
    """Tokens to prefill, including tokens that were generated before the KV cache was lost."""
    outputs: Integers
    """Tokens left to generate, at least 1."""
    computed: Array
    """Positions that were computed before; computing them again is no progress."""
    following: Integers
    """The call that can begin when this one ends (a document's next round), or -1."""

    @property
    def first(self) -> Integers:
        """The calls that follow no other call."""
        later = np.zeros(len(self.prompts), dtype=bool)
        later[self.following[self.following >= 0]] = True
        return np.flatnonzero(~later)


@dataclass(frozen=True, eq=False)
class ModelRun:
    """The result of running a model's calls on its replicas; times are in seconds from the start of loading."""

    done: Array
    """Seconds at which each call ends; infinite if it doesn't."""
    generated: Integers
    """Tokens generated in this run, for each call."""
    computed: Array
    """Positions computed for each call, in this run or before."""
    curve: Array
    """[points, 2]: seconds, and multiply-adds done so far."""
    busy_s: float
    """Seconds of computing, summed over the replicas."""
    iterations: int
    preemptions: int

    @property
    def seconds(self) -> float:
        """Seconds until the last call of the slowest replica ends; infinite if a call doesn't end."""
        return float(self.done.max(initial=0.0))

    @property
    def work(self) -> float:
        """Multiply-adds of the whole run."""
        return float(self.curve[-1, 1])

    def work_at(self, seconds: float) -> float:
        """Return the multiply-adds done by this time."""
        return float(np.interp(seconds, self.curve[:, 0], self.curve[:, 1]))


@dataclass(frozen=True)
class ModelReplica:
    """The limits and costs of a replica."""

    costs: LineCosts
    work: ModelWork
    context: int
    """Also the maximum tokens of one prefill, but at least 2,048 (vLLM's setting without chunked prefill)."""

    @property
    def watermark(self) -> int:
        """Blocks that admission leaves free."""
        return int(WATERMARK * self.costs.blocks)

    @property
    def most_tokens(self) -> int:
        """Maximum tokens of one prefill."""
        return max(self.context, 2048)


def run_model(
    model: ModelReplica,
    calls: RemainingCalls,
    ready: Array,
    replicas: int = 1,
    start_s: float = 0.0,
    until_s: float = np.inf,
) -> ModelRun:
    """Run calls on replicas that are loaded at `start_s`; no iteration ends after `until_s`.

    The first call of each chain is `ready` at these seconds [n]. Chains are assigned to replicas in turn.

    Raises:
        InputError: A call can't fit.
    """
    _check_fit(model, calls)
    count = len(calls.prompts)
    done, generated, computed = np.full(count, np.inf), np.zeros(count), calls.computed.copy()
    curves, busy, iterations, preemptions = [], 0.0, 0, 0
    replica_of = _dealt(calls, replicas)
    for replica in range(replicas):
        mine = np.flatnonzero(replica_of == replica)
        if not len(mine):
            continue
        place = np.full(count + 1, -1)  # index -1 finds the last entry
        place[mine] = np.arange(len(mine))
        following = place[calls.following[mine]]
        part = RemainingCalls(calls.prompts[mine], calls.outputs[mine], calls.computed[mine], following)
        first = part.first
        when = ready[mine]
        arrivals = first[np.argsort(when[first], kind="stable")]
        arrivals = arrivals[np.isfinite(when[arrivals])]
        costs = model.costs
        limits = (start_s, until_s, costs.blocks, model.watermark, model.most_tokens, costs.padded)
        settings = np.array([*limits, model.work.per_token, model.work.per_position], dtype=np.float64)
        ends, made, places = np.full(len(mine), np.inf), np.zeros(len(mine)), part.computed.copy()
        tables = (costs.prefill, costs.prefill_sampled, costs.decode)
        lists = (part.prompts, part.outputs, following, arrivals)
        results = (ends, made, places)
        curve, seconds, steps, pushed = batching_run(*tables, when, *lists, settings, *results)
        done[mine], generated[mine], computed[mine] = ends, made, places
        curves.append(np.frombuffer(curve, dtype=np.float64).reshape(-1, 2))
        busy, iterations, preemptions = busy + seconds, iterations + steps, preemptions + pushed
    return ModelRun(done, generated.astype(np.int64), computed, _summed(curves), busy, iterations, preemptions)


def _dealt(calls: RemainingCalls, replicas: int) -> Integers:
    """Return each call's replica: that of its chain."""
    replica_of = np.zeros(len(calls.prompts), dtype=np.int64)
    if replicas == 1:
        return replica_of
    first = calls.first
    at, turn = first, np.arange(len(first)) % replicas
    while len(at):
        replica_of[at] = turn
        at, turn = calls.following[at], turn[calls.following[at] >= 0]
        at = at[at >= 0]
    return replica_of


def _summed(curves: list[Array]) -> Array:
    """Return the work of all replicas over time, thinned."""
    if not curves:
        return np.zeros((1, 2))
    times = np.unique(np.concatenate([curve[:: max(1, len(curve) // _CURVE_POINTS), 0] for curve in curves]))
    times = np.union1d(times, [curve[-1, 0] for curve in curves])
    work = sum(np.interp(times, curve[:, 0], curve[:, 1]) for curve in curves)
    return np.stack([times, work], axis=1)


def _check_fit(model: ModelReplica, calls: RemainingCalls) -> None:
    """Check the calls' lengths.

    Raises:
        InputError: A call is longer than the context, or than the cache with the watermark.
    """
    if not len(calls.prompts):
        return
    longest = int((calls.prompts + calls.outputs).max())
    room = (model.costs.blocks - model.watermark) * BLOCK
    if longest > min(model.context, room):
        raise InputError(
            f"A call of {longest:,} tokens (prompt and output) doesn't fit in a replica: the model's context has "
            f"{model.context:,} and the cache {room:,}."
        )
    if int(calls.outputs.min()) < 1 or int(calls.prompts.min()) < 1:
        raise InputError("A call needs at least one prompt token and at least one output token.")
