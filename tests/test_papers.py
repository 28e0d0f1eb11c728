"""docs/papers.md: every row has a command or says why there is none, and every command works."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.public_data import DATA
from tests.test_docs import ROOT, unknown

PAGE = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
PAPERS = ("ExeGPT", "SamuLLM", "Hermes", "MuxServe", "Learning to rank", "SeaLLM")
NONE = "–"
FILES = {  # the small files that the commands read
    "models.yaml": """models:
  - {name: chat, model: llama-2-7b, workload: 64/16, rate: 2/s, latency_bound: 20s}
  - {name: code, model: llama-2-7b, workload: 64/16, rate: 2/s, latency_bound: 20s}
""",
    "application.yaml": """nodes:
  - {name: summary, model: llama-2-13b, workload: 512/60, requests: 20, rounds: 2, load: 11s}
  - {name: judge, model: llama-2-7b, workload: 100/20, times: 2}
edges:
  - {source: summary, target: summary}
  - {source: summary, target: judge, kind: final}
""",
    "trace.csv": "input,output,arrival,application,run,unit,deadline_s\n"
    + "".join(f"{20 + n % 7},{4 + n % 5},{n / 50},react,{n // 2},{('think', 'answer')[n % 2]},5\n" for n in range(40)),
}
RUNS = [
    {
        "id": f"{run}-{unit}",
        "application": "react",
        "run": str(run),
        "unit": unit,
        "prompt_ids": [7 + run] * 20,
        "max_tokens": 4 + run % 5,
    }
    for run in range(6)
    for unit in ("think", "answer")
]
LINES = {
    "requests.jsonl": [
        {"id": str(n), "prompt_ids": [5 + n] * (8 + n), "max_tokens": 4 + n, "ignore_eos": True} for n in range(12)
    ],
    "calls-of-runs.jsonl": RUNS,
    "prompts.jsonl": [{"prompt": f"say {n} " * (1 + n % 9), "output_tokens": 5 + n % 40} for n in range(300)],
    "calls.jsonl": [
        {"application": "react", "run": run, "unit": unit, "input_tokens": 50, "output_tokens": 10 + run} | parent
        for run in range(20)
        for unit, parent in (("think", {}), ("answer", {"parent": "think"}))
    ],
}
FIRST = (
    "model create my-model --layers 2 --hidden 64 --heads 4 --vocab 600 --context 256",
    "tune --latency-bound inf --model my-model --cluster local --workload 24/12 --policy orca --profile roofline "
    "--no-advice --out local.json",
)


def rows(page):
    """The cells of every row but the tables' heads."""
    lines = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| in the paper")]
    return [[cell.strip() for cell in line.removesuffix("|").split("|")[1:]] for line in lines]


def fault(part, command, status, reason):
    """What a row lacks; None if nothing."""
    if status not in ("works", "deviates", "missing"):
        return "status"
    if not re.fullmatch("`exegpt .+`", command) and (command, status) != (NONE, "missing"):
        return "command"
    return "reason" if status != "works" and len(reason.split()) < 2 else None


def commands(page):
    """Every command once, in words, in the order of the page."""
    cells = dict.fromkeys(row[1].strip("`") for row in rows(page) if row[1] != NONE)
    return [shlex.split(command) for command in cells]


OF_PAPERS = [words for words in commands(PAGE) if words[1] == "reproduce"]
OTHERS = [words for words in commands(PAGE) if words[1] not in ("reproduce", "serve")]  # a server doesn't end


def test_every_row_has_a_command_and_whatever_is_not_as_in_the_paper_a_reason():
    assert [(row[0], lacks) for row in rows(PAGE) if (lacks := fault(*row))] == []
    assert tuple(re.findall("^## (.+)$", PAGE, re.MULTILINE)) == PAPERS


@pytest.mark.parametrize(
    ("row", "lacks"),
    [
        ("| Table 4 | – | missing | Not measured |", None),
        ("| Table 4 | `exegpt list tasks` | works | |", None),
        ("| Table 4 | – | works | |", "command"),
        ("| Table 4 | – | deviates | It is slow |", "command"),
        ("| Table 4 | `exegpt list tasks` | deviates | |", "reason"),
        ("| Table 4 | – | missing | |", "reason"),
        ("| Table 4 | `exegpt list tasks` | done | |", "status"),
    ],
)
def test_a_row_without_a_command_or_a_reason_is_found(row, lacks):
    (cells,) = rows(row)
    assert fault(*cells) == lacks


def test_every_command_is_one_that_there_is():
    assert len(OTHERS) > 20 and [(words, wrong) for words in commands(PAGE) if (wrong := unknown(words))] == []
    assert unknown(["exegpt", "reproduce", "table6", "--fast"]) == ["--fast"]


def run(words, folder):
    """Run a command in a folder; its error if it fails."""
    environment = os.environ | {"EXEGPT_DATA": str(DATA), "EXEGPT_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "exegpt", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    return done.stderr[-1000:] if done.returncode else None


@pytest.mark.slow
@pytest.mark.timeout(2400)  # six minutes on two quiet cores: each run measures a few points
def test_every_command_but_reproductions_runs(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    for name, lines in LINES.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
    asked = [*map(shlex.split, FIRST), *(words[1:] for words in OTHERS)]
    assert {shlex.join(words): wrong for words in asked if (wrong := run(words, tmp_path))} == {}


@pytest.mark.slow
@pytest.mark.timeout(1200)  # half a minute to two minutes on two quiet cores
@pytest.mark.parametrize("words", OF_PAPERS, ids=lambda words: "-".join(words[2:]))
def test_every_reproduction_runs(words, tmp_path):
    if words[2] in ("muxserve", "samullm", "hermes") and not (DATA / words[2]).is_dir():
        pytest.skip(f"public data are not here: {DATA / words[2]}")
    assert run(words[1:], tmp_path) is None
