"""One definition of a decoding step, `StageCost.step`: every other way to ask for its seconds gives the same."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.xsimulator.cost.test_group import OPT, T5, group
from xcore.specs.profile import Table
from xsimulator.cost.decode_cache import DecodeStepCache
from xsimulator.cost.stage import StageCost

MIXED = Table(
    ("chunk", "past", "decodes", "context"),
    ((0.0, 64.0), (0.0, 200.0), (0.0, 16.0), (32.0, 128.0)),
    tuple(1e-5 + 1e-7 * i for i in range(16)),
)


def costs():
    """A stage of a decoder, of an encoder-decoder, and of an engine with one kernel for prompts and decoding."""
    whole = group(OPT)
    one_kernel = replace(whole.tables, decoder=replace(whole.tables.decoder, mixed_attention=MIXED))
    return [
        StageCost(whole, 7, first=False),
        StageCost(group(T5), 24, last=False, encoder_layers=3),
        StageCost(replace(whole, tables=one_kernel), 7),
    ]


@pytest.mark.parametrize("cost", costs(), ids=["decoder", "encoder-decoder", "one kernel"])
@given(
    sequences=st.integers(1, 600),
    contexts=st.lists(st.floats(1.0, 9000.0), min_size=1, max_size=5),
    again=st.booleans(),
)
def test_cached_and_vectorised_steps_are_the_concrete_ones(cost, sequences, contexts, again):
    wanted = [cost.step(None, sequences, context) for context in contexts]
    cached = DecodeStepCache.of(cost)
    if again:  # what a first call leaves doesn't change the second
        cached(sequences, np.array([17.0]))
    assert cached(sequences, np.array(contexts)) == pytest.approx(wanted, rel=1e-12)
    assert cost.decode(sequences, np.array(contexts)) == pytest.approx(wanted, rel=1e-9)
