"""Warm caches of a shared LLM: adapters in slots, or applications' contexts (KV) in bytes."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from xmulti.applications.orders import WaitingCall
from xmulti.applications.submission import Submission

POLICIES = ("lru", "epwq", "prewarm")
_UNKNOWN, _ANNOUNCED, _WAITING, _TURN = range(4)
"""Levels of need: loading an entry may evict entries of a lower level; on a call's turn, any."""


@dataclass
class _Entry:
    size: float
    ready_s: float
    """When it is loaded."""
    used_s: float
    pins: int = 0
    """Calls whose turn has come; the entry stays until they end."""


class WarmCache:
    """Entries by key, loaded on a call's turn, or earlier under some policies.

    * `lru`: loads on the turn only; evicts the least recently used entry.
    * `epwq` (evict/prefetch by the waiting queue): also loads for waiting calls, in their order; first evicts entries
      that no waiting call needs.
    * `prewarm`: also loads for calls that demand graphs announce (`announce`).
    """

    def __init__(
        self,
        capacity: float,
        load_s: Callable[[float], float],
        policy: str,
        contexts: bool = False,
        active: int | None = None,
    ):
        """Set up a cache of `capacity` slots or bytes; `load_s` gives the loading time of a size.

        With `contexts`, entries are the contexts that applications' LLM calls leave for their next call, instead of
        adapters of size 1. `active`: the maximum number of adapters that running calls use at once (vLLM's max-loras;
        the capacity is its max-cpu-loras); None: as many as there are slots.
        """
        if policy not in POLICIES:
            raise ValueError(f"'{policy}' is not a cache policy: use one of {', '.join(POLICIES)}")
        self.capacity = capacity
        self.load_s = load_s
        self.policy = policy
        self.contexts = contexts
        self.active = active
        self.hits = self.misses = 0
        """Turns at which the entry was loaded, or wasn't."""
        self._entries: dict[Hashable, _Entry] = {}
        self._stored: dict[Hashable, float] = {}
        """Sizes of all contexts, cached or not."""
        self._ready: list[float] = []
        """When each entry that is being loaded will be ready."""
        self._waiting: set[Hashable] = set()
        self._announced: dict[int, Hashable] = {}
        """By the application's index."""

    def needs(self, application: Submission) -> tuple[Hashable, float] | None:
        """Return the key and size of the entry that the application's LLM calls need.

        Return None for the context of a first call, and for a context that exceeds the capacity.
        """
        if not self.contexts:
            return None if application.adapter is None else (application.adapter, 1.0)
        size = self._stored.get(application.index, math.inf)
        return (application.index, size) if size <= self.capacity else None

    @property
    def used(self) -> float:
        """Slots or bytes of all entries, including those that are being loaded."""
        return sum(entry.size for entry in self._entries.values())

    @property
    def pins(self) -> int:
        """Pins of all entries together."""
        return sum(entry.pins for entry in self._entries.values())

    def next_ready(self, now: float) -> float | None:
        """Return when the next entry is loaded."""
        self._ready = [ready_s for ready_s in self._ready if ready_s > now]
        return min(self._ready, default=None)

    def prefetch(self, waiting: Sequence[WaitingCall], now: float) -> None:
        """Load entries of waiting calls, in their order, replacing entries that no call is known to need."""
        if self.policy == "lru":
            return
        needed = [need for call in waiting if (need := self.needs(call.progress.application))]
        self._waiting = {key for key, _ in needed}
        for key, size in needed:
            if key not in self._entries and not self._load(key, size, now, _WAITING):
                return

    def announce(self, application: Submission, now: float) -> None:
        """Load or keep the entry of an application that is expected to make a call soon."""
        need = self.needs(application)
        if need is None:
            return
        key, size = need
        self._announced[application.index] = key
        if key not in self._entries:
            self._load(key, size, now, _ANNOUNCED)

    def retract(self, application: Submission) -> None:
        """Withdraw an announcement: the call has arrived, or won't."""
        self._announced.pop(application.index, None)

    def take(self, call: WaitingCall, now: float) -> bool:
        """Return whether a call may begin on its turn; otherwise start loading its entry.

        An adapter is loaded only if there is room. A context that isn't cached is loaded directly to the LLM. An
        adapter keeps its slot until the call ends.
        """
        need = self.needs(call.progress.application)
        if need is None:
            return True
        key, size = need
        entry = self._entries.get(key)
        if call.loaded_s is None and not self._may_run(entry):
            return False
        if call.turn_s is None:
            call.turn_s = now
            hit = entry is not None and entry.ready_s <= now
            self.hits, self.misses = self.hits + hit, self.misses + (not hit)
        if call.loaded_s is None:
            if entry is None and not self.contexts and self._load(key, size, now, _TURN):
                entry = self._entries[key]
            if entry is None and not self.contexts:
                return False
            call.loaded_s = entry.ready_s if entry else now + self.load_s(size)
            self._ready.append(call.loaded_s)
            if entry and not self.contexts:
                entry.pins += 1
        if entry:
            entry.used_s = now
        return call.loaded_s <= now

    def release(self, call: WaitingCall, now: float, size: float) -> None:
        """Record that a call has ended; its context of `size` bytes replaces the application's previous one."""
        application = call.progress.application
        if not self.contexts:
            if application.adapter is not None:
                entry = self._entries[application.adapter]
                entry.pins, entry.used_s = entry.pins - 1, now
            return
        self._stored[application.index] = size
        self._entries.pop(application.index, None)
        if size <= self.capacity and self._make_room(size, now, _TURN):
            self._entries[application.index] = _Entry(size, now, now)

    def forget(self, application: Submission) -> None:
        """Record that the application has ended: its context isn't needed any more, and ages like others."""
        self._stored.pop(application.index, None)
        self.retract(application)

    def _may_run(self, entry: _Entry | None) -> bool:
        """Return whether one more call with this adapter keeps within the active limit."""
        if self.active is None or (entry and entry.pins):
            return True
        return sum(other.pins > 0 for other in self._entries.values()) < self.active

    def _load(self, key: Hashable, size: float, now: float, least: int) -> bool:
        """Begin loading if there is room, or if evicting entries with a need below `least` makes room.

        Return whether loading began.
        """
        if not self._make_room(size, now, least):
            return False
        self._entries[key] = _Entry(size, now + self.load_s(size), now)
        self._ready.append(now + self.load_s(size))
        return True

    def _make_room(self, size: float, now: float, least: int) -> bool:
        """Evict entries with a need below `least`, the least needed and least recently used first.

        Evict nothing if that isn't enough. Return whether there is room.
        """
        free = self.capacity - self.used
        idle = [(self._need(key), e.used_s, str(key), key) for key, e in self._entries.items() if self._idle(e, now)]
        evicted = []
        for need, _, _, key in sorted(idle):
            if free >= size or need >= least:
                break
            free += self._entries[key].size
            evicted.append(key)
        if free < size:
            return False
        for key in evicted:
            del self._entries[key]
        return True

    def _need(self, key: Hashable) -> int:
        """Return an entry's known level of need; under LRU, no needs are known."""
        if self.policy == "lru":
            return _UNKNOWN
        if key in self._waiting:
            return _WAITING
        return _ANNOUNCED if key in self._announced.values() else _UNKNOWN

    @staticmethod
    def _idle(entry: _Entry, now: float) -> bool:
        return entry.pins == 0 and entry.ready_s <= now
