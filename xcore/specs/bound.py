"""What a bound on a time is about: which of the requests keep it."""

from dataclasses import dataclass
from typing import Literal

from xcore.errors import InputError
from xcore.quantity import percent_text

BoundName = Literal["requests", "p99-length", "p99-queries"]
"""`p99-queries` is another name of `requests`, of older files."""
PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
"""Those that people ask for."""
LONGEST, OF_LONGEST = 0.02, 0.95
"""How the latency of the 99th-percentile length is measured: over the requests whose outputs are this share of all,
the longest, as the time that this share of them keeps."""


@dataclass(frozen=True)
class BoundMeaning:
    """Of all requests, the share that keeps each bound; or, in a latency's place, a sequence of one length."""

    name: BoundName = "requests"
    percentile: float = 99.0

    def __post_init__(self) -> None:
        if not 0 < self.percentile < 100:
            raise InputError(f"A bound can't be for {self.percentile:g}% of the requests: pass --percentile 99.")

    @property
    def share(self) -> float:
        """The percentile from 0 to 1."""
        return self.percentile / 100

    @property
    def of_length(self) -> bool:
        """Whether a bound on the latency is for a sequence of the 99th-percentile output length, the paper's."""
        return self.name == "p99-length"

    @property
    def latency_text(self) -> str:
        """Who keeps a bound on the latency."""
        return "a sequence of the 99th-percentile output length" if self.of_length else self.requests_text

    @property
    def requests_text(self) -> str:
        """Who keeps a bound on another time."""
        return f"{percent_text(self.share)} of all requests"


ALL_REQUESTS = BoundMeaning()
"""What people mean by a bound, and the default."""
PAPER_BOUND = BoundMeaning("p99-length")
"""The ExeGPT paper's (section 7.1)."""
