"""Plug-in files: Python files whose traits are registered, in this process and in those that it starts."""

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from xcore.errors import InputError
from xcore.policies.registry import TRAITS, error_text, register
from xcore.policies.traits import Traits

PLUGINS = "EXEGPT_PLUGINS"
"""The environment variable with the files that a process has loaded; the processes that it starts load them too."""


def load(files: Iterable[str | Path]) -> None:
    """Register the policies of plug-in files, each file once.

    Raises InputError for a file that can't be run, or defines no policy.
    """
    for file in files:
        path = Path(file).resolve()
        name = _module_name(path)
        if name not in sys.modules:
            _register(path, name)
        inherited = os.environ.get(PLUGINS, "").split(os.pathsep)
        if str(path) not in inherited:
            os.environ[PLUGINS] = os.pathsep.join([*filter(None, inherited), str(path)])


def load_inherited() -> None:
    """Register the policies of the plug-in files that the parent process has loaded."""
    load(filter(None, os.environ.get(PLUGINS, "").split(os.pathsep)))


def _module_name(path: Path) -> str:
    """Return the module name of a file, equal in every process, so that results can be unpickled."""
    return f"exegpt_plugin_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"


def _register(path: Path, name: str) -> None:
    if not path.is_file():
        raise InputError(f"There is no plug-in file '{path}'.")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"The plug-in '{path}' is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        policies = [value for value in vars(module).values() if isinstance(value, Traits)]
        if all(_is_registered(traits) for traits in policies) and not _registered_by(policies, name):
            raise InputError(f"The plug-in '{path}' defines no policy: define a Traits at its top level.")
        for traits in policies:
            if not _is_registered(traits):
                register(traits)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, InputError):
            raise InputError(str(error) if str(path) in str(error) else f"The plug-in '{path}': {error}") from None
        if isinstance(error, Exception | SystemExit):  # whatever the file's code raises
            raise InputError(f"The plug-in '{path}' can't be loaded ({error_text(error)}): correct it.") from error
        raise


def _is_registered(traits: Traits) -> bool:
    return traits.name in TRAITS and TRAITS[traits.name] is traits


def _registered_by(policies: Iterable[Traits], module: str) -> bool:
    """Return whether the file has registered a policy itself."""
    return any(traits.control.__module__ == module for traits in policies)
