"""Read the values of options that name models, profiles and plug-ins."""

from pathlib import Path

from xcore.errors import InputError


def only_model(models: list[str] | None, what: str) -> str:
    """Return the single model of a server or a run without a plan."""
    models = models or []
    if len(models) != 1:
        raise InputError(f"A {what} without --plan has one model, but --model is given {len(models)} times: pass one.")
    return models[0]


def only_profile(profiles: list[str] | None) -> str | None:
    """Return the single profile of a model; InputError for several."""
    if profiles and len(profiles) > 1:
        raise InputError(
            f"One model has one profile, but --profile names {' and '.join(map(repr, profiles))}: pass one file."
        )
    return profiles[0] if profiles else None


def profile_files(profiles: list[str] | None) -> list[str]:
    """Return the files that `--profile` names, of one model or of several."""
    return [part.partition("=")[2] or part for text in profiles or () for part in (text, *text.split(","))]


def directories(models: list[str] | None) -> dict[str, str]:
    """Return directories by name, from `--model NAME=DIR` with --plan."""
    paths: dict[str, str] = {}
    for text in models or ():
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise InputError(f"--model {text} names no model of the plan: with --plan, pass --model NAME=DIR.")
        if paths.setdefault(name, path) != path:
            raise InputError(f"--model has '{paths[name]}' and '{path}' for model '{name}': leave one of them out.")
    return paths


def load_plugins(files: list[Path] | None) -> list[Path] | None:
    """Register the policies of plug-in files before the command begins."""
    if files:
        from xcore.policies import plugins

        plugins.load(files)
    return files
