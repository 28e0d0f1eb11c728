"""An engine that stays open: requests that come while it steps, one of them aborted. Run as the ranks of a job."""

import json
import sys
from pathlib import Path

import torch

from xcore import document
from xcore.requests.engine_protocol import TokenEvent
from xcore.requests.request import Request, Result
from xcore.specs.schedule import Schedule
from xrunner.comm.ranks import Ranks, job
from xrunner.core.engine import Engine
from xrunner.rank.warm_up import Extent


def feed(engine, todo, every=2, aborted=()):
    """Add a request at every so many steps, abort some when their first token is there; tokens and results by id."""
    left, tokens, results, steps = list(todo), {}, {}, 0
    while left or not engine.idle:
        if left and steps % every == 0:
            engine.add(left.pop(0))
        take(engine.step(), tokens, results, lambda first: engine.abort(first) if first in aborted else None)
        steps += 1
    take(engine.drain(), tokens, results)
    return tokens, results


def take(events, tokens, results, on_first=lambda request_id: None):
    for event in events:
        if isinstance(event, TokenEvent):
            output = tokens.setdefault(event.request_id, [])
            assert event.index == len(output) and event.request_id not in results
            output.append(event.token)
            if event.index == 0:
                on_first(event.request_id)
        else:
            assert isinstance(event, Result) and event.id not in results
            results[event.id] = event


def run(directory: Path, ranks: Ranks) -> None:
    """Every cell of `cells.json`; the leader writes tokens and results."""
    for name, cell in json.loads((directory / "cells.json").read_text()).items():
        plan = document.from_dict(Schedule, cell["schedule"], name)
        todo = [document.from_dict(Request, request, name) for request in cell["requests"]]
        engine = Engine.load(cell["model"], plan, ranks)
        engine.open(Extent.within(plan, max(len(r.prompt_ids) for r in todo), max(r.max_tokens for r in todo)))
        if engine.leads:
            tokens, results = feed(engine, todo, aborted=cell["cancelled"])
            rows = [document.to_dict(result) for result in results.values()]
            (directory / f"{name}.json").write_text(json.dumps({"tokens": tokens, "results": rows}))
        else:
            engine.serve()
        ranks.all(None)
        assert ranks.size == 1 or not ranks.world.Iprobe(), f"{name} leaves a message on its way"
        engine.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with job() as ranks:
        run(Path(sys.argv[1]), ranks)
