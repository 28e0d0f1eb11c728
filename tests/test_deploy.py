"""The deployment files: they parse, and the exegpt commands in them take the flags that they are given."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

DEPLOY = Path(__file__).parent.parent / "deploy"
PROFILING = [DEPLOY / "kubernetes-mpijob.yaml", DEPLOY / "slurm-profile.sh"]
SERVING = [
    DEPLOY / name
    for name in (
        "Containerfile",
        "exegpt-serve.service",
        "kubernetes-serve.yaml",
        "slurm-serve.sh",
        "kubernetes-deployment.yaml",
        "compose.yaml",
    )
]
DEPLOYMENT, COMPOSE = SERVING[4:]
LAUNCHER = DEPLOY / "exegpt-launch.service"
DASHBOARD = DEPLOY / "grafana-dashboard.json"
SERVICE_MONITOR = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "ServiceMonitor"},
        "spec": {
            "type": "object",
            "required": ["selector", "endpoints"],
            "additionalProperties": False,
            "properties": {
                "selector": {"type": "object", "required": ["matchLabels"]},
                "endpoints": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "port": {"type": "string"},
                            "path": {"type": "string", "pattern": "^/"},
                            "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
                            "authorization": {
                                "type": "object",
                                "additionalProperties": False,
                                "properties": {
                                    "type": {"type": "string"},
                                    "credentials": {
                                        "type": "object",
                                        "required": ["key"],
                                        "additionalProperties": False,
                                        "properties": {"name": {"type": "string"}, "key": {"type": "string"}},
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}
"""The fields that are used here, as the API reference of the Prometheus operator describes them."""


def test_every_file_is_checked():
    assert {path for path in DEPLOY.iterdir() if path.is_file()} == {*PROFILING, *SERVING, LAUNCHER, DASHBOARD}


def commands(text):
    """The exegpt command lines in a shell script, however they are started."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [line for line in joined.splitlines() if not line.lstrip().startswith("#")]
    return [shlex.split(match[1]) for line in lines if (match := re.search(r"(?:^|\s)exegpt (.*)", line))]


