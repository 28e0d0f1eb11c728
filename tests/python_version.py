"""The Python version of a compiled module: the file beside it, which Python loads where it wasn't compiled."""

import importlib.util
import sys
from pathlib import Path


def python_version(name):
    """Return the module that `name` would be without its compiled file."""
    path = Path(__file__).parent.parent / (name.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location(f"{name}_in_python", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
