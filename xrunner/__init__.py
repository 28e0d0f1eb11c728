"""The engine that enforces a schedule."""

import xcore  # noqa: F401 - sets how threads wait, before torch is loaded
