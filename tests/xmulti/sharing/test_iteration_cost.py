"""What iterations cost on a share of the devices: by measured tables, and by a profile of whole devices."""

import numpy as np
import pytest

from tests.xsimulator.replay.test_event_simulator import PROFILE, schedule
from xcore.specs.iteration_profile import IterationProfile, IterationTables
from xcore.specs.profile import Table
from xmulti.sharing.iteration_cost import ProfileCost, TableCost, sharing_overhead
from xsimulator.cost.cost_model import ReplicaCost


def tables(share, prefill_s, decode_s):
    """Seconds by batch alone: twice as many for a batch of two; decoding a tenth more at a context of 100."""
    return IterationTables(
        1,
        share,
        Table(("batch", "length"), ((1.0, 2.0), (10.0, 100.0)), (prefill_s, prefill_s, 2 * prefill_s, 2 * prefill_s)),
        Table(
            ("batch", "context"), ((1.0, 2.0), (0.0, 100.0)), (decode_s, 1.1 * decode_s, 2 * decode_s, 2.2 * decode_s)
        ),
    )


def cost():
    """A third table lies on the line through the others."""
    measured = (tables(1.0, 1.0, 0.1), tables(0.5, 3.0, 0.2), tables(0.8, 1.5, 0.125))
    return TableCost(IterationProfile(1, "m", "d", measured), 1)


@pytest.mark.parametrize(
    ("share", "prefill_s", "decode_s"),
    [
        (0.25, 6.0, 0.4),  # beyond the smallest: as 1 / share
        (0.5, 3.0, 0.2),
        (2 / 3, 2.0, 0.15),  # 1 / share lies halfway between 1 and 2
        (0.8, 1.5, 0.125),
        (1.0, 1.0, 0.1),
    ],
)
def test_between_measured_shares_seconds_are_linear_in_one_over_the_share(share, prefill_s, decode_s):
    assert cost().prefill_seconds([40], share) == pytest.approx(prefill_s)
    assert cost().decode_seconds(1, np.array([0.0, 50.0, 100.0]), share) == pytest.approx(
        decode_s * np.array([1.0, 1.05, 1.1])
    )


def test_prompts_together_are_a_batch_of_equal_ones_with_as_many_tokens_and_squares():
    """Two prompts of 10 and 30 tokens: 1,000 squares over 40 tokens are a length of 25, and 1.6 prompts."""
    assert cost().prefill_seconds([40, 40], 1.0) == pytest.approx(2.0)
    assert cost().prefill_seconds([10, 30], 1.0) == pytest.approx(1.6)


def test_a_profile_of_whole_devices_knows_shares_by_two_rules():
    """Prompts take 1 / share as long; decoding no longer, down to where the share draws too little of the memory."""
    whole = ProfileCost(ReplicaCost.of(schedule("orca"), PROFILE))
    contexts = np.array([10.0, 60.0])
    prefill_s, decode_s = whole.prefill_seconds([20, 30], 1.0), whole.decode_seconds(3, contexts, 1.0)
    assert (decode_s > 0).all() and prefill_s > 0
    for share, longer in ((0.8, 1.0), (0.4, 1.0), (0.3, 4 / 3), (0.2, 2.0)):
        assert whole.prefill_seconds([20, 30], share) == pytest.approx(prefill_s / share)
        assert whole.decode_seconds(3, contexts, share) == pytest.approx(longer * decode_s)


def test_what_sharing_costs():
    """SeaLLM's Figure 15: nothing alone, 4 % with blocks of one size, 8 % with blocks of two."""
    assert [sharing_overhead(sizes) for sizes in ([], [7], [7, 7], [7, 9], [7, 7, 9])] == [1.0, 1.0, 1.04, 1.08, 1.08]
