"""XProfiler: compiles measured layers or the roofline into a Profile (paper section 3)."""

import xcore  # noqa: F401 - sets how threads wait, before torch is loaded
