"""Stages one after the other: nothing is lost or computed twice, and what goes on isn't loaded again."""

import random

import numpy as np
import pytest

from tests.xmulti.stages import applications
from xmulti.stages.application import draw
from xmulti.stages.stage_progress import Parallel, Progress


def beginning(made):
    return Progress.beginning(draw(*made))


def test_what_goes_on_is_not_loaded_again():
    progress = beginning(applications.ensemble())
    stage = {"n0": Parallel(1, 1), "n1": Parallel(1, 1)}
    whole = progress.outlook(stage)
    half = progress.advance(whole, whole.end_s / 2)
    assert half.outlook(stage).end_s == pytest.approx(whole.end_s, rel=1e-9)
    assert half.stopped(stage).runs == half.runs
    again = half.stopped({}).outlook(stage)
    assert again.end_s > whole.end_s
    assert again.nodes["n0"].run.start_s == half.now


def test_loading_counts_as_time():
    progress = beginning(applications.ensemble())
    outlook = progress.outlook({"n1": Parallel(1, 1)})
    node = outlook.nodes["n1"]
    assert node.run.load_s == 2.0
    assert outlook.throughput == pytest.approx(node.result.work / outlook.end_s)
    assert node.work_at(2.0) == 0.0


def test_a_node_that_waits_for_others_ends_no_stage():
    progress = beginning(applications.chain_and_judge())
    stage = {"chain": Parallel(1, 1), "judge": Parallel(1, 1)}
    outlook = progress.outlook(stage)
    assert outlook.leading == ("chain",)
    assert outlook.end_s == outlook.nodes["chain"].end_s < outlook.nodes["judge"].end_s
    assert not progress.can_run("judge") and progress.can_run("judge", stage)


def test_a_call_begins_after_those_that_it_waits_for():
    progress = beginning(applications.chain_and_judge())
    outlook = progress.outlook({"chain": Parallel(1, 1), "judge": Parallel(2, 1)})
    (needed,) = (places for name, places in progress.application.nodes["judge"].needs if name == "chain")
    assert (outlook.nodes["judge"].done > outlook.nodes["chain"].done[needed]).all()


def test_random_stages_do_all_work_once():
    """Whatever is stopped when: each node's work is the same, no call ends twice, generated tokens stay generated."""
    rng = random.Random(0)
    for _ in range(60):
        progress = beginning(rng.choice((applications.ensemble(3), applications.chain_and_judge())))
        total = dict.fromkeys(progress.application.nodes, 0.0)
        ends = {}
        while progress.unfinished:
            stage = {}
            for name in progress.unfinished:
                if progress.can_run(name, stage) and (rng.random() < 0.6 or not stage):
                    stage[name] = rng.choice((Parallel(1, 1), Parallel(2, 1), Parallel(1, 2)))
            progress = progress.stopped(stage)
            outlook = progress.outlook(stage)
            until = progress.now + rng.choice((0.5, 0.9, 1.0, 1.0)) * (outlook.end_s - progress.now)
            after = progress.advance(outlook, until)
            for name, node in outlook.nodes.items():
                begun = progress.until_now(name, node.run).work if name in progress.runs else 0.0
                total[name] += after.until_now(name, node.run).work - begun
            for name, done in after.done.items():
                known = ends.setdefault(name, np.full(len(done), np.inf))
                fixed = np.isfinite(known)
                assert (done[fixed] == known[fixed]).all()
                ends[name] = done
            progress = after
        for name, node in progress.application.nodes.items():
            assert np.isfinite(ends[name]).all()
            expected = progress.application.work(name).of(node.calls.prompts + node.calls.outputs - 1.0)
            assert total[name] == pytest.approx(expected, rel=1e-9)
