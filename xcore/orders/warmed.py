"""Warm prefixes around any order: cached blocks are kept for calls that wait, or that demand graphs expect."""

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Items

from xcore.applications.warming import ReactiveWarming, Recent, WarmCall, Warmth
from xcore.batching import Ledger, Order, Sequence, Status
from xcore.orders.order_wrapper import OrderWrapper


class PrefixWarmth:
    """Prefixes in a ledger's cache. A `Warmth`: to warm one is to pin its blocks that are still there.

    A waiting request needs the beginning of its own prompt. An expected call needs its run's context, the tokens of the
    call before, and the tokens with which the latest two prompts of its unit began.
    """

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._waiting: dict[int, Sequence] = {}
        self._contexts = Recent[Hashable, Items[Hashable]]()
        """Keys of the blocks of each run's latest call."""
        self._units = Recent[tuple[str, str], tuple[Items[Hashable], int]]()
        """By application and unit: the keys of its latest prompt, and how many the prompt before shares."""

    def wait(self, sequence: Sequence) -> None:
        """Remember a request until it starts."""
        self._waiting[sequence.index] = sequence

    def start(self, sequence: Sequence, call: WarmCall) -> None:
        """Remember what a call's prompt begins with, and whose context it is."""
        self._waiting.pop(sequence.index, None)
        keys = sequence.keys[: sequence.input_tokens // self._ledger.pool.block_size]
        before, _ = self._units.get((call.application, call.unit), ((), 0))
        alike = next(
            (i for i, (a, b) in enumerate(zip(before, keys, strict=False)) if a != b), min(len(before), len(keys))
        )
        self._units.remember((call.application, call.unit), (keys, alike))
        if call.application:
            self._contexts.remember(call.run, sequence.keys)

    def end(self, sequence: Sequence) -> None:
        """Forget a request that has not started."""
        self._waiting.pop(sequence.index, None)

    def warm_up_s(self, call: WarmCall) -> float:
        """Return no time: pinning takes none."""
        return 0.0

    def warm(self, call: WarmCall, now: float) -> None:
        """Pin the cached blocks that a call needs."""
        if call.request is not None:
            sequence = self._waiting[call.request]
            self._ledger.pin_prefixes(call, sequence.keys[: (sequence.to_prefill - 1) // self._ledger.pool.block_size])
            return
        latest, alike = self._units.get((call.application, call.unit), ((), 0))
        self._ledger.pin_prefixes(call, self._contexts.get(call.run, ()), latest[:alike])

    def release(self, call: WarmCall, now: float) -> None:
        """Unpin a call's blocks."""
        self._ledger.pins.remove(call)


class Warmed(OrderWrapper):
    """Another order, which it leaves as it is; meanwhile `make`'s policy of warming keeps prefixes."""

    def __init__(self, order: Order, make: Callable[[Warmth], ReactiveWarming]):
        super().__init__(order)
        self._make = make
        self._prefixes: PrefixWarmth | None = None
        self._warming: ReactiveWarming | None = None
        self._now = 0.0
        """The time of the latest decision, at which ends become known."""

    def fresh(self) -> "Warmed":
        """Return the same order without any history."""
        return Warmed(self._fresh_inner(), self._make)

    def attach(self, ledger: Ledger) -> None:
        """Warm the prefixes of this ledger."""
        self._prefixes = PrefixWarmth(ledger)
        self._warming = self._make(self._prefixes)
        super().attach(ledger)

    def wait(self, sequence: Sequence, now: float) -> None:
        """Report a new request to the policy of warming; a preempted one is known."""
        if self._prefixes and self._warming and sequence.status is not Status.PREEMPTED:
            self._prefixes.wait(sequence)
            self._warming.wait(_call(sequence), now)
        super().wait(sequence, now)

    def start(self, sequence: Sequence, now: float) -> None:
        """Report the beginning of a request."""
        if self._prefixes and self._warming:
            self._prefixes.start(sequence, _call(sequence))
            self._warming.start(_call(sequence), now)
        super().start(sequence, now)

    def due(self, now: float) -> Iterable[Sequence]:
        """Begin the warm-ups that are due; return the sequences whose keys have changed in the inner order."""
        self._now = now
        if self._warming:
            self._warming.act(now)
        return super().due(now)

    def end(self, sequence: Sequence) -> None:
        """Report the end of a request."""
        if self._prefixes and self._warming:
            self._prefixes.end(sequence)
            self._warming.end(_call(sequence), self._now)
        super().end(sequence)


def _call(sequence: Sequence) -> WarmCall:
    hints = sequence.hints
    run = sequence.index if hints.run is None else (hints.client, hints.application, hints.run)
    return WarmCall(run, hints.application or "", hints.unit or "", sequence.index)
