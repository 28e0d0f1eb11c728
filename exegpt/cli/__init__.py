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

_SEARCHING = ("tune", "plan", "simulate", "demo", "run", "serve", "reproduce")
"""The commands that search or replay."""


class _Ending:
    """The early end of a command by a signal.

    SIGTERM is handled as an interrupt with its own exit code. So a terminated command leaves the same files on disk as
    an interrupted one.
    """

    def __init__(self, silent: bool) -> None:
        """Prepare for signals; with `silent`, the process that started this one prints the message."""
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
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not tear the files being written
        interrupt = signal.getsignal(signal.SIGINT)
        if callable(interrupt):  # an event loop's own handler, which ends its tasks in order
            interrupt(signal.SIGINT, frame)
            return
        raise KeyboardInterrupt

    def say(self) -> int:
        """Print one line, and return the exit code."""
        if self._silent:
            return self.code
        return _say("Terminated." if self.code == TERMINATED else "Interrupted.", self.code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code. A bad input is one sentence on standard error, never a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    ending = _Ending(silent=list(arguments[:1]) == ["engine"])
    try:
        with ending:
            if hasattr(sys.stdout, "reconfigure"):  # print an escape sequence for a letter that the terminal lacks
                sys.stdout.reconfigure(errors="backslashreplace")
            return _run(arguments, ending)
    except KeyboardInterrupt:  # before typer can catch it
        return ending.say()
    finally:
        gc.freeze()  # a last collection at exit would take 0.1 s after a search
        gc.enable()  # `tune` disables it


def _run(arguments: Sequence[str], ending: _Ending) -> int:
    import typer

    from exegpt.cli.app import whole_command

    usage_error: type[Exception] = typer.BadParameter.__mro__[2]  # base class of usage errors in every version
    try:
        _check_given(arguments)
        _load_plugins()
        _say_uncompiled(arguments)
        try:
            code: int = whole_command().main(arguments, prog_name="exegpt", standalone_mode=False) or 0
        except usage_error as error:
            return _refuse_usage(error)
        return ending.say() if code == INTERRUPTED else code  # caught by typer, which prints nothing
    except InputError as error:
        return _say(str(error), BAD_INPUT)
    except Infeasible as error:
        return _say(str(error), INFEASIBLE)
    except typer.Abort:  # older versions' exception for an interrupt
        return ending.say()
    except BrokenPipeError:  # the reader of the output has ended, as with `| head`
        sys.stdout = None
        return 0
    except OSError as error:
        return _say(_os_text(error), BAD_INPUT)
    except SystemExit as end:  # typer's own reaction to a broken pipe
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        sys.stdout = None
        return 0


def _load_plugins() -> None:
    """Register the policies of the plug-in files that the parent process has loaded."""
    if os.environ.get("EXEGPT_PLUGINS"):
        from xcore.policies import plugins

        plugins.load_inherited()


def _say_uncompiled(arguments: Sequence[str]) -> None:
    """Print a note before a search or a replay if exegpt was installed without a C compiler."""
    from xcore import compiled_parts

    if arguments and arguments[0] in _SEARCHING and "--help" not in arguments and not compiled_parts.all_there():
        from xcore.console import output

        output.note(
            "exegpt was installed without a C compiler: searches take about 6 times as long, those at a rate and "
            "replays about 100 times. Install one and then exegpt again, or install a wheel."
        )


def _check_given(arguments: Sequence[str]) -> None:
    """Raise InputError for an empty argument: usually a script's unset variable, never a request for a default."""
    for before, text in zip(["exegpt", *arguments], arguments, strict=False):
        if text == "" or (text.startswith("--") and text.endswith("=")):
            where = f"'{text}'" if text else f"The argument after '{before}'"
            _refuse(f"{where} is empty: give it a value or leave the option out.")


def _refuse(sentence: str) -> NoReturn:
    """Raise InputError for an invalid command line.

    All ranks of a job get the same command line, so only rank 0 prints the message.
    """
    from xrunner.comm.ranks import job

    def refuse() -> None:
        raise InputError(sentence)

    with job() as ranks:
        ranks.attempt(refuse)
    raise AssertionError("the attempt raised")


def _os_text(error: OSError) -> str:
    """Return the system's error in one sentence."""
    if error.errno == errno.ENOSPC:
        return f"The disk is full ({error.strerror}): free some space, or write to another disk."
    if error.filename is None:
        return f"A file or a device can't be used ({error.strerror or error})."
    return f"'{error.filename}' can't be used ({error.strerror}): change its permissions, or name another file."


def _refuse_usage(error: Any) -> int:
    """Raise InputError for a wrong option, with its value and the command for help.

    A command group that is called without a command prints its help instead.
    """
    text = error.format_message().strip().replace("Input should be", "it must be")
    command = error.ctx.command_path if error.ctx else "exegpt"
    if not text or text.startswith("Usage:"):
        print(text or error.ctx.get_help(), file=sys.stderr)
        return BAD_INPUT
    invalid = getattr(
        error.__context__, "errors", None
    )  # typer versions that validate with pydantic leave the value out
    value = f" (got {invalid()[0]['input']!r})" if invalid else ""
    end = "" if text.endswith("?") else ";"
    _refuse(f"{text.rstrip('.')}{value}{end} see `{command} --help`.")


def _say(text: str, code: int) -> int:
    print(f"exegpt: {text}", file=sys.stderr)
    return code
