"""A policy of one's own, in a file or in an installed package, is searched, replayed, run and served by commands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi import MPIRUN, launcher_environment
from tests.xrunner import cells
from tests.xserver.conftest import serving
from xcore import document
from xcore.child import child_command
from xcore.files import read_schedule
from xcore.policies import TRAITS, plugins
from xcore.processes import Processes
from xcore.specs.model import ModelSpec

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "policy_of_ones_own.py"
LIMITS = ("--max-num-seqs", 8, "--max-num-batched-tokens", 64)
TRACE = "input,output\n12,6\n20,9\n7,12\n30,5\n"


@pytest.fixture(autouse=True)
def unloaded(monkeypatch):
    """Unload the plug-ins of a command in this process when the test ends."""
    monkeypatch.setenv(plugins.PLUGINS, "")
    before = set(TRAITS)
    yield
    for name in set(TRAITS) - before:
        del TRAITS[name]
    for name in [name for name in sys.modules if name.startswith("exegpt_plugin_")]:
        del sys.modules[name]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def plan(model, path, degrees=(1,), **variables):
    """Write a schedule of the example's policy; loads it."""
    plugins.load([EXAMPLE])
    variables = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "gathered": 2, "kv_blocks": 40} | variables
    document.write(path, cells.schedule(ModelSpec.from_directory(model), "gathering", degrees, **variables))
    return path


def test_a_plug_in_is_searched_over_its_grid(exegpt, tiny, tiny_profile, tmp_path):
    where = ("--model", tiny, "--workload", "20/10", "--profile", tiny_profile, "--plugin", EXAMPLE)
    command = ("tune", "-l", "inf", *where, *LIMITS, "--policy", "gathering,chunked", "--out", tmp_path / "s.json")
    done = exegpt(*command, "--json", "--no-advice")
    assert done.code == 0, done.err
    by_policy = {a["policy"]: a for a in done.json["alternatives"]}
    found = by_policy["gathering"]["schedule"]["control"]
    assert (found["max_num_seqs"], found["max_num_batched_tokens"]) == (8, 64) and found["gathered"] in (1, 4, 16)
    assert done.json["search"]["space"] >= 3 + 1
    listed = exegpt("list", "policies", "--json", "--plugin", EXAMPLE)
    row = next(row for row in listed.json["policies"] if row["policy"] == "gathering")
    assert row["variables"] == "max_num_seqs, max_num_batched_tokens, gathered"


def test_a_plug_in_is_not_searched_at_a_rate(exegpt):
    """Before any search, and with a way to its performance at a rate."""
    where = ("-m", "opt-1.3b", "-c", "1xA40", "-w", "T", "--plugin", EXAMPLE, "--policy", "gathering,chunked")
    done = exegpt("tune", "-l", "inf", *where, "--rate", "2/s")
    assert done.code == 2 and not done.out and done.err.count("\n") == 1
    assert "'gathering' has none: leave it out of --policy" in done.err


@pytest.mark.parametrize("command", [("plan", "gone.yaml", "-c", "1xA40"), ("profile", "-m", "nothing")])
def test_plans_and_profiles_take_a_plug_in(exegpt, command):
    done = exegpt(*command, "--plugin", EXAMPLE)
    assert done.code == 2 and "gathering" in TRAITS
    assert "--plugin" not in done.err


def test_a_plug_in_is_replayed_at_a_rate(exegpt, tiny, tiny_profile, tmp_path):
    schedule = plan(tiny, tmp_path / "s.json")
    with_plugin = ("--plugin", EXAMPLE, "--schedule", schedule, "--profile", tiny_profile)
    done = exegpt("simulate", *with_plugin, "--rate", "50/s", "--json")
    assert done.code == 0 and done.json["requests"] == 20_000, done.err


