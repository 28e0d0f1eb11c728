"""`exegpt`, with a drift that is noticed soon, and the schedule that a search finds then: NEXT=FILE."""

import os
import sys
from pathlib import Path

from exegpt.cli import main
from xcore.files import read_schedule
from xrunner.core import drift
from xscheduler import reschedule

if __name__ == "__main__":
    drift.WINDOW = 12
    schedule = read_schedule(Path(os.environ["NEXT"]))
    reschedule.rescheduler = lambda setting: lambda *_: schedule
    sys.exit(main())
