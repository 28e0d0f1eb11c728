"""The output of commands: one JSON document or tables on standard output; notes and progress on standard error."""

import functools
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from xcore import quantity
from xcore.duration import duration_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.table import Table

    from xcore.specs.profile import Profile


LOG_FORMAT = "EXEGPT_LOG_FORMAT"
"""The environment variable for the format of notes, here and in child processes: `json`, or anything for text."""
LINE_EVERY_S = 10.0
"""Seconds between lines of progress if standard error is no terminal."""
NOTES_OF = "EXEGPT_NOTES_OF"
"""The environment variable for the prefix of a process's notes: its models, if other processes print too."""


def _forwarded() -> bool:
    """Return whether mpirun forwards standard output.

    Open MPI's ranks write to pseudo-terminals, even if mpirun's own standard output is a file.
    """
    return "OMPI_COMM_WORLD_SIZE" in os.environ


@functools.cache
def stderr() -> "Console":
    """Return the console for notes and progress."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def note(text: str, event: str = "note", **facts: object) -> None:
    """Print a note to standard error; as a JSON line with further facts if the environment asks for JSON.

    A command continues even if its log's disk is full or the log's reader has ended.
    """
    log(text, event, False, **facts)


def log(text: str, event: str, dated: bool = False, **facts: object) -> bool:
    """Print a note as `note` does, `dated` with the time, and return whether it was written."""
    if dated and os.environ.get(LOG_FORMAT) != "json":  # a JSON line has the time anyway
        text = f"{datetime.now(timezone.utc).isoformat(timespec='milliseconds')} {text}"
    try:
        _print_note(text, event, facts)
    except (OSError, ValueError):  # ValueError: the file is closed
        return False
    return True


def _print_note(text: str, event: str, facts: Mapping[str, object]) -> None:
    if of := os.environ.get(NOTES_OF):
        text = f"{of}: {text}"
    if os.environ.get(LOG_FORMAT) != "json":
        if stderr().is_terminal:
            return stderr().print(text, markup=False, soft_wrap=True)
        return print(text, file=sys.stderr, flush=True)  # rich would end the process if the reader has ended
    import json

    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    line = json.dumps({"time": now, "event": event, "message": text, **facts}, default=str)
    print(line, file=sys.stderr, flush=True)


def notes(texts: Iterable[str]) -> None:
    """Print the assumptions of an answer, each sentence once."""
    for text in dict.fromkeys(texts):
        note(f"· {text}")


def emit(data: Mapping[str, object]) -> None:
    """Print one JSON document."""
    from xcore.document import dumps

    print(dumps(data))


def listed(head: str, texts: Sequence[str]) -> None:
    """Print sentences below a heading; on a terminal they are wrapped at words and indented."""
    print(head)
    for text in texts:
        print(_wrapped(f"  {text}"))


def _wrapped(text: str) -> str:
    if _forwarded() or not sys.stdout.isatty():
        return text
    import shutil
    import textwrap

    return textwrap.fill(text, shutil.get_terminal_size().columns, subsequent_indent="    ", break_long_words=False)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Print a table; columns of figures are aligned to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        figures = place > 0 and all(row[place][:1] in "–+-0123456789" for row in rows)
        drawn.add_column(column, justify="right" if figures else "left", no_wrap=place == 0)
    for row in rows:
        drawn.add_row(*row)
    console = Console(highlight=False, force_terminal=False if _forwarded() else None)
    if title:
        console.print(title, style="bold", markup=False, soft_wrap=True)  # a title may be wider than its table
    console.print(drawn if console.is_terminal else _unbounded(drawn, console))


def _unbounded(drawn: "Table", console: "Console") -> "Table":
    """Widen the console for a table that goes to a file or a pipe, so that it isn't cut to a terminal's width."""
    console.width = max(console.width, console.measure(drawn, options=console.options.update(width=400)).maximum)
    return drawn


@contextmanager
def progress(title: str) -> "Iterator[Callable[[int, int], None]]":
    """Show a progress bar on standard error, or occasional lines if it isn't a terminal; yields update(done, total)."""
    if not stderr().is_terminal:
        yield _progress_lines(title)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr(), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _progress_lines(title: str) -> "Callable[[int, int], None]":
    """Return an update function that prints the progress if nothing was printed for a while."""
    started = last = time.monotonic()

    def update(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_EVERY_S:
            last = now
            note(f"{title}: {done} of {total}, {duration_text(now - started)}", "progress", done=done, total=total)

    return update


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def provenance(profile: "Profile | None" = None, seed: int | None = None, **more: object) -> dict[str, object]:
    """Return the provenance of an answer: versions, profile, seed, command line, and further facts of a command."""
    from xcore import __version__

    return {
        "exegpt": __version__,
        "python": platform.python_version(),
        **{package: _version(package) for package in ("torch", "transformers", "triton")},
        "profile": {"source": profile.source, "fingerprint": profile.fingerprint} if profile else None,
        "seed": seed,
        "command_line": shlex.join(["exegpt", *sys.argv[1:]]),
        **more,
    }


def seconds(value: float | None) -> str:
    """Return a time as text, or a dash."""
    return "–" if value is None else duration_text(value)


number, share = quantity.figure_text, quantity.signed_percent
"""A figure and a signed share in percent, as text; a dash for None."""
