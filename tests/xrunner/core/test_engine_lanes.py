"""A rank's own lane: when it takes a step."""

from collections import defaultdict
from types import SimpleNamespace

import pytest

from tests.xcore.small_specs import schedule
from xcore.batching import Sequence, Step
from xrunner.core.engine_lanes import OwnLane


def lane_of(stages):
    """A lane whose other ranks answer when `arrived` says so, and the list of what they have been asked."""
    asked, arrived = [], set()
    transport = SimpleNamespace(
        post=lambda batch, *followers: None,
        expect=lambda result, *_: asked.append(result) or len(asked),
        arrived=lambda pending: pending in arrived,
    )
    place = SimpleNamespace(line=[SimpleNamespace(phase="both")] * stages, followers=(1,), sampler=1)
    worker = SimpleNamespace(place=place, transport=transport, now=lambda: 0.0, wait=lambda poll: poll())
    worker.run = lambda batch, start: None
    running = defaultdict(lambda: SimpleNamespace(ended=True, known=0))
    outputs = SimpleNamespace(running=running, give=lambda *_: None)
    batch = SimpleNamespace(result_size=2, prompt_logprobs=None)
    return OwnLane(worker, schedule("orca"), outputs, lambda micro_batch: (batch, [])), arrived


@pytest.mark.parametrize("stages", [2, 3])
def test_prompts_alone_do_not_run_ahead_of_the_other_stages(stages):
    """One-token requests wait for no token: two steps for each stage but one are under way, as in the replay."""
    lane, arrived = lane_of(stages)
    for step in range(2 * stages - 1):
        assert lane.free
        lane.run(Step(tuple((Sequence(step * stages + i, 5, 1), 5) for i in range(stages))), 0.0)
    assert not lane.free and not lane.update()
    arrived.update(range(1, stages + 1))
    assert lane.update() and lane.free


def test_a_line_of_one_stage_is_always_free():
    lane, _ = lane_of(1)
    for index in range(5):
        lane.run(Step(((Sequence(index, 5, 1), 5),)), 0.0)
    assert lane.free
