"""The meaning of a bound on a time: which requests it is about."""

from dataclasses import dataclass
from typing import Literal

from xcore.errors import InputError
from xcore.quantity import percent_text

BoundName = Literal["requests", "p99-length", "p99-queries"]
"""`p99-queries` is another name of `requests`, of older files."""
PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
"""Percentiles that may be chosen."""
LONGEST, OF_LONGEST = 0.02, 0.95
"""Shares for measuring the latency of the 99th-percentile length.

The first is the share of requests with the longest outputs; the second is the share of those that meets the latency.
"""


@dataclass(frozen=True)
class BoundMeaning:
    """The share of requests that keeps each bound; for the latency, alternatively a sequence of one length."""

    name: BoundName = "requests"
    percentile: float = 99.0

    def __post_init__(self) -> None:
        if not 0 < self.percentile < 100:
            raise InputError(f"A bound can't hold for {self.percentile:g}% of the requests: pass --percentile 99.")

    @property
    def share(self) -> float:
        """Return the percentile from 0 to 1."""
        return self.percentile / 100

    @property
    def of_length(self) -> bool:
        """Return whether a latency bound is for a sequence of the 99th-percentile output length, as in the paper."""
        return self.name == "p99-length"

    @property
    def latency_text(self) -> str:
        """Return which requests a bound on the latency applies to, as text."""
        return "a sequence of the 99th-percentile output length" if self.of_length else self.requests_text

    @property
    def requests_text(self) -> str:
        """Return which requests a bound on another time applies to, as text."""
        return f"{percent_text(self.share)} of all requests"


ALL_REQUESTS = BoundMeaning()
"""The usual meaning of a bound, and the default."""
PAPER_BOUND = BoundMeaning("p99-length")
"""The meaning in the ExeGPT paper (section 7.1)."""
