"""Replay of prefill replicas that hand their prompts over to decode replicas: two replays, one after the other.

A prefill replica serves each request as one with a single output token. Its keys and values then go to a decode
replica, which computes the prompt's last token again, as vLLM's connectors do: its result is the first output token
that a client sees. Requests go to the replicas of a side in turns. A replica sends, or receives, one prompt at a time.
A decode replica without free blocks lets requests wait, and the prefill replica that holds their keys and values
meanwhile is assumed to have room for them.
"""

from dataclasses import dataclass, replace

import numpy as np

from xcore.arrays import Array, Places
from xcore.specs.prefill_decode import PrefillDecode
from xcore.specs.profile import Profile, Table
from xcore.specs.schedule import Schedule
from xsimulator.cost.recurrences import transfers
from xsimulator.replay.compiled import COUNTS, COUNTS_FOR_LATENCY, Replicas, RequestArrays
from xsimulator.replay.watch import Watch

_ROUNDED = 1e-9
"""Share of a bound beyond which a time misses it however times are rounded."""


@dataclass(frozen=True)
class HandedOver:
    """The times of requests that one replica prefills and another one decodes, arrays [n] in seconds."""

    started: Array
    """When the prefill began."""
    prefilled: Array
    """When the prefill replica answered."""
    ready: Array
    """When the decode replica had the keys and values."""
    first: Array
    """When the first output token came out."""
    finished: Array
    busy: tuple[float, float]
    """Shares of the time until the last request ended in which the prefill and the decode replicas computed."""


@dataclass(frozen=True)
class KVLink:
    """The way of a prompt's keys and values from a prefill to a decode replica."""

    token_bytes: float
    """Bytes of a token that the busiest device sends or receives: one of the side with fewer devices a replica."""
    seconds: Table
    """Seconds of a message by its bytes."""

    @staticmethod
    def of(plan: PrefillDecode, profile: Profile) -> "KVLink":
        """Return the link between the plan's replicas: within a node if one node holds them all."""
        spec, cluster = plan.prefill.model.spec, plan.prefill.cluster
        tp = min(plan.prefill.stages[0].tp, plan.decode.stages[0].tp)
        within = plan.fits(1, cluster.devices_per_node)
        table = profile.send if within else profile.send_between_nodes
        return KVLink(spec.layers * spec.kv_bytes(tp, plan.prefill.kv_dtype), table)

    def transfer(self, tokens: Array) -> Array:
        """Return the seconds in which the keys and values of prompts are sent [n]."""
        return np.asarray(self.seconds(tokens * self.token_bytes))


def hand_over(
    plan: PrefillDecode,
    profile: Profile,
    replicas: Replicas,
    requests: RequestArrays,
    watch: Watch | None = None,
) -> HandedOver | None:
    """Replay requests, in order of arrival, through the plan's prefill and decode replicas.

    Returns:
        The times; None if a bound of `watch` was certainly broken.

    Raises:
        InputError: The KV cache of a side can't hold one of the requests.
    """
    watch = watch or Watch.nothing()
    limits, prompts = watch.limits * (1 + _ROUNDED), replace(requests, outputs=np.ones_like(requests.outputs))
    encoded = in_turns(plan.prefill, prompts, replicas, replace(watch, limits=limits, missed=np.zeros(3)))
    if encoded is None:
        return None
    order = np.argsort(encoded.finished, kind="stable")
    ready = _sent(plan, encoded.finished, order, KVLink.of(plan, profile).transfer(requests.inputs))
    handed = replace(requests, arrivals=ready, received=requests.inputs - 1)
    if (_late(requests, ready, limits) > watch.allowed).any():
        return None
    of_tokens = np.array([np.inf, limits[1], np.inf])  # the others count from the arrival
    decoded = in_turns(
        plan.decode, _part(handed, order), replicas, replace(watch, limits=of_tokens, missed=np.zeros(3))
    )
    if decoded is None:
        return None
    back = np.argsort(order)
    busy = encoded.busy_s, decoded.busy_s
    shares = [seconds / float(decoded.finished.max()) for seconds in busy]
    times = encoded.started, encoded.finished, ready, decoded.first[back], decoded.finished[back]
    return HandedOver(*times, (shares[0], shares[1]))


def _sent(plan: PrefillDecode, prefilled: Array, order: Places, seconds: Array) -> Array:
    """Return when the keys and values of prompts have arrived [n], sent in this `order` for so many `seconds` each."""
    ready = np.empty_like(prefilled)
    transfers(order, prefilled, seconds, ready, plan.prefill.replicas, plan.decode.replicas)
    return ready


def _late(requests: RequestArrays, ready: Array, limits: Array) -> Array:
    """Return the requests whose first token, and whose last one, is late even if the decode replica took no time [3].

    None is known to miss a bound on the time per output token.
    """
    waits, flags = ready - requests.arrivals, requests.flags
    first, last = flags >= COUNTS, flags >= COUNTS + COUNTS_FOR_LATENCY
    return np.array([(waits[first] > limits[0]).sum(), 0, (waits[last] > limits[2]).sum()], dtype=np.float64)


@dataclass(frozen=True)
class SideTimes:
    """The times of one side's requests, arrays [n], and the mean seconds of work of its replicas."""

    started: Array
    first: Array
    finished: Array
    busy_s: float


def in_turns(
    side: Schedule, requests: RequestArrays, replicas: Replicas, watch: Watch | None = None
) -> SideTimes | None:
    """Return the times of requests that the replicas of a side serve in turns; None if a bound is certainly broken."""
    one, count = replace(side, replicas=1), len(requests.arrivals)
    times, busy_s = np.empty((3, count)), 0.0
    for number in range(min(side.replicas, count)):
        turns = np.arange(number, count, side.replicas)
        served = replicas.serve(one, _part(requests, turns), watch)
        if served is None:
            return None
        times[:, turns] = served.started, served.first, served.finished
        busy_s += float(served.busy.mean()) / side.replicas
    return SideTimes(times[0], times[1], times[2], busy_s)


def _part(requests: RequestArrays, which: Places) -> RequestArrays:
    """Return some of the requests, in this order."""

    def taken(column: Array) -> Array:
        return np.ascontiguousarray(column[which])

    columns = taken(requests.arrivals), taken(requests.inputs), taken(requests.outputs), taken(requests.flags)
    return RequestArrays(*columns, received=None if requests.received is None else taken(requests.received))
