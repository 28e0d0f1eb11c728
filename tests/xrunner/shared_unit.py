"""Models that share devices, a rank for each: run as the ranks of a job."""

import json
import sys
from pathlib import Path

import torch

from tests.xrunner.cells import requests
from xcore import document
from xcore.requests.request import Result
from xcore.specs.cluster_plan import Plan
from xmulti.rank.rank_unit import RankUnit
from xrunner.comm.ranks import Ranks, job


def run(directory: Path, ranks: Ranks) -> None:
    """The models of each plan here, with all requests to both at once; the leader writes tokens and preemptions."""
    for path in sorted(directory.glob("plan-*.json")):
        (unit,) = document.read(Plan, path).units
        models = RankUnit.load(unit, {model.name: Path(model.directory) for model in unit}, ranks)
        models.open()
        if models.leads:
            (directory / f"ran-{path.name}").write_text(json.dumps(results_of(models)))
        else:
            models.serve()
            models.close()
        ranks.all(None)
        assert ranks.size == 1 or not ranks.world.Iprobe(), f"{path.name} leaves a message on its way"


def results_of(unit: RankUnit) -> dict:
    """Each model's tokens by request, and its preemptions; the unit is closed."""
    tokens = {tenant.name: {} for tenant in unit.tenants}
    for name in tokens:
        for request in requests():
            unit.add(name, request)
    while not unit.idle:
        if not unit.step():
            unit.wait()
        for name, done in tokens.items():
            done |= {event.id: event.output_ids for event in unit.take(name) if isinstance(event, Result)}
    preempted = {tenant.name: tenant.ledger.preemptions for tenant in unit.tenants}
    unit.drain()
    unit.close()
    return {"tokens": tokens, "preempted": preempted}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with job() as ranks:
        run(Path(sys.argv[1]), ranks)
