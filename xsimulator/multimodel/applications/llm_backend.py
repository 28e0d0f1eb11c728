"""An LLM that applications share: continuous batches at one pace, filled by an order over applications."""

import heapq
from dataclasses import dataclass, field

from xsimulator.multimodel.applications.demand import ServiceRates
from xsimulator.multimodel.applications.orders import ApplicationOrder, WaitingCall
from xsimulator.multimodel.applications.progress import IterationCounter
from xsimulator.multimodel.applications.warm_cache import WarmCache


@dataclass(frozen=True)
class LLMLimits:
    """What an LLM serves at once, and its pace."""

    rates: ServiceRates = field(default_factory=ServiceRates)
    """A prompt's tokens take their time one after the other, while nothing decodes; a decoding iteration takes the same
    for every batch."""
    batch: int = 256
    kv_tokens: int = 42_900
    """Each request holds its prompt and its whole output."""
    kv_bytes_per_token: int = 524_288


class LLMBackend:
    """Requests keep their place in the batch until they end; who takes a free one is decided at every iteration."""

    def __init__(self, limits: LLMLimits, order: ApplicationOrder, cache: WarmCache | None = None):
        self.limits = limits
        self.counter = IterationCounter()
        self.waiting: list[WaitingCall] = []
        self.running = 0
        self.free_tokens = limits.kv_tokens
        self._order = order
        self._cache = cache
        self._ends: list[tuple[int, int, int, WaitingCall]] = []
        """A heap: the iteration in which requests end, the call's index, how many requests."""

    def admit(self, now: float) -> tuple[float, list[WaitingCall]]:
        """Seconds of prefill of the requests that begin, in order, until one doesn't fit; calls whose first they are.

        A call whose adapter or context is being loaded keeps places for its requests; one for which there is no slot
        doesn't hold up others.
        """
        prompt_tokens, begun = 0, []
        full = self.running >= self.limits.batch
        if not self.waiting or (full and self._cache is None):
            return 0.0, []
        ordered = sorted(self.waiting, key=lambda call: self._order.key(call, now))
        if self._cache:
            self._cache.prefetch(ordered, now)
        kept_places = kept_tokens = 0
        for call in ordered:
            each = call.progress.call
            tokens = max(1, each.input_tokens + each.output_tokens)
            places = self.limits.batch - self.running - kept_places
            requests = min(call.left, places, (self.free_tokens - kept_tokens) // tokens)
            if requests <= 0:
                break
            if self._cache and not self._cache.take(call, now):
                if call.loaded_s is not None:
                    kept_places, kept_tokens = kept_places + requests, kept_tokens + requests * tokens
                continue
            if call.running == 0 and call.left == each.parallel:
                begun.append(call)
            prompt_tokens += self._begin(call, requests)
            if call.left:
                break
        self.waiting = [call for call in self.waiting if call.left]
        return prompt_tokens * self.limits.rates.prefill_s, begun

    def _begin(self, call: WaitingCall, requests: int) -> int:
        """Prompt tokens of so many requests that begin."""
        each = call.progress.call
        call.left -= requests
        call.running += requests
        self.running += requests
        self.free_tokens -= requests * (each.input_tokens + each.output_tokens)
        call.progress.begin(requests)
        heapq.heappush(self._ends, (self.counter.done + each.output_tokens, call.index, requests, call))
        return requests * each.input_tokens

    def decode(self, seconds: float) -> float:
        """Decode until requests end, or until `seconds` have passed, in whole iterations, one at least; the time it
        took. Requests without output tokens are over at once.
        """
        pace = self.limits.rates.decode_s
        iterations = self._ends[0][0] - self.counter.done
        if iterations > 0 and seconds < iterations * pace:
            iterations = max(1, -int(-seconds // pace))
        self.counter.done += iterations
        return iterations * pace

    def ended(self) -> list[WaitingCall]:
        """Calls all of whose requests have ended now."""
        calls = []
        while self._ends and self._ends[0][0] <= self.counter.done:
            _, _, requests, call = heapq.heappop(self._ends)
            each = call.progress.call
            call.running -= requests
            self.running -= requests
            self.free_tokens += requests * (each.input_tokens + each.output_tokens)
            call.progress.end(requests)
            if not call.running and not call.left:
                calls.append(call)
        return calls
