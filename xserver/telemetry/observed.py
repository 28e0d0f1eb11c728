"""Observed: the recent history of a server, by second, for `/schedule` and the status page."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from xcore.requests.engine_protocol import Stepped
from xcore.specs.request_times import percentiles
from xcore.specs.timeline import Span
from xserver.http.answered import Answered

MINUTE_S, KEPT_S, LATELY_S = 60, 300, 10
_SPANS = 400
"""Maximum spans kept for each device."""
_POINTS = 600
"""Maximum requests in a chart."""
_ANSWERS = 20_000
"""Maximum requests kept."""


@dataclass
class Second:
    """Events in one second of the monotonic clock."""

    at: int
    tokens: int = 0
    preempted: int = 0
    sizes: dict[str, list[int]] = field(default_factory=dict)
    """By phase: the number of micro-batches, and the total of their sequences."""


class Observed:
    """Answers and steps of the last five minutes; times are of the monotonic clock, in seconds."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.spans: dict[int, deque[Span]] = {}
        """The latest spans of each stage's first device, by the monotonic clock."""
        self._seconds: deque[Second] = deque(maxlen=KEPT_S)
        self._answers: deque[Answered] = deque(maxlen=_ANSWERS)

    def opened(self, now_s: float) -> None:
        """Record that there is an engine."""
        if not self._seconds and not self._answers:
            self.since_s = now_s  # loading doesn't count as serving

    def stepped(self, stepped: Stepped, preempted: int, zero_s: float, now_s: float) -> None:
        """Record a step of the engine, whose clock began at `zero_s`; the step preempted `preempted` sequences."""
        second = self._second(now_s)
        second.tokens += len(stepped.tokens)
        second.preempted += preempted
        for span in stepped.spans:
            size = second.sizes.setdefault(span.phase, [0, 0])
            size[0] += 1
            size[1] += span.sequences
            start_s, end_s = zero_s + span.start_s, zero_s + span.end_s
            shifted = Span(span.device, span.stage, span.phase, 0, start_s, end_s, span.sequences, span.tokens)
            self.spans.setdefault(span.device, deque(maxlen=_SPANS)).append(shifted)

    def answered(self, answered: Answered) -> None:
        """Record a request that has ended."""
        self._answers.append(answered)
        while self._answers[0].ended_s < answered.ended_s - KEPT_S:
            self._answers.popleft()

    def sizes(self, now_s: float, within_s: int = LATELY_S) -> dict[str, float]:
        """Return the mean number of sequences per micro-batch, by phase."""
        total: dict[str, list[int]] = {}
        for second in self._since(now_s, within_s):
            for phase, (count, sequences) in second.sizes.items():
                sums = total.setdefault(phase, [0, 0])
                sums[0], sums[1] = sums[0] + count, sums[1] + sequences
        return {phase: sequences / count for phase, (count, sequences) in total.items() if phase != "overhead"}

    def minute(self, now_s: float) -> dict[str, object]:
        """Return the results of the last minute.

        They cover accepted and answered requests, except for the counts of other outcomes.
        """
        recent = [answer for answer in self._answers if answer.ended_s > now_s - MINUTE_S]
        whole = [a for a in recent if a.outcome == "answered" and a.kind in ("usual", "long")]
        seconds_s = max(1.0, min(MINUTE_S, now_s - self.since_s))
        tokens = sum(second.tokens for second in self._since(now_s, MINUTE_S))
        return {
            "seconds": seconds_s,
            "requests_per_s": len(whole) / seconds_s,
            "output_tokens_per_s": tokens / seconds_s,
            "latency_s": percentiles([a.latency_s for a in whole]),
            "time_to_first_token_s": percentiles([a.ttft_s for a in whole if a.ttft_s is not None]),
            "time_per_output_token_s": percentiles([s for a in whole for s in a.tpot_s]),
            "prefix_hit_rate": hit_rate(recent),
            "within_bound": share_within(whole),
            "rejected": sum(1 for a in recent if a.outcome == "rejected"),
            "failed": sum(1 for a in recent if a.outcome == "failed"),
            "cancelled": sum(1 for a in recent if a.outcome == "cancelled"),
            "batch_size": self.sizes(now_s, MINUTE_S),
        }

    def latencies_s(self, since_s: float) -> tuple[float, ...]:
        """Return the latencies of answered requests that arrived since `since_s`, within the recent history."""
        whole = (a for a in self._answers if a.outcome == "answered" and a.kind in ("usual", "long"))
        return tuple(a.latency_s for a in whole if a.ended_s - a.latency_s >= since_s)

    def series(self, now_s: float) -> dict[str, list[list[object]]]:
        """Return the series for charts.

        `tokens`: (seconds ago, output tokens) by second. `requests`: (seconds ago, latency, class, whether the bound
        was missed, whether it was rejected) of requests, evenly thinned out if there are very many.
        """
        answers = [a for a in self._answers if a.ended_s > now_s - KEPT_S and a.outcome in ("answered", "rejected")]
        return {
            "tokens": [[int(now_s) - s.at, s.tokens] for s in self._since(now_s, KEPT_S)],
            "requests": [
                [
                    round(now_s - a.ended_s, 1),
                    round(a.latency_s, 4),
                    a.kind,
                    a.miss is not None,
                    a.outcome == "rejected",
                ]
                for a in answers[:: max(1, -(-len(answers) // _POINTS))]
            ],
        }

    def latest_spans(self, most: int) -> list[Span]:
        """Return up to `most` spans of each device that has worked within a minute of the latest span."""
        until_s = max((spans[-1].end_s for spans in self.spans.values()), default=0.0)
        live = [spans for spans in self.spans.values() if spans[-1].end_s > until_s - MINUTE_S]
        return [span for spans in live for span in list(spans)[-most:]]

    def preempted(self, now_s: float) -> int:
        """Return the number of sequences preempted in the last minute."""
        return sum(second.preempted for second in self._since(now_s, MINUTE_S))

    def _second(self, now_s: float) -> Second:
        if not self._seconds or self._seconds[-1].at != int(now_s):
            self._seconds.append(Second(int(now_s)))
        return self._seconds[-1]

    def _since(self, now_s: float, within_s: int) -> Iterable[Second]:
        return (second for second in self._seconds if second.at > now_s - within_s - 1)


def hit_rate(answers: Sequence[Answered]) -> float | None:
    """Return the share of the prompts' tokens that were in the cache of prefixes; None if prefixes aren't cached."""
    looked_up = sum(answer.looked_up_tokens for answer in answers)
    return sum(answer.cached_tokens for answer in answers) / looked_up if looked_up else None


def share_within(answers: Sequence[Answered]) -> float | None:
    """Return the share of answers under the bound that are within it; None without any."""
    bound = [answer for answer in answers if answer.bound_s is not None]
    return sum(1 for answer in bound if answer.miss is None) / len(bound) if bound else None
