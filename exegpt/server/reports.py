"""Reports: the log line and the span of each finished request."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from exegpt.report import output
from exegpt.server.answered import Answered
from exegpt.server.generation import Choice
from exegpt.server.tracing import Tracing


@dataclass(frozen=True)
class Reports:
    """The reports of one server, for all of its models."""

    log_requests: bool = False
    """Whether to log a line per request."""
    tracing: Tracing | None = None
    """Exports spans to a collector, if there is one."""

    def answered(self, answered: Answered, parent: Mapping[str, str], choices: Sequence[Choice] = ()) -> None:
        """A request has ended. `parent` has the headers of its caller's trace; `choices` are its own sequences."""
        if self.tracing:
            self.tracing.answered(answered, parent, choices)
        if self.log_requests:
            facts = {name: value for name, value in asdict(answered).items() if value not in (None, ())}
            output.note(answered.text, event="request", **facts)
