"""A run whose lengths drift, on the ranks of a job: from one layout to another. Run as a program."""

import json
import sys
from pathlib import Path

from xcore.document import from_dict, to_dict
from xcore.requests.request import Request
from xcore.specs.schedule import Schedule
from xrunner.comm.ranks import job
from xrunner.core import drift
from xrunner.core.changes import run_adapting
from xrunner.core.engine import Engine


def main(directory):
    """Run the requests of `asked.json`; the leader writes `done.json`."""
    options = json.loads((directory / "asked.json").read_text())
    drift.WINDOW = options["window"]
    plans = [from_dict(Schedule, plan, "a schedule") for plan in options["schedules"]]
    todo = [from_dict(Request, request, "a request") for request in options["requests"]]
    asking = []

    def reschedule(workload, held):
        asking.append(held)
        return plans[1]

    with job() as ranks:
        engine = Engine.load(options["model"], plans[0], ranks)
        engine, report = run_adapting(engine, options["model"], todo, reschedule)
        searches = ranks.all(len(asking))
        if engine.leads:
            done = {
                "searches": searches,
                "results": [to_dict(r) for r in report.results],
                "changes": [{"moved": c.moved, "pause_s": c.pause_s, "changed_s": c.changed_s} for c in report.changes],
                "spans": [(s.device, s.phase, s.start_s, s.end_s, s.sequences) for s in report.timeline.spans],
                "served": [(s.index, s.start_s, s.finish_s) for s in report.served],
            }
            (directory / "done.json").write_text(json.dumps(done))
        engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
