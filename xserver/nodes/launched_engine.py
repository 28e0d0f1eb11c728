"""An engine that a launcher runs for a server: its arguments, which are checked here, its process and its sockets."""

import asyncio
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from xcore import document
from xcore.console.output import NOTES_OF
from xcore.errors import InputError
from xcore.quantity import counted
from xcore.requests.starting import starting_text
from xcore.spec import Spec
from xcore.specs.cluster_plan import Plan
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Schedule
from xcore.usable_cpus import usable_cpus
from xserver.engines.engine_process import EngineProcess
from xserver.engines.unit_options import PROMISES, visible_devices
from xserver.nodes.launch_protocol import EngineEnded, EngineStarting, LaunchedModel, StartEngine

FLAGS = {
    "--device": "cpu|cuda",
    "--attention": "auto|triton|flashinfer",
    "--dtype": "[a-z0-9]{1,16}",
    "--kv-dtype": "[a-z0-9]{1,16}",
    "--threads": "[0-9]{1,4}",
}
"""The arguments of an engine that a server may pass, and what their values look like.

`--pinned` and `PROMISES` have no value.
"""
REFUSED = 2
"""Exit code of an engine that can't run its input, also if the launcher hasn't started it."""
_MOST_DEVICES, _MOST_MODELS, _LONGEST_NAME = 64, 100, 200
_LOOK_S, _FLUSH_S = 0.2, 5.0
"""Seconds between two reports of an engine's work before it opens, and most seconds for its last bytes."""

Connections = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int, int], "asyncio.Future[None]"]
"""Passes on an engine's connection, given the engine's number and the model's place; done when it has ended."""


@dataclass(frozen=True)
class EngineToLaunch:
    """The process of a checked request."""

    arguments: tuple[str, ...]
    documents: Mapping[str, Spec]
    environment: Mapping[str, str]


