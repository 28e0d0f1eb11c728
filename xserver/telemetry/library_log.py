"""Pass the libraries' log messages on to the server's log: warnings, and the locations of bugs.

Messages of exceptions are left out, because they may repeat a client's data.
"""

import logging

from xcore.console import output
from xserver.telemetry.reporting import place, reporting


class _Handler(logging.Handler):
    @reporting("log")
    def emit(self, record: logging.LogRecord) -> None:
        where = place(record.exc_info[1]) if record.exc_info and record.exc_info[1] else ""
        message = record.msg if record.exc_info else record.getMessage()
        output.note(f"{record.name}: {str(message).strip()} {where}".strip(), event="library", level=record.levelname)


def log_libraries() -> None:
    """Send warnings and errors of uvicorn, asyncio and others to the notes."""
    root = logging.getLogger()
    if not any(isinstance(handler, _Handler) for handler in root.handlers):
        root.addHandler(_Handler(logging.WARNING))
