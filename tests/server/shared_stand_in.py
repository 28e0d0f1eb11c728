"""`exegpt`, whose engine of several models stands for the one that shares devices: `python -m
tests.server.shared_stand_in serve --plan …`.

It takes the same arguments, speaks the same protocol over the same sockets, and runs an engine of one model for each.
"""

import subprocess
import sys
import time
from pathlib import Path

from exegpt import document
from exegpt.app.child import child_command
from exegpt.cli import main
from exegpt.plan import Plan
from exegpt.server import engine_process


def command(arguments):
    """Of an engine: one of several models is this program."""
    if "--plan" not in arguments:
        return child_command(arguments)
    return [sys.executable, "-m", "tests.server.shared_stand_in", *arguments]


def run(arguments) -> int:
    """Run the engines of a unit until all have ended, or any has failed."""
    flags = list(arguments)

    def taken(option):
        place = flags.index(option)
        flags.pop(place)
        return flags.pop(place)

    plan, directory = document.read(Plan, taken("--plan")), Path(taken("--socket"))
    engines = []
    for model in plan.units[int(taken("--unit"))]:
        socket = directory / f"engine-{plan.models.index(model)}"
        schedule = directory / f"{socket.name}.json"
        document.write(schedule, model.schedule)
        words = ["engine", "--model", model.directory, "--schedule", str(schedule), "--socket", str(socket)]
        engines.append(subprocess.Popen(child_command([*words, *flags])))
    while engines:
        for engine in list(engines):
            if code := engine.poll():
                return code
            if code == 0:
                engines.remove(engine)
        time.sleep(0.02)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        sys.exit(run(sys.argv[2:]))
    engine_process.child_command = command
    sys.exit(main())
