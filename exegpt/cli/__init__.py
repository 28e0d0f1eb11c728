"""The command `exegpt`: one file per command, registered in app.py without importing anything heavy.

Exit codes: 0 done, 2 a bad input, 3 no feasible schedule, 130 interrupted, 143 terminated, 1 anything else.
"""

import errno
import gc
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from xcore.errors import Infeasible, InputError

if TYPE_CHECKING:
    from types import FrameType

BAD_INPUT, INFEASIBLE, INTERRUPTED, TERMINATED = 2, 3, 130, 143


class _Ending:
    """How a command was ended early: SIGTERM is an interrupt with its own exit code, so that a terminated command
    leaves the same files on disk as an interrupted one.
    """

    def __init__(self, silent: bool) -> None:
        """`silent`: who started this process says it."""
        self.code, self._silent = INTERRUPTED, silent

    def __enter__(self) -> "_Ending":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._terminate)
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_before"):
            signal.signal(signal.SIGTERM, self._before)

    def _terminate(self, number: int, frame: "FrameType | None") -> None:
        self.code = TERMINATED
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is being left on disk isn't torn by a second one
        interrupt = signal.getsignal(signal.SIGINT)
        if callable(interrupt):  # an event loop's own, which ends its tasks in order
            interrupt(signal.SIGINT, frame)
            return
        raise KeyboardInterrupt

    def say(self) -> int:
        """One line, and the exit code."""
        if self._silent:
            return self.code
        return _say("Terminated." if self.code == TERMINATED else "Interrupted.", self.code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. A bad input is one sentence on standard error, never a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    ending = _Ending(silent=list(arguments[:1]) == ["engine"])
    try:
        with ending:
            if hasattr(sys.stdout, "reconfigure"):  # a terminal that lacks a letter gets its escape, not an error
                sys.stdout.reconfigure(errors="backslashreplace")
            return _run(arguments, ending)
    except KeyboardInterrupt:  # before typer is there to catch it
        return ending.say()
    finally:
        gc.freeze()  # leaving would walk through everything once more: a tenth of a second after a search
        gc.enable()  # `tune` does without


def _run(arguments: Sequence[str], ending: _Ending) -> int:
    import typer

    from exegpt.cli.app import app

    usage_error: type[Exception] = typer.BadParameter.__mro__[2]  # every version's base of errors in what was typed
    try:
        _check_given(arguments)
        _load_plugins()
        try:
            code: int = app(arguments, standalone_mode=False, prog_name="exegpt") or 0
        except usage_error as error:
            return _refuse_usage(error)
        return ending.say() if code == INTERRUPTED else code  # typer has caught it, and prints nothing
    except InputError as error:
        return _say(str(error), BAD_INPUT)
    except Infeasible as error:
        return _say(str(error), INFEASIBLE)
    except typer.Abort:  # how older versions tell of an interrupt
        return ending.say()
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        sys.stdout = None
        return 0
    except OSError as error:
        return _say(_os_text(error), BAD_INPUT)
    except SystemExit as end:  # typer's own way out of a broken pipe
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        sys.stdout = None
        return 0


def _load_plugins() -> None:
    """Register the policies of the plug-in files that the process that has started this one has loaded."""
    if os.environ.get("EXEGPT_PLUGINS"):
        from xcore.policies import plugins

        plugins.load_inherited()


def _check_given(arguments: Sequence[str]) -> None:
    """InputError for an empty argument: most often a script's variable that isn't set, never a wish for a default."""
    for before, text in zip(["exegpt", *arguments], arguments, strict=False):
        if text == "" or (text.startswith("--") and text.endswith("=")):
            where = f"'{text}'" if text else f"The argument after '{before}'"
            _refuse(f"{where} is empty: give it a value or leave the option out.")


def _refuse(sentence: str) -> NoReturn:
    """Raise InputError for an invalid command line; a job's ranks share theirs, and rank 0 alone prints it."""
    from xrunner.comm.ranks import job

    def refuse() -> None:
        raise InputError(sentence)

    with job() as ranks:
        ranks.attempt(refuse)
    raise AssertionError("the attempt raised")


def _os_text(error: OSError) -> str:
    """What the system refused, in one sentence."""
    if error.errno == errno.ENOSPC:
        return f"The disk is full ({error.strerror}): free some space, or write to another one."
    if error.filename is None:
        return f"A file or a device can't be used ({error.strerror or error})."
    return f"'{error.filename}' can't be used ({error.strerror}): change its permissions or name another one."


def _refuse_usage(error: Any) -> int:
    """InputError for a wrong option, with its value, and where help is; a command that has commands prints its help
    where it is called without one.
    """
    text = error.format_message().strip().replace("Input should be", "it must be")
    command = error.ctx.command_path if error.ctx else "exegpt"
    if not text or text.startswith("Usage:"):
        print(text or error.ctx.get_help(), file=sys.stderr)
        return BAD_INPUT
    invalid = getattr(
        error.__context__, "errors", None
    )  # of typers that validate with pydantic, and leave the value out
    value = f" (got {invalid()[0]['input']!r})" if invalid else ""
    end = "" if text.endswith("?") else ";"
    _refuse(f"{text.rstrip('.')}{value}{end} see `{command} --help`.")


def _say(text: str, code: int) -> int:
    print(f"exegpt: {text}", file=sys.stderr)
    return code
