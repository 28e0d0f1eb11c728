"""The results file: finished requests are appended as they come, and an interrupted run can be resumed."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from xcore.document import dumps, from_dict, parse_json, read_text, to_dict, write_text
from xcore.errors import InputError
from xcore.requests.request import Result

_OPTIONAL = {"error", "logprobs", "likeliest", "prompt_logprobs", "prompt_likeliest"}
"""Keys that only some results have: failed ones, and those of requests that ask for them."""


class ResultFile:
    """One JSON line per result, flushed to `FILE.partial` and renamed to `FILE` at the end.

        open ──append──► FILE.partial (with FILE.partial.run, the run's fingerprint) ──complete──► FILE

    `fingerprint` stands for model, schedule and requests. With `resume`, an interrupted run's results are kept, if
    there are any.

    Raises:
        InputError: Another run's partial file is in the way.
    """

    def __init__(self, path: str | Path, fingerprint: str, resume: bool = False):
        self.path = Path(path)
        self._partial = _partial(self.path)
        self._run = self.path.with_name(self.path.name + ".partial.run")
        self.done: dict[str, Result] = {}
        """Results of the run that is resumed, by id."""
        if not self.path.parent.is_dir():
            raise InputError(f"There is no folder '{self.path.parent}' to write '{self.path.name}' to.")
        check_left(self.path, resume)
        if self._partial.exists():
            self._take_up(fingerprint)
        write_text(self._run, fingerprint + "\n")
        self._file = self._partial.open("a", encoding="utf-8")
        self._left = False

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._left:
            return
        if kind is None:
            self._complete()
        elif not self._partial.stat().st_size:  # there is nothing to resume
            self._partial.unlink()
            self._run.unlink()

    def append(self, result: Result) -> None:
        """Write and flush one result, so that it survives this process."""
        row = to_dict(result)
        self._file.write(dumps({k: v for k, v in row.items() if v is not None or k not in _OPTIONAL}, None) + "\n")
        self._file.flush()

    def leave(self) -> None:
        """Leave the file to another rank of the job, which has continued it and completes it."""
        self._left = True

    def _complete(self) -> None:
        os.replace(self._partial, self.path)
        self._run.unlink()

    def _take_up(self, fingerprint: str) -> None:
        """Read the interrupted run's results, and cut off a torn last line."""
        left = read_text(self._run).strip() if self._run.exists() else "unknown"
        if left != fingerprint:
            raise InputError(
                f"'{self._partial}' belongs to another run ({left}, this run is {fingerprint}). Model, schedule and "
                "requests must be the same: remove the file to run from the start."
            )
        data = self._partial.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        try:
            self.done = {result.id: result for result in _parsed(whole, self._partial)}
        except InputError as error:
            raise InputError(f"{error} Remove the file to run from the start.") from None
        if len(whole) < len(data):
            os.truncate(self._partial, len(whole))


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def check_left(path: Path, resume: bool) -> None:
    """Check the files that earlier runs have left for this file.

    Raises:
        InputError: Without `resume`, an interrupted run has left results. With `resume`, there are only complete
            results.
    """
    if not resume and _partial(path).exists():
        raise InputError(f"'{_partial(path)}' is from an interrupted run: pass --resume to continue, or remove it.")
    if resume and path.exists() and not _partial(path).exists():
        raise InputError(
            f"'{path}' has the results of a complete run, which can't be resumed: omit --resume to replace them, or "
            "choose another file."
        )


def read_results(path: str | Path) -> list[Result]:
    """Return the results in a finished file, in order of completion."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"There is no result file '{path}'.")
    return list(_parsed(path.read_bytes(), path))


def _parsed(data: bytes, path: Path) -> Iterator[Result]:
    """Yield the results in a file's lines. Only a line feed ends a line: texts may contain other line ends."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if line:
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise InputError(f"'{path}', line {number}, is not a result in UTF-8 ({error}).") from None
            where = f"'{path}', line {number}"
            yield from_dict(Result, parse_json(text, f"{where},"), where)