def engine_to_launch(asked: StartEngine, directories: Mapping[str, Path], folder: Path) -> EngineToLaunch:
    """Return the process of a request, after checking the request.

    Args:
        asked: The request.
        directories: The node's directories of models, by name.
        folder: The folder of the engine's sockets.

    Raises:
        InputError: The request is none of an engine that this node can run.
    """
    _check_sizes(asked)
    flags = _checked_flags(asked.flags)
    if "--threads" not in flags:
        flags += ["--threads", str(max(1, usable_cpus() // max(1, asked.in_use)))]
    if (asked.schedule is None) == (asked.plan is None):
        raise InputError("An engine needs either a schedule or a plan.")
    documents: dict[str, Spec]
    if asked.plan is None:
        schedule = document.from_dict(Schedule, asked.schedule, "The schedule")
        directory, cluster = _directories(asked, directories, [schedule])[0], schedule.cluster
        socket = folder / f"engine-{asked.models[0].place}"
        arguments, documents = ["--model", str(directory), "--socket", str(socket)], {"--schedule": schedule}
    else:
        plan = document.from_dict(Plan, asked.plan, "The plan")
        paths, cluster = _directories(asked, directories, _schedules(asked, plan)), plan.cluster
        by_place = {model.place: str(path) for model, path in zip(asked.models, paths, strict=True)}
        models = [replace(model, directory=by_place.get(place)) for place, model in enumerate(plan.models)]
        arguments = ["--unit", str(asked.unit), "--socket", str(folder)]
        documents = {"--plan": replace(plan, models=tuple(models))}
    names = ", ".join(model.name for model in asked.models)
    gpus = {} if cluster.is_cpu else visible_devices(asked.devices)
    return EngineToLaunch((*arguments, *flags), documents, {NOTES_OF: names} | gpus)


def _check_sizes(asked: StartEngine) -> None:
    """Raise InputError for numbers of an engine that no server asks for."""
    devices = asked.devices
    if not 1 <= len(devices) <= _MOST_DEVICES or len(set(devices)) < len(devices) or min(devices) < 0:
        raise InputError(f"An engine needs 1 to {_MOST_DEVICES} different devices of the node, not {devices}.")
    if not 1 <= len(asked.models) <= _MOST_MODELS:
        raise InputError(f"An engine has 1 to {_MOST_MODELS} models, not {len(asked.models)}.")
    for model in asked.models:
        if not 0 < len(model.name) <= _LONGEST_NAME or not model.name.isprintable() or "\0" in model.directory:
            raise InputError(f"{model.name[:_LONGEST_NAME]!r} is no name of a model.")


def _checked_flags(flags: Sequence[str]) -> list[str]:
    """Return the further arguments of an engine; InputError unless all are of `FLAGS`."""
    words = iter(flags)
    for word in words:
        if word in ("--pinned", "--no-pinned", PROMISES):
            continue
        value = next(words, "") if word in FLAGS else None
        if value is None or not re.fullmatch(FLAGS[word], value):
            shown = f"{word} {value}" if value else word
            raise InputError(f"A launcher starts no engine with the argument {shown[:_LONGEST_NAME]!r}.")
    return list(flags)


def _schedules(asked: StartEngine, plan: Plan) -> list[Schedule]:
    """Return the schedules of models that share devices; InputError unless they are a unit of the plan."""
    if not 0 <= asked.unit < len(plan.units):
        raise InputError(f"The plan has {len(plan.units)} units, but no unit {asked.unit}.")
    of_unit = {place: model for place, model in enumerate(plan.models) if model in plan.units[asked.unit]}
    if {place: model.name for place, model in of_unit.items()} != {m.place: m.name for m in asked.models}:
        raise InputError(f"Unit {asked.unit} of the plan has other models.")
    return [of_unit[model.place].schedule for model in asked.models]


def _directories(asked: StartEngine, directories: Mapping[str, Path], schedules: Sequence[Schedule]) -> list[Path]:
    """Return this node's directory of each model.

    Raises:
        InputError: A schedule is for other devices, or a directory has no such model.
    """
    for schedule in schedules:
        ranks = sum(stage.tp for stage in schedule.stages) * schedule.replicas
        if len(schedules) != len(asked.models) or ranks != len(asked.devices):
            raise InputError(
                f"The schedule is for {counted(ranks, 'device')}, but the engine has {len(asked.devices)}."
            )
    pairs = zip(asked.models, schedules, strict=True)
    return [_directory(model, directories, schedule) for model, schedule in pairs]


def _directory(model: LaunchedModel, directories: Mapping[str, Path], schedule: Schedule) -> Path:
    """Return this node's directory of a model.

    Raises:
        InputError: It doesn't exist, or has another model.
    """
    directory = directories.get(model.name, Path(model.directory))
    way = f"start its launcher with --model {model.name}=DIR"
    if not directory.is_dir():
        raise InputError(f"Model '{model.name}' needs the directory '{directory}', which does not exist there: {way}.")
    spec, planned = ModelSpec.from_directory(directory), schedule.model
    if spec.fingerprint != planned.fingerprint:
        raise InputError(
            f"'{directory}' has model '{spec.name}' ({spec.fingerprint}) there, but model '{model.name}' of the plan "
            f"is '{planned.spec.name}' ({planned.fingerprint}): {way}."
        )
    return directory


class LaunchedEngine:
    """An engine for a server: started, passed on, and ended; its files are in a folder of `work`, which ends with it.

    `send` sends a message to the server. `connected` passes on a connection of the engine.
    """

    def __init__(
        self,
        asked: StartEngine,
        directories: Mapping[str, Path],
        work: Path,
        send: Callable[[Spec], None],
        connected: Connections,
    ):
        self._asked, self._directories = asked, directories
        self._folder = work / f"{asked.engine}-{secrets.token_hex(4)}"
        self._send, self._connected = send, connected
        self._servers: list[asyncio.Server] = []
        self._relays: set[asyncio.Future[None]] = set()
        self._said: dict[int, str] = {}
        self._ends = asyncio.Event()

    def end(self) -> None:
        """Let `run` end the engine."""
        self._ends.set()

    async def run(self) -> None:
        """Run the engine to its end, and report it, also if this fails: the server waits for the report."""
        code, reason = 1, "the launcher has failed at it"
        try:
            code, reason = await self._run(await self._start()), ""
        except (InputError, OSError) as error:
            code, reason = REFUSED, str(error)
        finally:
            try:
                await self._close()
            finally:
                self._send(EngineEnded(self._asked.engine, code, reason))

    async def _close(self) -> None:
        """End the connections, and remove the files."""
        for server in self._servers:
            server.close()
        relays = list(self._relays)
        if relays and not self._ends.is_set():  # its last messages
            await asyncio.wait(relays, timeout=_FLUSH_S)
        for relay in relays:
            relay.cancel()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _start(self) -> EngineProcess:
        """Start the process, after the sockets to which it connects."""
        self._folder.mkdir(mode=0o700)
        launch = engine_to_launch(self._asked, self._directories, self._folder)
        for model in self._asked.models:
            path = self._folder / f"engine-{model.place}"
            self._servers.append(await asyncio.start_unix_server(partial(self._take, model.place), path))
        documents = self._folder / str(self._asked.models[0].place)
        process = EngineProcess(launch.arguments, len(self._asked.devices), launch.environment, documents)
        await process.start(launch.documents)
        return process

    async def _run(self, process: EngineProcess) -> int:
        """Return the exit code when the process has ended, or has been ended."""
        exiting, ending = asyncio.ensure_future(process.wait()), asyncio.ensure_future(self._ends.wait())
        try:
            while not exiting.done() and not ending.done():
                self._say()
                await asyncio.wait({exiting, ending}, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            await process.stop(0.0)
        return await exiting

    async def _take(self, place: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = self._connected(reader, writer, self._asked.engine, place)
        self._relays.add(relay)
        await asyncio.wait({relay})
        self._relays.discard(relay)

    def _say(self) -> None:
        """Report what the engine does before it opens, if that has changed."""
        for model in self._asked.models:
            text = starting_text(self._folder / f"engine-{model.place}")
            if text != self._said.get(model.place, ""):
                self._said[model.place] = text
                self._send(EngineStarting(self._asked.engine, model.place, text))
