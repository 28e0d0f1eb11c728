"""`exegpt`, with a drift that is noticed soon, and the schedule that a search finds then: NEXT=FILE."""

import os
import sys
from pathlib import Path

from exegpt.cli import inputs, main, rescheduling
from xrunner.core import drift

if __name__ == "__main__":
    drift.WINDOW = 12
    found = inputs.read_schedule(Path(os.environ["NEXT"]))
    rescheduling.rescheduling = lambda setting: lambda *_: found
    sys.exit(main())
