"""The compose file of an exported engine: the replicas of one machine."""

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
from xscheduler.exports.launch_parts import Start


def compose_text(deployed: Deployed) -> str:
    """Return the compose file of one machine: a service for each start of the engine, from port 8000 on.

    Raises InputError for a replica that spans machines.
    """
    group = deployed.start.group
    if group.nodes > 1:
        raise InputError(
            f"--export-as compose: a replica spans {group.nodes} nodes, and a compose file starts containers on one "
            "machine: pass --export-as kubernetes, or leave it out."
        )
    count = min(group.copies, group.on_node)
    names = [deployed.name if count == 1 else f"{deployed.name}-{index}" for index in range(count)]
    document: dict[str, object] = {
        "services": {name: _service(deployed, index) for index, name in enumerate(names)},
        "volumes": {"cache": {}},
    }
    if deployed.start.files:
        document["configs"] = {name: {"content": text} for name, text in deployed.start.files.items()}
    return yaml_text([document], (*deployed.comments, *_machines(deployed.start)))


def _machines(start: Start) -> tuple[str, ...]:
    """Return a sentence that says on which machines the file is used; none for one machine with one service."""
    group = start.group
    if group.on_node == 1:
        return start.notes
    nodes = -(-group.copies // group.on_node)
    if nodes == 1 and group.copies == 1:
        return ()
    where = f"run it on {nodes} nodes, {group.copies} services in all, and " if nodes > 1 else ""
    return (f"{where}put a load balancer before the services, from port {PORT} on",)


def _service(deployed: Deployed, index: int) -> dict[str, object]:
    """Return one start of the engine, with its own GPUs and port."""
    devices = deployed.start.group.devices
    gpus = [str(device) for device in range(index * devices, (index + 1) * devices)]
    reserved = {"driver": "nvidia", "device_ids": gpus, "capabilities": ["gpu"]}
    service: dict[str, object] = {
        "image": IMAGES[deployed.engine],
        "entrypoint": deployed.words(),
        "environment": {**deployed.start.commands[0].environment, "HF_TOKEN": "${HF_TOKEN:-}"},
        "ports": [f"{PORT + index}:{PORT}"],
        "volumes": [f"cache:{CACHE_FOLDER}", *([f"{folder}:{folder}:ro"] if (folder := deployed.folder) else [])],
        "shm_size": f"{SHARED_MEMORY_GIB}gb",
        "deploy": {"resources": {"reservations": {"devices": [reserved]}}},
        "healthcheck": {
            "test": ["CMD-SHELL", f"curl -sf http://127.0.0.1:{PORT}/health"],
            "interval": "10s",
            "start_period": "1h",
        },
        "restart": "unless-stopped",
    }
    if deployed.start.files:
        names = deployed.start.files
        service["configs"] = [{"source": name, "target": f"{CONFIG_FOLDER}/{name}"} for name in names]
        service["working_dir"] = CONFIG_FOLDER
    return service
