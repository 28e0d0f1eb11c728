"""The search over numbers of draft tokens against a full search for each, and the gain by batch against all batches."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.document import from_dict, to_dict
from xcore.errors import InputError
from xcore.specs.bound import ALL_REQUESTS
from xcore.specs.schedule import Schedule
from xscheduler.drafts import Drafts, climb, draft_gain, gain_texts, search_drafts
from xscheduler.setting_search import SearchOptions, search_schedule
from xscheduler.settings import find_setting, with_draft
from xsimulator.cost.cost_model import ReplicaCost

SETTING = find_setting("llama-3.1-8b", "1xH100-SXM", "512/256")
OPTIONS = SearchOptions(ALL_REQUESTS, None, 0.015, ("orca",), "bnb", 0.0, fixed={"prefills_per_step": 1})


@pytest.mark.parametrize(("acceptance", "bound_s"), [("0.8", 2.0), ("0.05", None)])
def test_the_best_number_of_draft_tokens_is_that_of_all_searches(acceptance, bound_s):
    drafts = Drafts.of(acceptance, None, None, None)
    drafts = replace(drafts, lengths=(0, 1, 2, 4))
    best = search_drafts(SETTING, bound_s, drafts, OPTIONS)
    each = {
        drafted: search_schedule(replace(SETTING, speculation=drafts.at(drafted)), bound_s, **vars(OPTIONS))
        for drafted in drafts.lengths
    }
    rates = {drafted: tuned.estimate.throughput_tok_s for drafted, tuned in each.items()}
    assert best.estimate.throughput_tok_s == pytest.approx(max(rates.values()))
    chosen = best.schedule.speculation.drafted if best.schedule.speculation else 0
    assert rates[chosen] == max(rates.values()) and (chosen == 0) == (acceptance == "0.05")
    assert from_dict(Schedule, to_dict(best.schedule), "it") == best.schedule
    assert ("speculation" in to_dict(best.schedule)) == bool(chosen)


def drafting(fixed):
    """The best schedule for equal prompts, with three draft tokens."""
    setting = find_setting("opt-6.7b", "1xA40", "256/64")
    speculative = replace(setting, speculation=Drafts.of("0.7", "3", None, None).at(3))
    options = replace(OPTIONS, policies=("chunked",), ttft_s=1.0, tpot_s=0.1, fixed=fixed)
    return search_schedule(speculative, None, **vars(options))


@pytest.mark.parametrize("fixed", [{}, {"max_num_seqs": 32}])
def test_batches_of_equal_prompts_have_budgets_for_every_row_of_their_drafts(fixed):
    control = drafting(fixed).schedule.control
    assert control.limit >= 4 * control.batch and control.batch == fixed.get("max_num_seqs", control.batch)


def test_a_budget_that_is_less_than_the_rows_of_all_drafts_is_named():
    (alternative,) = drafting({"max_num_seqs": 32, "max_num_batched_tokens": 127}).alternatives
    assert "a budget of 127 tokens per iteration is too small for 32 sequences with 4 tokens each" in alternative.reason
    assert drafting({"max_num_seqs": 32, "max_num_batched_tokens": 128}).schedule


def test_drafting_pays_up_to_the_batch_at_which_it_is_as_fast():
    """By decode iterations of every batch, with and without draft tokens."""
    drafts = Drafts.of("0.4", None, None, 2.0)
    plan = search_schedule(SETTING, None, **vars(OPTIONS)).schedule
    gain = draft_gain(plan, SETTING.on(plan.policy).profile, drafts)
    profile, batches = SETTING.on(plan.policy).profile, np.arange(1.0, gain.largest_batch + 1)

    def speed(drafted):
        speculation = drafts.at(drafted)
        side = ReplicaCost.of(replace(plan, speculation=speculation), profile).decode
        tokens = speculation.tokens_per_step if speculation else 1.0
        return tokens * batches / side.decode(batches, np.full(len(batches), 512 + 128.0)).sum(axis=-1)

    fastest = np.max([speed(drafted) for drafted in range(1, 9)], axis=0)
    pays = batches[fastest > speed(0)]
    assert gain.pays_below == pays.max() + 1 and 1 < gain.pays_below < gain.largest_batch
    for at in gain.by_batch:
        assert at.speedup == pytest.approx(fastest[at.batch - 1] / speed(0)[at.batch - 1], rel=1e-3)
        assert (at.drafted > 0) == (at.batch < gain.pays_below)
    assert f"from {gain.pays_below:,} sequences decoded together" in " ".join(gain_texts(gain))


def test_a_draft_models_times_are_added_to_both_profiles():
    drafts = Drafts.of("0.7", "3", "llama-3.2-1b", None)
    assert drafts.lengths == (3,) and drafts.only == 3 and drafts.at(3).layers == 0
    setting = with_draft(SETTING, drafts.draft)
    assert setting.profile.draft and setting.own.profile.draft
    assert setting.profile.fingerprint == SETTING.profile.fingerprint


def test_a_model_with_an_encoder_is_refused():
    with pytest.raises(InputError, match="needs a decoder-only model, but 't5-11b' has an encoder"):
        with_draft(find_setting("t5-11b", "4xA40", "T"), None)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ((None, "3", None, None), "--num-speculative-tokens 3 needs the acceptance"),
        ((None, None, None, 1.0), "--draft-layers 1.0 needs the acceptance"),
        (("0.7", "many", None, None), "--num-speculative-tokens many: use a number up to 16, or auto"),
        (("0.7", "17", None, None), "use a number up to 16"),
        (("0.7", None, "llama-3.2-1b", 1.0), "both choose the drafter"),
        (("0.7", None, "t5-11b", None), "has an encoder"),
        (("0.8,0.5", "3", None, None), "says nothing about 3 draft tokens: it has 1, 2"),
    ],
)
def test_options_that_contradict_are_refused(asked, why):
    with pytest.raises(InputError, match=why):
        Drafts.of(*asked)
    with pytest.raises(InputError, match="pass --num-speculative-tokens"):
        _ = Drafts.of("0.7", None, None, None).only


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True), st.data())
def test_a_climb_ends_at_the_highest_figure_where_it_rises_and_then_falls(figures, data):
    """Beside the largest of all figures; where the first one reaches nothing, of figures in any order."""
    values = tuple(range(1, len(figures) + 1))
    first = data.draw(st.sampled_from(values))
    peak = max(figures)
    below = [figure for figure in figures if figure != peak]
    split = data.draw(st.integers(0, len(below)))
    rising = [*sorted(below[:split]), peak, *sorted(below[split:], reverse=True)]
    table = dict(zip(values, figures if rising[first - 1] == 0 else rising, strict=True))
    if rising[first - 1] == 0:
        table[first] = 0
    asked = []

    def measure(value, reached):
        asked.append(value)
        return table[value]

    value, figure = climb(values, first, table[first], measure)
    assert figure == table[value] == max(table.values())
    assert first not in asked and len(asked) == len(set(asked))
