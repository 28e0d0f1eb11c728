"""What is installed: kernels that transformers never takes for its own, and a command line that starts at once."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "scipy", "numba", "pydantic", "transformers", "plotly", "optuna", "pyarrow", "pandas")

LOADS_BOTH = """
import importlib.util
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=1, vocab_size=8)
LlamaForCausalLM(LlamaConfig(**sizes))
import exegpt.kernels.linear
from exegpt.kernels.linear import PackedLinear
found = importlib.util.find_spec("kernels")
assert found is None or found.loader is None or found.origin is None, found  # never a regular package
print(exegpt.__file__)
"""


def python(code, cwd, path=None):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built(tmp_path_factory.mktemp("wheel"))


def built(folder):
    """The wheel, unpacked; built by the backend itself, so that no network is needed."""
    source = folder / "source"
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(folder)!r}))"
    name = python(build, source).splitlines()[-1]
    with zipfile.ZipFile(folder / name) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_every_package_and_no_top_level_kernels(wheel):
    tops = {path.name for path in wheel.iterdir() if path.is_dir() and not path.name.endswith(".dist-info")}
    assert tops == set("exegpt xcore xmulti xprofiler xrunner xscheduler xserver xsimulator".split())
    for top in tops - {"exegpt"}:
        ours = {p.relative_to(ROOT) for p in (ROOT / top).rglob("*.py")}
        assert ours == {p.relative_to(wheel) for p in (wheel / top).rglob("*.py")}
    kernels = {p.name for p in (ROOT / "kernels").glob("*.py")}
    assert kernels <= {p.name for p in (wheel / "exegpt" / "kernels").glob("*.py")}
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.slow
def test_transformers_and_our_kernels_load_together_from_a_wheel(wheel, tmp_path):
    assert python(LOADS_BOTH, tmp_path, wheel).startswith(str(wheel))


@pytest.mark.slow
def test_transformers_and_our_kernels_load_together_from_the_root():
    assert python(LOADS_BOTH, ROOT, ROOT).startswith(str(ROOT))


SEARCHES = """
import json, sys
import xcore
from xcore import compiled_parts, interpolation
from exegpt.cli import main
question = "tune -m opt-13b --cluster 4xA40 -w 512/64 --latency-bound 10s --json --no-advice --policy rra,orca".split()
assert main(question) == 0
print(interpolation.__file__, compiled_parts.all_there(), file=sys.stderr)
"""


@pytest.mark.slow
def test_without_a_compiler_it_installs_and_answers_alike(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "/bin/false")
    plain = built(tmp_path / "plain")
    assert not [path for path in plain.rglob("*") if path.suffix in (".so", ".pyd")]
    answers = []
    for site, is_there in ((wheel, True), (plain, False)):
        env = os.environ | {"PYTHONPATH": str(site)}
        command = [sys.executable, "-c", SEARCHES]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr
        *_, last = done.stderr.splitlines()
        assert last.startswith(str(site)) and last.endswith(str(is_there))
        assert ("without a C compiler" in done.stderr) is not is_there
        answer = json.loads(done.stdout)
        answers.append((answer["schedule"], answer["estimate"]))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("arguments", [["--help"], ["tune", "--help"], ["demo", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments):
    code = (
        f"import sys; from exegpt.cli import main\nassert main({arguments}) == 0\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    loaded = python(code, ROOT).splitlines()[-1]
    assert loaded == "[]" or (
        arguments != ["--help"] and loaded == "['pydantic']"
    )  # typer's own, for a command's types


def test_a_search_starts_without_what_is_slow_to_start():
    question = "tune --model opt-13b --cluster 4xA40 --workload 512/64 --latency-bound 10s --json --no-advice".split()
    code = (
        f"import sys; from exegpt.cli import main\nassert main({question}) == 0\n"
        "print([name for name in ('torch', 'numba', 'scipy', 'pandas', 'plotly') if name in sys.modules])"
    )
    assert python(code, ROOT).splitlines()[-1] == "[]"


def test_every_command_shows_an_example():
    commands = ["demo", "tune", "run", "bench", "simulate", "profile", "show", "list", "model create"]
    calls = "".join(f"\nmain({[*command.split(), '--help']})" for command in commands)
    helps = python(f"from exegpt.cli import main{calls}", ROOT).split("Usage: ")[1:]
    assert [text.split(" [")[0] for text in helps] == [f"exegpt {command}" for command in commands]
    assert all("Example: exegpt" in text for text in helps)


LOADS_OPENMP = """
import ctypes, importlib.util, pathlib
torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
libraries = [*torch.glob("lib/libgomp*"), *torch.glob("../torch.libs/libgomp*")]
for library in libraries:
    ctypes.CDLL(str(library))
if not libraries:
    import torch
"""
"""torch's OpenMP alone, which tells what it has been set to as it is loaded."""


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP is Linux's")
@pytest.mark.parametrize(
    ("given_env", "spins"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
)
@pytest.mark.parametrize("package", ["xcore", "xrunner", "xprofiler", "xmulti", "exegpt.cli"])
def test_threads_that_wait_give_up_soon(given_env, spins, package):
    """Where another process has one of their cores; what the user has set stays as it is."""
    env = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    loads = "import torch" if package == "exegpt.cli" else LOADS_OPENMP
    command = [sys.executable, "-c", f"import {package}\n{loads}"]
    done = subprocess.run(command, env=env | given_env | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True)
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this build of torch has another OpenMP than GNU's")
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr
