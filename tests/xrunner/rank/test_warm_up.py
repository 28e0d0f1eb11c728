"""What is done before the clock starts, and what is left out where it runs."""

import pytest

from xrunner.models import load_model
from xrunner.rank.warm_up import Extent, _warm_rows, warm_up


@pytest.mark.parametrize(("running", "tiled"), [(False, False), (True, False), (False, True)])
def test_packed_products_see_their_rows_unless_the_clock_runs(directories, running, tiled, monkeypatch):
    monkeypatch.setattr("xrunner.rank.warm_up._SHAPES_S", 60.0)  # enough for all of them on a busy machine
    monkeypatch.setattr("xrunner.rank.warm_up.can_tile", lambda dtype: tiled)
    model = load_model(directories["llama"])
    cache = model.new_cache(8, 16)
    warm_up(model, cache, Extent(blocks=4, tokens=12, sequences=2, longest=2, prompts=2), running=running)
    assert _warm_rows.get(model, set()) == (set() if running or tiled else set(range(2, 13)))
    assert all(not tensor.any() for tensor in cache.values)
