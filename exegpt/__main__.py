"""Run the command `exegpt` by `python -m exegpt`."""

import sys

from exegpt.cli import main

sys.exit(main())
