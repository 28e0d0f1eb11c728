"""`exegpt`, with a drift that is noticed soon, and the schedule that a search finds then: NEXT=FILE."""

import os
import sys
from pathlib import Path

from exegpt.app import reschedule
from exegpt.app.files import read_schedule
from exegpt.cli import main
from xrunner.core import drift

if __name__ == "__main__":
    drift.WINDOW = 12
    schedule = read_schedule(Path(os.environ["NEXT"]))
    reschedule.rescheduler = lambda setting: lambda *_: schedule
    sys.exit(main())
