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


def only_ranker(rankers: list[str] | None) -> Path | None:
    """Return the single ranker of a model; InputError for several."""
    if rankers and len(rankers) > 1:
        raise InputError(
            f"One model has one ranker, but --ranker names {' and '.join(map(repr, rankers))}: pass one file."
        )
    return Path(rankers[0]) if rankers else None


def profile_files(profiles: list[str] | None) -> list[str]:
    """Return the files that `--profile` names, of one model or of several."""
    return [part.partition("=")[2] or part for text in profiles or () for part in (text, *text.split(","))]


def directories(models: list[str] | None) -> dict[str, str]:
    """Return directories by name, from `--model NAME=DIR` with --plan."""
    return _by_model("--model", "DIR", models)


def node_directories(models: list[str] | None) -> dict[str, str]:
    """Return a node's directories by name, from `--model NAME=DIR` of a launcher."""
    return _by_model("--model", "DIR", models, "names no model: pass")


def plan_rankers(rankers: list[str] | None) -> dict[str, Path]:
    """Return the rankers' files by model, from `--ranker NAME=FILE` with --plan."""
    return {name: Path(path) for name, path in _by_model("--ranker", "FILE", rankers).items()}


def _by_model(
    option: str, what: str, values: list[str] | None, wrong: str = "names no model of the plan: with --plan, pass"
) -> dict[str, str]:
    paths: dict[str, str] = {}
    for text in values or ():
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise InputError(f"{option} {text} {wrong} {option} NAME={what}.")
        if paths.setdefault(name, path) != path:
            raise InputError(f"{option} has '{paths[name]}' and '{path}' for model '{name}': leave one of them out.")
    return paths


def load_plugins(files: list[Path] | None) -> list[Path] | None:
    """Register the policies of plug-in files before the command begins."""
    if files:
        from xcore.policies import plugins

        plugins.load(files)
    return files
