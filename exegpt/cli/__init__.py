"""The command `exegpt`: one file per command, registered in app.py without importing anything heavy.

Exit codes: 0 done, 2 a bad input, 3 no feasible schedule, 130 interrupted, 1 anything else.
"""

import gc
import sys
from collections.abc import Sequence

from exegpt.errors import Infeasible, InputError

BAD_INPUT, INFEASIBLE, INTERRUPTED = 2, 3, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. A bad input is one sentence on standard error, never a traceback."""
    import typer

    from exegpt.cli.app import app

    usage_error: type[Exception] = typer.BadParameter.__mro__[2]  # every version's base of errors in what was typed
    try:
        return app(arguments, standalone_mode=False) or 0
    except InputError as error:
        return _say(str(error), BAD_INPUT)
    except Infeasible as error:
        return _say(str(error), INFEASIBLE)
    except usage_error as error:
        text = error.format_message()  # type: ignore[attr-defined]
        return _say(f"{text.rstrip('.')}; see `exegpt --help`." if text else "See `exegpt --help`.", BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return _say("Interrupted.", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        sys.stdout = None
        return 0
    finally:
        gc.freeze()  # leaving would walk through everything once more: a tenth of a second after a search
        gc.enable()  # `tune` does without


def _say(text: str, code: int) -> int:
    print(f"exegpt: {text}", file=sys.stderr)
    return code
