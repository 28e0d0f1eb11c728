"""Reports: the log line and the span of each finished request."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from xcore.console import output
from xserver.http.answered import Answered
from xserver.http.generation import Choice
from xserver.telemetry.reporting import reporting
from xserver.telemetry.tracing import Tracing


@dataclass(frozen=True)
class Reports:
    """The reports of one server, for all of its models."""

    log_requests: bool = False
    """Whether to log a line per request."""
    tracing: Tracing | None = None
    """Exports spans to a collector, if there is one."""

    def answered(self, answered: Answered, parent: Mapping[str, str], choices: Sequence[Choice] = ()) -> None:
        """Report a request that has ended.

        `parent` has the headers of its caller's trace; `choices` are its own sequences.
        """
        if self.tracing:
            with reporting("tracing"):
                self.tracing.answered(answered, parent, choices)
        if self.log_requests:
            with reporting("log"):
                _log(answered)


def _log(answered: Answered) -> None:
    # A prediction is a numpy number, which would be compared with a tuple element by element.
    facts = {n: v for n, v in asdict(answered).items() if v is not None and not (isinstance(v, tuple) and not v)}
    if not output.log(answered.text, event="request", dated=True, **facts):
        raise OSError("the log can't be written")
