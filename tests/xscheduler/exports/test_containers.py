"""Kubernetes manifests and compose files of exports: schemas, and the commands, GPUs and ports that they start."""

import subprocess

import pytest
import yaml

import xsimulator
from xcore.errors import InputError
from xscheduler.engine_settings import engine_schedule, resident
from xscheduler.export import Target
from xscheduler.launch_command import read_launch
from xscheduler.settings import find_setting

WORKER_SET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "replicas": {"type": "integer", "minimum": 1},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["workerTemplate", "size"],
                    "properties": {
                        "leaderTemplate": {"type": "object"},
                        "workerTemplate": {"type": "object"},
                        "size": {"type": "integer", "minimum": 2},
                        "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                    },
                },
            },
        },
    },
}
"""The fields that are used here, as the API reference of LeaderWorkerSet describes them."""


def exported(form, engine="vllm", model="llama-3.1-8b", cluster="8xH100-SXM", tp=2, stages=None, replicas=3, **how):
    """The export of a schedule of chunked prefill, without a search."""
    weights = how.pop("weights", None)
    setting = find_setting(model, cluster, "512/512", engine=engine, **how)
    variables = {"max_num_seqs": 64, "max_num_batched_tokens": 1024}
    plan = engine_schedule(setting, "chunked", tp, None, 16, replicas, stages, **variables)
    target = Target(engine, weights, form)
    followed = target.follows(plan, setting.profile)
    return target.export(followed, xsimulator.estimate(resident(followed, setting.profile)[0], setting.profile))


def documents(text):
    return list(yaml.safe_load_all(text))


