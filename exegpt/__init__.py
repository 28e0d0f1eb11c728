"""exegpt: serve large language models at the highest throughput a latency bound allows.

This package contains the commands and the library's functions; their modules are imported on first use.
"""

from importlib import import_module

_OFFERED = {
    "tune": "exegpt.api.library",
    "simulate": "exegpt.api.library",
    "plan": "exegpt.api.library",
    "__version__": "xcore",
    "Workload": "xcore.specs.workload",
}
"""The names of the package and their modules, imported on first use: `import exegpt` stays fast."""


def __getattr__(name: str) -> object:
    if name not in _OFFERED:
        raise AttributeError(f"module 'exegpt' has no attribute '{name}'")
    return getattr(import_module(_OFFERED[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OFFERED})