def script(path):
    """The shell script in a deployment file."""
    if path.suffix == ".sh":
        return path.read_text()
    launcher = next(yaml.safe_load_all(path.read_text()))["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    return launcher["containers"][0]["args"][0]


@pytest.mark.parametrize("path", PROFILING, ids=lambda path: path.name)
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
    assert [str(variables["profile"]["out"])] == variables["tune"]["profile"]  # what one writes the other reads
    assert str(variables["profile"]["cluster_out"]) == variables["tune"]["cluster"]
    assert variables["profile"]["model"] == variables["tune"]["model"]


@pytest.mark.parametrize("path", [PROFILING[0], SERVING[2]], ids=lambda path: path.name)
def test_the_job_starts_a_rank_for_every_slot_and_a_thread_for_every_core(path):
    job = next(yaml.safe_load_all(path.read_text()))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    slots, replicas = job["spec"]["slotsPerWorker"], job["spec"]["mpiReplicaSpecs"]
    started = re.search(r"mpirun .*?-n (\d+)", re.sub(r"\\\n", " ", script(path)))
    assert int(started[1]) == slots * replicas["Worker"]["replicas"]
    launcher, worker = (replicas[name]["template"]["spec"]["containers"][0] for name in ("Launcher", "Worker"))
    threads = next(int(v["value"]) for v in launcher["env"] if v["name"] == "OMP_NUM_THREADS")
    assert threads * slots == int(worker["resources"]["limits"]["cpu"])


def container(document):
    """The one container of a Deployment."""
    (made,) = document["spec"]["template"]["spec"]["containers"]
    return made


def served(path):
    """The arguments of `exegpt serve` in a deployment file."""
    text = path.read_text()
    if path.name == "Containerfile":
        return json.loads(re.search(r"^CMD (.*)$", text, re.MULTILINE)[1])
    if path.suffix == ".service":
        joined = re.sub(r"\\\n\s*", " ", text)
        return shlex.split(re.search(r"^ExecStart=\S+/exegpt (.*)$", joined, re.MULTILINE)[1])
    if path in (DEPLOYMENT, COMPOSE):
        (document, *_) = yaml.safe_load_all(text)
        return document["services"]["exegpt"]["command"] if path == COMPOSE else container(document)["args"]
    (arguments,) = commands(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", script(path)))  # ${PORT:-8000} by default is 8000
    return arguments


@pytest.mark.parametrize("path", SERVING, ids=lambda path: path.name)
def test_exegpt_takes_the_servers_commands(path):
    from exegpt.cli.app import app

    name, *arguments = served(path)
    typed = get_command(app).commands[name].make_context(name, arguments).params  # refuses unknown flags
    assert name == "serve" and typed["model"] and typed["host"] == "0.0.0.0" and typed["api_key_file"]
    assert typed["latency_bound"] in ("10s", "$bound")
    if path.name in ("slurm-serve.sh", "kubernetes-serve.yaml"):
        subprocess.run(["bash", "-n"], input=script(path), text=True, check=True)


def test_exegpt_takes_the_launchers_command():
    from exegpt.cli.app import app

    name, *arguments = served(LAUNCHER)
    typed = get_command(app).commands[name].make_context(name, arguments).params
    assert name == "launch" and typed["listen"] == "10.0.0.2:8100" and typed["token_file"] and typed["model"]


def test_a_drain_ends_before_its_server_is_killed():
    unit = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / "exegpt-serve.service").read_text(), re.MULTILINE))
    assert unit["KillMode"] == "mixed" and int(unit["TimeoutStopSec"]) > 120  # --drain-timeout 2m
    job, service = yaml.safe_load_all((DEPLOY / "kubernetes-serve.yaml").read_text())
    replicas = job["spec"]["mpiReplicaSpecs"]
    for replica in replicas.values():
        assert replica["template"]["spec"]["terminationGracePeriodSeconds"] > 90  # --drain-timeout 90s
    (worker,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert "/ready" in worker["readinessProbe"]["exec"]["command"][-1]
    assert "/health" in worker["livenessProbe"]["exec"]["command"][-1]
    assert service["spec"]["selector"]["training.kubeflow.org/job-name"] == job["metadata"]["name"]
    assert service["spec"]["ports"][0]["targetPort"] == worker["ports"][0]["name"]


@pytest.fixture(scope="module")
def exported():
    """The metrics that a server has once its engine is there, by name, with their labels."""
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    from tests.xcore import small_specs
    from xserver.telemetry.metrics import Metrics

    metrics = Metrics("tiny", dict, lambda: (0, 0), lambda: 0.0)
    metrics.opened(small_specs.schedule(latency_bound_s=10.0), {})
    families = text_string_to_metric_families(metrics.render("")[0].decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_the_dashboard_names_metrics_that_there_are(exported):
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = set()
    for expression in expressions:
        for name, labels in re.findall(r"(exegpt_\w+)\{([^}]*)\}", expression):
            asked = set(re.findall(r"(\w+)=", labels)) - {"instance", "model_name"}
            assert name in exported and asked <= exported[name], expression
            named.add(name)
    assert len(named) >= 18
    assert all(panel["title"] and panel["fieldConfig"]["defaults"]["unit"] for panel in dashboard["panels"])
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert set(variables) == {"source", "instance", "model_name", "bound"}
    assert variables["bound"]["query"] == "10"  # the bound of these files
    used = " ".join(expressions)
    assert set(re.findall(r"\$(\w+)", used)) == {"instance", "model_name", "bound", "__rate_interval"}
    assert used.count("$model_name") == used.count("$instance")


def test_kubernetes_takes_the_deployment():
    validate = pytest.importorskip("kubernetes_validate")
    jsonschema = pytest.importorskip("jsonschema")
    documents = list(yaml.safe_load_all(DEPLOYMENT.read_text()))
    for document in documents:
        if document["kind"] == "ServiceMonitor":
            jsonschema.validate(document, SERVICE_MONITOR)
        else:
            validate.validate(document, validate.latest_version(), strict=True)
    deployment, service, monitor, scaler = documents
    labels, server = deployment["spec"]["template"]["metadata"]["labels"], container(deployment)
    assert service["spec"]["selector"] == labels == deployment["spec"]["selector"]["matchLabels"]
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert service["spec"]["ports"][0]["targetPort"] == server["ports"][0]["name"]
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert {probe["httpGet"]["path"] for name, probe in server.items() if name.endswith("Probe")} == {
        "/health",
        "/ready",
    }
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 120  # --drain-timeout 2m


def test_the_autoscaler_counts_a_metric_that_there_is(exported):
    *_, scaler = yaml.safe_load_all(DEPLOYMENT.read_text())
    assert scaler["spec"]["metrics"][0]["pods"]["metric"]["name"] in exported


def test_compose_takes_its_file():
    document = yaml.safe_load(COMPOSE.read_text())
    service = document["services"]["exegpt"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert int(service["stop_grace_period"].removesuffix("s")) > 120  # --drain-timeout 2m
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")
    checked = subprocess.run(["docker-compose", "-f", COMPOSE, "config", "-q"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(("name", "status"), [("exegpt-serve", "2 3"), ("exegpt-launch", "2")])
def test_systemd_takes_the_unit(tmp_path, name, status):
    text = (DEPLOY / f"{name}.service").read_text()
    assert f"RestartPreventExitStatus={status}\n" in text  # a bad input and no schedule stay what they are
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / f"{name}.service"
    unit.write_text(text.replace("/opt/exegpt/.venv/bin/exegpt", "/bin/true"))  # it looks for the program
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert checked.returncode == 0 and name not in checked.stderr, checked.stderr
