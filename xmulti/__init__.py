"""Several models on one cluster: plans, shared devices, stages and applications (docs/multimodel.md)."""

import xcore  # noqa: F401 - sets how threads wait, before torch is loaded
