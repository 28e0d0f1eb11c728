"""Reports: what is said of each request when it has ended, beside what is counted: a line of the log, and a span."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from exegpt.report import output
from exegpt.server.answered import Answered
from exegpt.server.generation import Choice
from exegpt.server.tracing import Tracing


@dataclass(frozen=True)
class Reports:
    """Of one server, whatever models it has."""

    log_requests: bool = False
    """A line of the log per request."""
    tracing: Tracing | None = None
    """Where spans are exported to a collector."""

    def answered(self, answered: Answered, parent: Mapping[str, str], choices: Sequence[Choice] = ()) -> None:
        """A request has ended. `parent` has the headers of its caller's trace; `choices` are its own sequences."""
        if self.tracing:
            self.tracing.answered(answered, parent, choices)
        if self.log_requests:
            facts = {name: value for name, value in asdict(answered).items() if value not in (None, ())}
            output.note(answered.text, event="request", **facts)
