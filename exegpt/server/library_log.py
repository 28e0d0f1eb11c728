"""The libraries' log messages, passed on to the server's log: warnings, and the locations of bugs. Messages of
exceptions are left out, since they may repeat a client's data.
"""

import logging
import traceback

from exegpt.report import output


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        where = ""
        if record.exc_info and record.exc_info[0]:
            places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in _frames(record.exc_info[1])]
            where = f"{record.exc_info[0].__name__} at {' < '.join(reversed(places))}"
        message = record.msg if record.exc_info else record.getMessage()
        output.note(f"{record.name}: {str(message).strip()} {where}".strip(), event="library", level=record.levelname)


def _frames(error: BaseException | None) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__)) if error else []


def log_libraries() -> None:
    """Send warnings and errors of uvicorn, asyncio and others to the notes."""
    root = logging.getLogger()
    if not any(isinstance(handler, _Handler) for handler in root.handlers):
        root.addHandler(_Handler(logging.WARNING))
