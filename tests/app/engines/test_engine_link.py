"""The frontend's end of a socket that no engine is behind any more."""

import asyncio
from pathlib import Path

import pytest

from exegpt.app.engines.engine_link import EngineLink
from exegpt.app.multimodel.asking import Asking
from exegpt.errors import InputError
from exegpt.request import Request


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_request_of_an_engine_that_has_failed_for_good_fails(before):
    """Whenever it comes: a model's calls may wait for another model's while its own engine fails."""

    async def run():
        link = EngineLink()
        asking = Asking({"a": link}, {"a": Path()}, None, lambda done: None)
        if not before:
            link.fail()
        asked = asyncio.ensure_future(asking.ask("a", Request("1", (1,), 5)))
        await asyncio.sleep(0)
        if before:
            link.fail()
        assert link.outputs == {}
        await asyncio.wait_for(asked, 1.0)

    with pytest.raises(InputError, match="its engine has ended"):
        asyncio.run(run())
