"""RetryAfter: when those that were refused should come back."""

from collections import deque

from xserver.admission.arrival_rate import ArrivalRate

_LIKELY = 0.9
"""Share of requests that are accepted lately above which the next try is likely to be."""
_LONGER = 2.0
"""How long an overload is taken to last yet, over how long it has lasted."""
_MOST_S = 42.0
"""OpenAI's client obeys up to a minute, and waits are spread by up to 40 %."""
_REMEMBERED = 10_000


class RetryAfter:
    """Where most requests are accepted, a client may come back as soon as there is room. Else there is an overload, in
    which whoever comes back soon is likely to be refused again: it is taken to last twice as long as it has, and those
    that wait take turns as answers end.
    """

    def __init__(self, memory_s: float):
        self._memory_s = memory_s
        self._accepted, self._refused, self._ended = (ArrivalRate(memory_s / 2) for _ in range(3))
        self._since_s = self._last_s = 0.0
        """Of this overload: its first refusal, and its last one."""
        self._returns: deque[float] = deque(maxlen=_REMEMBERED)
        """When those that were told will come back, in order."""

    def accepted(self, now_s: float) -> None:
        """A request was accepted."""
        self._accepted.come(1, now_s)

    def ended(self, now_s: float) -> None:
        """An answer has ended."""
        self._ended.come(1, now_s)

    def refused(self, room_s: float, now_s: float) -> float:
        """Seconds after which one that is refused now should come back; there may be room after `room_s`."""
        if now_s - self._last_s > self._memory_s:
            self._since_s = now_s
        self._last_s = now_s
        self._refused.come(1, now_s)
        accepted, refused = self._accepted.rate(now_s), self._refused.rate(now_s)
        if accepted >= _LIKELY * (accepted + refused):
            return min(_MOST_S, room_s)
        while self._returns and self._returns[0] < now_s:
            self._returns.popleft()
        turns_s = len(self._returns) / max(self._ended.rate(now_s), 1.0 / self._memory_s)
        after_s = min(_MOST_S, max(room_s, _LONGER * (now_s - self._since_s)) + turns_s)
        self._returns.append(max(now_s + after_s, self._returns[-1] if self._returns else 0.0))
        return after_s
