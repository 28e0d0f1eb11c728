"""A request of a plan that its engine fails is a result like others, and one that it can't run ends the run."""

import asyncio
from types import SimpleNamespace

import pytest

from xcore.errors import InputError
from xcore.requests.engine_protocol import Ended
from xcore.requests.request import Request
from xmulti.plans.engine_client import EngineClient


def ask(tmp_path, ended):
    """What comes of a request whose engine ends it at once."""
    output = SimpleNamespace(ended=ended, listeners=[], added_s=0.0, last_s=0.0, start_s=None, first_s=None, tokens=[])
    link = SimpleNamespace(add=lambda request: output)

    async def run():
        asking = EngineClient({"tiny": link}, {"tiny": tmp_path}, None, lambda count: None)
        return asking, await asking.ask("tiny", Request("a", (1, 2), 4))

    return asyncio.run(run())


def test_a_failed_request_is_a_result(tmp_path):
    asking, result = ask(tmp_path, Ended("0", "error", error="its logits are NaN"))
    assert (result.finish_reason, result.error, result.output_ids) == ("error", "its logits are NaN", ())
    assert result.finish_s >= 0 and asking.results == {"a": result} and asking.served == {"tiny": []}


@pytest.mark.parametrize("ended", [Ended("0", "error"), Ended("0", "error", refused="it is too long")])
def test_a_request_that_no_engine_can_run_ends_the_run(tmp_path, ended):
    with pytest.raises(InputError, match=ended.refused or "its engine has ended"):
        ask(tmp_path, ended)
