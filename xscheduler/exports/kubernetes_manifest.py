"""Kubernetes manifests of an exported engine: a pod for each replica, or a group of pods for one that spans nodes."""

import shlex

from xcore.errors import InputError
from xscheduler.exports.container_parts import (
    CACHE_FOLDER,
    CONFIG_FOLDER,
    IMAGES,
    PORT,
    SHARED_MEMORY_GIB,
    Deployed,
    yaml_text,
)
from xscheduler.exports.launch_parts import NODE0

_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
"""The label with a pod's place in its group; 0 is the leader."""


def kubernetes_text(deployed: Deployed) -> str:
    """Return the manifest: a Deployment or a LeaderWorkerSet, its Service, and a ConfigMap for the engine's files.

    Raises InputError for a start that a manifest can't express.
    """
    labels = {"app": deployed.name}
    documents = [_replicas(deployed, labels), _service(deployed, labels)]
    if deployed.start.files:
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(deployed, labels)}
        documents.append({**config, "data": dict(deployed.start.files)})
    return yaml_text(documents, deployed.comments)


def _metadata(deployed: Deployed, labels: dict[str, str]) -> dict[str, object]:
    return {"name": deployed.name, "labels": labels}


def _replicas(deployed: Deployed, labels: dict[str, str]) -> dict[str, object]:
    """Return the object that keeps as many replicas running as the schedule has."""
    group = deployed.start.group
    if group.nodes == 1:
        spec = {"replicas": group.copies, "selector": {"matchLabels": labels}}
        template = _pod(deployed, labels, deployed.words(), serves=True)
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": _metadata(deployed, labels),
            "spec": {**spec, "template": template},
        }
    if len(deployed.start.commands) != group.nodes:
        raise InputError(
            f"--export-as kubernetes: {deployed.engine} starts a replica over {group.nodes} nodes by mpirun, for which "
            "there is no manifest: leave it out, or export to vllm or sglang."
        )
    workers = {"size": group.nodes, "restartPolicy": "RecreateGroupOnPodRestart"}
    script = ["sh", "-c", _script(deployed)]
    templates = {
        "leaderTemplate": _pod(deployed, labels, script, serves=True),
        "workerTemplate": _pod(deployed, labels, script, serves=False),
    }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": _metadata(deployed, labels),
        "spec": {"replicas": group.copies, "leaderWorkerTemplate": {**workers, **templates}},
    }


def _script(deployed: Deployed) -> str:
    """Return the shell script that runs the command of a pod's place in its group."""
    cases = []
    for rank in range(deployed.start.group.nodes):
        words = (word.replace(NODE0, '"$LWS_LEADER_ADDRESS"') for word in map(_quoted, deployed.words(rank)))
        cases.append(f"{rank}) exec {' '.join(words)} ;;")
    return "\n".join(('case "$LWS_WORKER_INDEX" in', *cases, "esac\n"))


def _quoted(word: str) -> str:
    """Return a word for a shell, with the address of the first node left as a variable."""
    return word if NODE0 in word else shlex.quote(word)


def _pod(deployed: Deployed, labels: dict[str, str], words: list[str], serves: bool) -> dict[str, object]:
    """Return the template of a pod; one that `serves` has a port and probes."""
    volumes: list[dict[str, object]] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{SHARED_MEMORY_GIB}Gi"}},
        {"name": "cache", "emptyDir": {}},
    ]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}, {"name": "cache", "mountPath": CACHE_FOLDER}]
    container: dict[str, object] = {"name": "server", "image": IMAGES[deployed.engine], "command": words}
    if deployed.folder:
        volumes.append({"name": "model", "hostPath": {"path": deployed.folder, "type": "Directory"}})
        mounts.append({"name": "model", "mountPath": deployed.folder})
    if deployed.start.files:
        volumes.append({"name": "config", "configMap": {"name": deployed.name}})
        mounts.append({"name": "config", "mountPath": CONFIG_FOLDER})
        container["workingDir"] = CONFIG_FOLDER
    token = {"secretKeyRef": {"name": "hf-token", "key": "token", "optional": True}}
    variables = [{"name": name, "value": text} for name, text in deployed.start.commands[0].environment.items()]
    container["env"] = [*variables, {"name": "HF_TOKEN", "valueFrom": token}]
    if serves:
        container |= _probes()
    container["resources"] = {"limits": {"nvidia.com/gpu": str(deployed.start.group.devices)}}
    container["volumeMounts"] = mounts
    return {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": volumes}}


def _probes() -> dict[str, object]:
    """Return the port and the probes: a start may load weights for an hour."""
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10}
    return {
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": {**health, "failureThreshold": 360},
        "readinessProbe": {**health, "timeoutSeconds": 5},
        "livenessProbe": {**health, "timeoutSeconds": 5, "failureThreshold": 6},
    }


def _service(deployed: Deployed, labels: dict[str, str]) -> dict[str, object]:
    """Return the Service that spreads requests over the replicas; in a group, only the leader has the server."""
    leader = {_INDEX: "0"} if deployed.start.group.nodes > 1 else {}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(deployed, labels),
        "spec": {
            "selector": labels | leader,
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }
