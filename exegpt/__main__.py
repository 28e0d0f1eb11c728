"""`python -m exegpt` is the command `exegpt`."""

import sys

from exegpt.cli import main

sys.exit(main())