def checked(objects):
    """The objects, after Kubernetes' own schemas have accepted them; pods of a group as pods."""
    validate, jsonschema = pytest.importorskip("kubernetes_validate"), pytest.importorskip("jsonschema")
    for each in objects:
        if each["kind"] == "LeaderWorkerSet":
            jsonschema.validate(each, WORKER_SET)
            for name in ("leaderTemplate", "workerTemplate"):
                pod = {"apiVersion": "v1", "kind": "Pod", **each["spec"]["leaderWorkerTemplate"][name]}
                validate.validate(pod, validate.latest_version(), strict=True)
        else:
            validate.validate(each, validate.latest_version(), strict=True)
    return objects


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_each_replica_is_a_pod_behind_the_service(engine):
    found = exported("kubernetes", engine)
    deployment, service, *config = checked(documents(found.text))
    name = f"{engine}-llama-3-1-8b"
    assert deployment["metadata"]["name"] == name and deployment["spec"]["replicas"] == 3
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"] == deployment["spec"]["selector"]["matchLabels"]
    (server,) = pod["spec"]["containers"]
    assert server["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert server["command"][-4:] == ["--host", "0.0.0.0", "--port", "8000"]
    assert server["readinessProbe"]["httpGet"] == {"path": "/health", "port": server["ports"][0]["name"]}
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in server["volumeMounts"]
    if engine == "tensorrt-llm":
        assert config[0]["data"] == dict(found.start.files) and server["workingDir"] == "/config"
        assert {"name": "config", "configMap": {"name": config[0]["metadata"]["name"]}} in pod["spec"]["volumes"]
    else:
        launch = read_launch(" ".join(server["command"]))
        assert (launch.settings["tp_degree"], launch.settings["replicas"], launch.engine) == (2, 1, engine)
        assert config == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_replica_over_nodes_is_a_group_of_pods_that_start_their_own_command(engine, tmp_path):
    found = exported("kubernetes", engine, cluster="4x8xH100-SXM", tp=8, stages=2, replicas=2)
    group, service = checked(documents(found.text))
    assert (group["spec"]["replicas"], group["spec"]["leaderWorkerTemplate"]["size"]) == (2, 2)
    assert service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    leader, worker = (group["spec"]["leaderWorkerTemplate"][f"{name}Template"] for name in ("leader", "worker"))
    assert "readinessProbe" in leader["spec"]["containers"][0]
    assert "readinessProbe" not in worker["spec"]["containers"][0]
    program = tmp_path / found.start.commands[0].words[0]
    program.write_text('#!/bin/sh\necho "$0 $@"\n')
    program.chmod(0o755)
    for rank, command in enumerate(found.commands):
        shell = worker["spec"]["containers"][0]["command"]
        variables = {"LWS_WORKER_INDEX": str(rank), "LWS_LEADER_ADDRESS": "first", "PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = subprocess.run(shell, env=variables, capture_output=True, text=True, check=True)
        started = done.stdout.replace(f"{tmp_path}/", "").strip()
        assert started == f"{command.replace('$NODE0', 'first')} --host 0.0.0.0 --port 8000"


def test_layers_of_stages_are_the_containers_variable():
    how = {"model": "Qwen/Qwen3-235B-A22B-FP8", "cluster": "8xH200-SXM", "tp": 2, "stages": 4, "replicas": 1}
    found = exported("kubernetes", "sglang", **how)
    (server,) = checked(documents(found.text))[0]["spec"]["template"]["spec"]["containers"]
    layers = found.start.commands[0].environment["SGLANG_PP_LAYER_PARTITION"]
    assert {"name": "SGLANG_PP_LAYER_PARTITION", "value": layers} in server["env"] and layers.count(",") == 3


@pytest.mark.parametrize(
    ("engine", "gpus", "ports"),
    [
        ("vllm", [["0", "1", "2", "3", "4", "5"]], ["8000:8000"]),
        ("tensorrt-llm", [["0", "1"], ["2", "3"], ["4", "5"]], ["8000:8000", "8001:8000", "8002:8000"]),
    ],
)
def test_a_compose_file_has_the_replicas_of_a_machine(engine, gpus, ports):
    found = exported("compose", engine)
    (document,) = documents(found.text)
    services = list(document["services"].values())
    devices = [each["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for each in services]
    assert devices == gpus and [port for each in services for port in each["ports"]] == ports
    assert services[0]["shm_size"] == "16gb" and services[0]["entrypoint"][-1] == "8000"
    assert ("put a load balancer before the services" in found.text) is (len(ports) > 1)
    if engine == "tensorrt-llm":
        ((name, content),) = found.start.files.items()
        assert document["configs"] == {name: {"content": content}}
        assert services[0]["configs"] == [{"source": name, "target": f"/config/{name}"}]


def test_a_checkpoint_in_a_folder_is_mounted(tmp_path):
    for form in ("kubernetes", "compose"):
        text = exported(form, weights=str(tmp_path)).text
        assert f"- {tmp_path}\n" in text and text.count(str(tmp_path)) >= 3


@pytest.mark.parametrize(
    ("form", "how", "words"),
    [
        ("compose", {"cluster": "2x8xH100-SXM", "tp": 8, "stages": 2, "replicas": 1}, "a replica spans 2 nodes"),
        (
            "kubernetes",
            {"engine": "tensorrt-llm", "cluster": "2x8xH100-SXM", "tp": 8, "stages": 2, "replicas": 1},
            "by mpirun, for which there is no manifest",
        ),
    ],
)
def test_what_cant_be_put_into_containers_is_refused(form, how, words):
    with pytest.raises(InputError, match=words):
        exported(form, **how)


def test_gpus_without_an_image_are_refused_before_a_search():
    setting = find_setting("llama-3.1-8b", "8xMI300X", "512/512", engine="vllm")
    with pytest.raises(InputError, match="NVIDIA's GPUs only, not for MI300X"):
        Target("vllm", form="compose").check(setting, ("chunked",))
    Target("vllm").check(setting, ("chunked",))


def test_the_name_is_one_that_kubernetes_accepts():
    deployed = exported("kubernetes", model="Qwen/Qwen2.5-72B-Instruct-AWQ", replicas=1)
    name = documents(deployed.text)[0]["metadata"]["name"]
    assert name == "vllm-qwen2-5-72b-instruct-awq"
