"""Garbage is collected while an engine and a server live, whatever their imports leave out."""

import gc

import pytest

from exegpt.api import serving_engine
from tests.exegpt.cli.conftest import run_command
from xmulti.serving import serving_unit
from xserver.engines import supervisor


@pytest.mark.parametrize(
    ("module", "work", "words"),
    [
        (serving_engine, "serve", ("engine", "--socket", "s", "--model", "{model}")),
        (serving_unit, "serve", ("engine", "--socket", "s", "--plan", "plan.json")),
        (supervisor, "run", ("serve", "--model", "{model}")),
    ],
    ids=["engine", "unit", "server"],
)
def test_garbage_is_collected_while_it_works(tiny, monkeypatch, module, work, words):
    collects = []
    monkeypatch.setattr(module, work, lambda *_: collects.append((gc.isenabled(), gc.get_freeze_count() > 0)))
    assert run_command(*(word.format(model=tiny) for word in words)).code == 0
    assert collects == [(True, True)]
