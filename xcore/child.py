"""`exegpt` as a child process, which finds its modules where its parent does."""

import sys
from collections.abc import Sequence
from pathlib import Path

_MAIN = "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); from exegpt.cli import main; sys.exit(main())"


def child_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line of `exegpt` with these arguments."""
    return [sys.executable, "-c", _MAIN, "\n".join(str(Path(entry).resolve()) for entry in sys.path), *arguments]
