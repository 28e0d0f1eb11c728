"""What the documents name is there: files, links, benchmarks, and every option of every command that they show."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from exegpt.cli.app import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = (
    "exegpt",
    "kernels",
    "xprofiler",
    "xsimulator",
    "xscheduler",
    "xrunner",
    "tests",
    "benchmarks",
    "deploy",
    "docs",
)
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]*)`")
LINK = re.compile(r"\]\(([^)#:]+)\)")
BENCHMARK = re.compile(r"python -m (benchmarks\.\w+)")
COMMAND = re.compile(r"(?:^|`|\s)(exegpt [a-z][^`\n\\]*(?:\\\n[^`\n\\]*)*)", re.MULTILINE)


def ids(path):
    return path.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_files_and_links_exist(document):
    text = document.read_text(encoding="utf-8")
    links = [document.parent / link for link in LINK.findall(text)]
    modules = [ROOT / name.replace(".", "/") for name in BENCHMARK.findall(text)]
    gone = [link for link in links if not link.exists()]
    gone += [name for name in modules if not name.is_dir() and not name.with_suffix(".py").is_file()]
    gone += [name for name in PATH.findall(text) if "NAME" not in name and not list(ROOT.glob(name.rstrip("/")))]
    assert not gone


def shown(document: Path) -> list[list[str]]:
    """The commands in a document, in words; `…` and what a shell does with their output left out."""
    found = []
    for text in COMMAND.findall(document.read_text(encoding="utf-8")):
        words = shlex.split(text.replace("\\\n", " ").replace("'", ""), comments=True)
        found.append([word for word in words if word != "…"])
    return found


def unknown(words: list[str]) -> list[str]:
    """The options that the command hasn't."""
    command, rest = typer.main.get_command(app), words[1:]
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return [word for word in rest if re.match(r"--?[a-z]", word) and word not in known]


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_commands_have_the_options_that_are_shown(document):
    assert [(words, wrong) for words in shown(document) if (wrong := unknown(words))] == []


def test_the_readmes_commands_are_found():
    """The pattern finds them, long ones too."""
    first = {words[1] for words in shown(ROOT / "README.md")}
    assert {"tune", "simulate", "profile", "run", "bench", "show", "model", "list", "reproduce"} <= first
    assert any("--replay" in words and "--max-num-batched-tokens" in words for words in shown(ROOT / "docs/devices.md"))
