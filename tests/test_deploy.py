"""The deployment files: they parse, and the exegpt commands in them take the flags that they are given."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

DEPLOY = Path(__file__).parent.parent / "deploy"
FILES = sorted(path for path in DEPLOY.iterdir() if path.is_file())


def commands(text):
    """The exegpt command lines in a shell script, however they are started."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [line for line in joined.splitlines() if not line.lstrip().startswith("#")]
    return [shlex.split(match[1]) for line in lines if (match := re.search(r"(?:^|\s)exegpt (.*)", line))]


def script(path):
    """The shell script in a deployment file."""
    if path.suffix == ".sh":
        return path.read_text()
    launcher = yaml.safe_load(path.read_text())["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    return launcher["containers"][0]["args"][0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_shell_parses_the_script_and_exegpt_its_commands(path):
    subprocess.run(["bash", "-n"], input=script(path), text=True, check=True)
    lines = commands(script(path))
    assert [arguments[0] for arguments in lines] == ["profile", "tune"]
    from exegpt.cli.app import app

    group = get_command(app)
    variables = {}
    for name, *arguments in lines:
        command = group.commands[name]
        variables[name] = command.make_context(name, arguments).params  # refuses unknown flags and bad values
    assert variables["profile"]["out"] == Path(variables["tune"]["profile"])  # what one writes the other reads
    assert str(variables["profile"]["cluster_out"]) == variables["tune"]["cluster"]
    assert variables["profile"]["model"] == variables["tune"]["model"]


def test_the_job_starts_a_rank_for_every_slot_and_a_thread_for_every_core():
    job = yaml.safe_load((DEPLOY / "kubernetes-mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    slots, replicas = job["spec"]["slotsPerWorker"], job["spec"]["mpiReplicaSpecs"]
    started = re.search(r"mpirun .*?-n (\d+)", re.sub(r"\\\n", " ", script(DEPLOY / "kubernetes-mpijob.yaml")))
    assert int(started[1]) == slots * replicas["Worker"]["replicas"]
    launcher, worker = (replicas[name]["template"]["spec"]["containers"][0] for name in ("Launcher", "Worker"))
    threads = next(int(v["value"]) for v in launcher["env"] if v["name"] == "OMP_NUM_THREADS")
    assert threads * slots == int(worker["resources"]["limits"]["cpu"])
