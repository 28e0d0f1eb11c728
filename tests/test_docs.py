"""What the documents name is there: files, links, benchmarks, and every option of every command that they show."""

import functools
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from exegpt.cli.app import app
from tests.xcore import small_specs
from xcore.document import write
from xcore.specs.cluster import parse_cluster
from xcore.specs.schedule import Stage

ROOT = Path(__file__).parent.parent
README, GUIDE = ROOT / "README.md", ROOT / "docs/guide.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = (
    "exegpt",
    "kernels",
    "xcore",
    "xmulti",
    "xprofiler",
    "xrunner",
    "xscheduler",
    "xserver",
    "xsimulator",
    "tests",
    "benchmarks",
    "deploy",
    "docs",
    "examples",
)
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]*)`")
BARE = re.compile(r"`(\w+\.(?:py|c|h|pyi|svg))`")
"""A file that a document names without its folder."""
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
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
    bare = [name for name in BARE.findall(text) if "NAME" not in name]
    gone += [name for name in bare if not any(any((ROOT / top).rglob(name)) for top in FOLDERS)]
    assert not gone


def anchors(document: Path) -> set[str]:
    """The headings of a document as GitHub links to them."""
    titles = (re.sub(r"[^\w -]", "", title.lower()) for title in HEADING.findall(document.read_text(encoding="utf-8")))
    return {title.replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_headings_that_are_linked_to_exist(document):
    links = ANCHOR.findall(document.read_text(encoding="utf-8"))
    assert [link for link in links if link[1] not in anchors(document.parent / link[0] if link[0] else document)] == []


def shown(document: Path) -> list[list[str]]:
    """The commands in a document, in words; `…` and what a shell does with their output left out."""
    missing = []
    for text in COMMAND.findall(document.read_text(encoding="utf-8")):
        words = shlex.split(text.replace("\\\n", " ").replace("'", ""), comments=True)
        missing.append([word for word in words if word != "…"])
    return missing


@functools.cache
def application() -> typer.core.TyperGroup:
    """All commands."""
    return typer.main.get_command(app)


def unknown(words: list[str]) -> list[str]:
    """The options that the command hasn't."""
    command, rest = application(), words[1:]
    while rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return [word for word in rest if re.match(r"--?[a-z]", word) and word not in known]


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_commands_have_the_options_that_are_shown(document):
    assert [(words, wrong) for words in shown(document) if (wrong := unknown(words))] == []


def test_commands_are_found():
    """The pattern finds them, long ones too; the guide shows every command but the demo, the README three."""
    guide = {words[1] for words in shown(GUIDE)}
    assert guide >= {"tune", "simulate", "profile", "run", "bench", "show", "model", "list", "reproduce"}
    assert [words[1] for words in shown(README) if "--model" in words] == ["tune", "simulate", "run", "serve"]
    assert any("--replay" in words and "--max-num-batched-tokens" in words for words in shown(ROOT / "docs/devices.md"))


def test_the_readme_is_short_and_starts_with_what_was_never_measured():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 90
    assert "On GPUs of our own, little was measured:" in "\n".join(lines[:15])


def test_what_every_change_must_pass_is_the_readmes_test_command():
    commands = [line for line in (ROOT / ".ci/run").read_text().splitlines() if re.match(r"make |pytest|python", line)]
    assert commands and all(re.search(rf"^    {command}\b", README.read_text(), re.MULTILINE) for command in commands)


def test_the_guides_program_runs():
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^prefill-first \d+", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("number", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_programs_for_python_run(number, tmp_path):
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(programs) == 3
    how = {"capture_output": True, "text": True, "timeout": 120, "cwd": tmp_path}
    done = subprocess.run([sys.executable, "-c", programs[number]], **how)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_the_costs_of_a_stage_are_found_as_the_architecture_says(tmp_path):
    """Its program, on a schedule of four stages."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    stages = tuple(Stage((rank,), 1, "both", None, (3 * rank, 3 * rank + 3)) for rank in range(4))
    write(tmp_path / "schedule.json", small_specs.schedule("orca", stages=stages, cluster=parse_cluster("4xA40")))
    write(tmp_path / "profile.json", small_specs.profile())
    how = {"capture_output": True, "text": True, "timeout": 60, "cwd": tmp_path}
    done = subprocess.run([sys.executable, "-c", program], **how)
    assert done.returncode == 0, done.stderr
    seconds, layer = map(float, re.search(r"^([\d.e-]+) .*\blayer=\w+\.?\w*\(([\d.e-]+)", done.stdout).groups())
    assert seconds > 3 * layer > 0


def test_every_log_is_in_the_summary_and_every_entry_dated():
    """A row of the summary names a command, and the file that has its entry."""
    summary = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    for log in (ROOT / "docs/log").glob("*.md"):
        assert f"](log/{log.name})" in summary
        titles = re.findall(r"^## (.+)$", log.read_text(encoding="utf-8"), re.MULTILINE)
        assert titles and all(re.search(r"\(20\d\d-\d\d-\d\d\b", title) for title in titles), log
    rows = [line for line in summary.splitlines() if line.startswith("| ")][1:]
    assert rows and all(re.search(r"`(python -m|pytest|exegpt) ", row.split(" | ")[2]) for row in rows)


def test_the_index_of_files_is_what_they_say_of_themselves():
    """`python docs/files.py` writes it."""
    module = runpy.run_path(str(ROOT / "docs/files.py"))
    assert module["index"]() == (ROOT / "docs/files.md").read_text(encoding="utf-8"), "run python docs/files.py"


def test_the_architecture_is_short():
    lines = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 120


def test_the_page_of_keys_is_what_the_servers_tables_say(monkeypatch):
    """A key of OpenAI's API of which no table says anything raises KeyError."""
    pytest.importorskip("fastapi")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import keys

    assert (ROOT / "docs" / "keys.md").read_text(encoding="utf-8") == keys.page()
