"""The session of an engine with a frontend: what it sends, and when."""

import pytest

from tests.xcore import small_specs
from tests.xrunner import cells
from xcore.requests.engine_protocol import Opened, Stepped
from xcore.requests.request import Request
from xrunner.core import inbox
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xrunner.models.create import create_model
from xrunner.rank.warm_up import Extent


class Sent(list):
    """An inbox without orders, which keeps its messages."""

    send = list.append

    def begin(self):
        pass

    def take(self, _):
        return ()


@pytest.mark.parametrize(("silent_s", "messages"), [(0.0, 5), (60.0, 1)])
def test_a_prompt_in_many_parts_is_reported_while_it_is_processed(tmp_path, monkeypatch, silent_s, messages):
    """Otherwise the frontend takes the engine for stalled, and kills it."""
    monkeypatch.setattr(inbox, "_SILENT_S", silent_s)
    create_model(tmp_path / "llama", "llama", kv_heads=2, seed=11, **cells.SIZES)
    model = load_model(tmp_path / "llama")
    plan = cells.schedule(model.spec, "chunked", max_num_batched_tokens=8)
    engine, sent = Engine(model, plan), Sent()
    engine.open(Extent.within(plan, 60, 40))
    session = inbox.Session(engine, sent, Opened(plan, small_specs.profile(), None, (), 0.0))
    engine.add(Request("0", tuple(range(5, 45)), 1, True))
    while not engine.idle:
        session.take()
        session.send(engine.step())
    steps = [message for message in sent if isinstance(message, Stepped)]
    assert len(steps) == messages
    assert [len(step.ended) for step in steps] == [0] * (messages - 1) + [1]
