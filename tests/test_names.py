"""One concept, one file, one name: no two files of the product share a basename, and no two public classes a name."""

import ast
from collections import defaultdict
from pathlib import Path

from docs.files import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
BY_DESIGN = {
    "a policy's files": ("xcore/policies", "xscheduler/spaces", "xsimulator/steady"),
    "a command, its options and its work": ("exegpt/cli", "exegpt/options", "exegpt/api"),
}
"""Folders whose files share names because they are about the same policy or the same command."""
COMMANDS = {
    "engine.py": "the engine, and the command that runs one for a server",
    "model.py": "a model, and the command that creates one",
    "profile.py": "a profile, and the command that measures one",
    "tune.py": "the search, and its command",
}
"""Files named as a command in exegpt/cli or exegpt/options, and what their namesakes elsewhere are."""


def sources() -> list[Path]:
    return [path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def group(path: Path) -> str:
    folder = path.parent.as_posix()
    return next((why for why, folders in BY_DESIGN.items() if folder in folders), folder)


def test_no_two_files_share_a_basename_but_by_design():
    groups = defaultdict(set)
    for path in sources():
        commands = path.name in COMMANDS and path.parts[:2] in (("exegpt", "cli"), ("exegpt", "options"))
        if not path.name.startswith("__") and not commands:
            groups[path.name].add(group(path))
    assert {name: sorted(where) for name, where in groups.items() if len(where) > 1} == {}


def test_no_two_public_classes_share_a_name():
    places = defaultdict(list)
    for path in sources():
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.as_posix())
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
