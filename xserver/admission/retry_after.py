"""RetryAfter: the time after which clients with refused requests should retry."""

from collections import deque

from xserver.admission.arrival_rate import ArrivalRate

_LIKELY = 0.9
"""If more than this share of recent requests is accepted, the next try is likely to be accepted."""
_LONGER = 2.0
"""Assumed remaining duration of an overload, as a multiple of its duration so far."""
_MOST_S = 42.0
"""OpenAI's client obeys waits of up to a minute, and waits are spread by up to 40 %."""
_SHARE = 0.8
"""Share of the rate of answers at which clients return: at all of it, chance alone would make many return too soon."""
_REMEMBERED = 10_000


class RetryAfter:
    """Computes how long clients should wait after a refusal.

    If most requests are accepted, a client may retry when there is capacity. Otherwise there is an overload, in which
    an early retry would probably be refused again. An overload is assumed to last for another two times its duration so
    far. After that, waiting clients take turns as answers end.
    """

    def __init__(self, memory_s: float):
        self._memory_s = memory_s
        self._accepted, self._refused, self._ended = (ArrivalRate(memory_s / 2) for _ in range(3))
        self._since_s = self._last_s = 0.0
        """Times of this overload's first and last refusal."""
        self._returns: deque[float] = deque(maxlen=_REMEMBERED)
        """The times at which clients were told to retry, in order."""

    def accepted(self, now_s: float) -> None:
        """Count an accepted request."""
        self._accepted.come(1, now_s)

    def ended(self, now_s: float) -> None:
        """Count an answer that has ended."""
        self._ended.come(1, now_s)

    def refused(self, room_s: float, now_s: float, per_s: float, further_s: float = 0.0) -> float:
        """Count a refusal and return the seconds after which the client should retry.

        There may be capacity for one request after `room_s`. From `further_s` on, there is some for as many requests
        per second as answers have ended, in the beginning of an overload at least for the predicted `per_s`.
        """
        if now_s - self._last_s > self._memory_s:
            self._since_s = now_s
            self._returns.clear()  # of the previous overload
        self._last_s = now_s
        self._refused.come(1, now_s)
        accepted, refused = self._accepted.rate(now_s), self._refused.rate(now_s)
        overloaded = accepted < _LIKELY * (accepted + refused)
        lasts_s = _LONGER * (now_s - self._since_s) if overloaded else 0.0
        while self._returns and self._returns[0] < now_s:
            self._returns.popleft()
        ended = max(self._ended.rate(now_s), 1.0 / self._memory_s)
        begins = now_s - self._since_s <= self._memory_s
        if self._returns:  # one request will have taken the capacity
            room_s = max(room_s, further_s)
        turns_s = len(self._returns) / (_SHARE * (max(ended, per_s) if begins else ended))
        after_s = min(_MOST_S, max(room_s, lasts_s) + turns_s)
        self._returns.append(max(now_s + after_s, self._returns[-1] if self._returns else 0.0))
        return after_s