def test_a_plug_in_is_replayed_and_run(exegpt, tiny, tiny_profile, trace, tmp_path):
    schedule = plan(tiny, tmp_path / "s.json")
    with_plugin = ("--plugin", EXAMPLE, "--schedule", schedule, "--profile", tiny_profile)
    replayed = exegpt("simulate", *with_plugin, "--replay", trace, "--json")
    assert replayed.code == 0, replayed.err
    assert replayed.json["requests"] == 4 and replayed.json["ttft"]["p99"] > 0
    out = tmp_path / "out.jsonl"
    ran = exegpt("run", *with_plugin, "--model", tiny, "--requests", trace, "--out", out, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["requests"] == 4 and ran.json["schedule"]["control"]["gathered"] == 2
    assert [len(json.loads(line)["output_ids"]) for line in out.read_text().splitlines()].count(12) == 1
    shown = exegpt("show", schedule, "--plugin", EXAMPLE)
    assert "gathering max_num_seqs=3 max_num_batched_tokens=16 gathered=2 on TP1" in shown.out


def test_without_its_file_a_policy_is_refused_with_the_way_out(exegpt, tiny, tmp_path):
    data = json.loads(plan(tiny, tmp_path / "s.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps(data | {"policy": "gatherers"}))
    done = exegpt("simulate", "--schedule", tmp_path / "other.json")
    assert done.code == 2 and done.err.count("\n") == 1
    assert "There is no policy 'gatherers': use one of static, " in done.err and "with --plugin" in done.err


TRAITS_OF = "from xcore.policies import Traits\nfrom xcore.policies.control import Control\nTRAITS = Traits(name="
BAD = {
    "syntax": ("def (:", "can't be loaded (SyntaxError: "),
    "raises": ("1 / 0", "can't be loaded (ZeroDivisionError: division by zero): correct it."),
    "import": ("import nothing_of_this_name", "can't be loaded (ModuleNotFoundError: No module named"),
    "exits": ("raise SystemExit(3)", "can't be loaded (SystemExit: 3): correct it."),
    "empty": ("x = 1", "defines no policy: define a Traits at its top level."),
    "built-in": ("from xcore.policies.orca import TRAITS", "defines no policy"),
    "taken": (f"{TRAITS_OF}'orca', what='', control=Control)", "There is already a policy 'orca'"),
    "name": (f"{TRAITS_OF}'My, policy', what='', control=Control)", "can't have the name 'My, policy'"),
    "record's name": (
        "from xcore.policies.orca import OrcaControl as Base\nfrom xcore.policies import Traits\n"
        "class OrcaControl(Base): pass\nTRAITS = Traits(name='mine', what='', control=OrcaControl)",
        "is called OrcaControl, like the record of policy 'orca': choose another name.",
    ),
    "record": (f"{TRAITS_OF}'mine', what='', control=dict)", "of policy 'mine' is not a class derived from Control."),
    "no batch": (f"{TRAITS_OF}'mine', what='', control=Control)", "limits neither resident sequences nor prompts"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_a_sentence(exegpt, tmp_path, case):
    text, words = BAD[case]
    path = tmp_path / "mine.py"
    path.write_text(text)
    before = dict(TRAITS)
    done = exegpt("list", "policies", "--plugin", path)
    assert done.code == 2 and done.err.count("\n") == 1 and not done.out
    assert str(path) in done.err and words in done.err and dict(TRAITS) == before


@pytest.mark.parametrize(
    ("name", "words"), [("no.py", "There is no plug-in file"), ("mine.txt", "is not a Python file")]
)
def test_a_file_that_is_none_is_refused(exegpt, tmp_path, name, words):
    (tmp_path / "mine.txt").write_text("")
    done = exegpt("list", "policies", "--plugin", tmp_path / name)
    assert done.code == 2 and done.err.count("\n") == 1 and words in done.err and name in done.err


def test_processes_that_a_command_starts_load_the_plug_in(tiny, tmp_path):
    """Processes of a pool, of a search, and `exegpt` as a child know the policy."""
    schedule = plan(tiny, tmp_path / "s.json")
    with Processes(worth=2) as processes:
        read = processes.each(read_schedule, [(schedule,)] * 2)
    assert read == [read_schedule(schedule)] * 2
    search = "from xcore.searching import read_problem as r; from xcore.specs.schedule import Schedule as S; "
    search += "print(r(S).control.gathered, flush=True)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen([sys.executable, "-c", search], **pipes) as searching:
        print(json.dumps(json.loads(schedule.read_text())), file=searching.stdin, flush=True)
        assert searching.stdout.readline() == "2\n"
    how = {"capture_output": True, "text": True, "timeout": 60, "cwd": ROOT}
    shown = subprocess.run(child_command(["show", str(schedule), "--json"]), **how)
    assert json.loads(shown.stdout)["schedule"]["control"]["gathered"] == 2, shown.stderr


@pytest.fixture
def package(tmp_path):
    """A folder with an installed package; its entry point names the value."""

    def install(value):
        (tmp_path / "gathering_policy.py").write_text(EXAMPLE.read_text())
        facts = tmp_path / "gathering_policy-1.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: gathering-policy\nVersion: 1.0\n")
        (facts / "entry_points.txt").write_text(f"[exegpt.policies]\ngathering = {value}\n")
        return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    return install


def listed(environment):
    command = [sys.executable, "-m", "exegpt", "list", "policies", "--json"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd=ROOT)


def test_an_installed_packages_policy_is_found_by_its_entry_point(package):
    done = listed(package("gathering_policy:TRAITS"))
    assert [row["policy"] for row in json.loads(done.stdout)["policies"]][-1] == "gathering", done.stderr


def test_an_installed_package_without_a_policy_is_refused_by_name(package):
    done = listed(package("gathering_policy:NOTHING"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "policy 'gathering' of package 'gathering-policy' can't be loaded (AttributeError" in done.stderr


@pytest.mark.slow
def test_a_plug_in_runs_on_two_ranks(exegpt, tiny, trace, tmp_path):
    """The tokens of one rank."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install -e '.[mpi]'")
    if not MPIRUN:
        pytest.skip("there is no mpirun: pip install -e '.[mpi]'")
    what = ("--plugin", EXAMPLE, "--model", tiny, "--requests", trace, "--no-profile")
    one = plan(tiny, tmp_path / "one.json")
    assert exegpt("run", *what, "--schedule", one, "--out", tmp_path / "one.jsonl").code == 0
    two = plan(tiny, tmp_path / "two.json", (1, 1))
    command = [MPIRUN, "-n", "2", sys.executable, "-m", "exegpt", "run", *what, "--schedule", two]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | launcher_environment(tmp_path) | {plugins.PLUGINS: ""}
    done = subprocess.run(
        [*map(str, command), "--out", str(tmp_path / "two.jsonl")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    outputs = [
        {row["id"]: row["output_ids"] for row in map(json.loads, (tmp_path / name).read_text().splitlines())}
        for name in ("one.jsonl", "two.jsonl")
    ]
    assert len(outputs[0]) == 4 and outputs[0] == outputs[1]


@pytest.mark.slow
def test_a_plug_in_is_served(tiny, tmp_path, monkeypatch):
    """The engine is a child of the server."""
    schedule = plan(tiny, tmp_path / "s.json")
    monkeypatch.setenv(plugins.PLUGINS, "")
    with serving(tiny, schedule, tmp_path, "--plugin", str(EXAMPLE)) as server:
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 5, "ignore_eos": True}
        status, _, answer = server.post("/v1/completions", body)
        assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 5
        assert json.loads(server.get("/schedule")[2])["schedule"]["control"]["gathered"] == 2
