"""Spaces of chunked prefill: the residents, at several token budgets."""

import bisect
import itertools
from dataclasses import replace

from xcore.batching.admission import Admission
from xcore.policies.chunked import TRAITS
from xscheduler.candidates import Candidates
from xscheduler.search_problem import SearchProblem
from xscheduler.space import Variable
from xscheduler.spaces.grids import at_value, grid, pipelines, residents_of, rule_of
from xscheduler.spaces.policy_space import PolicySpace, Spaces
from xsimulator.steady import lockstep
from xsimulator.steady.scenario import Scenario

TOKEN_BUDGETS = tuple(sorted({2**i for i in range(6, 19)} | {3 * 2**i for i in range(13, 18)}))
"""Tokens per iteration that chunked prefill's spaces enumerate, as far as memory holds their activations."""
FINE_TOKEN_BUDGETS = tuple(2**i * part // 8 for i in range(6, 18) for part in range(8, 16))
"""Token budgets for an open system, where the budget limits how long decoding tokens wait for prompts."""


def _spaces(policy: str, problem: SearchProblem) -> Spaces:
    if problem.load.encoder_decoder:
        return  # an encoder reads its whole input at once
    for layout, rule in itertools.product(pipelines(problem, uniform=True), problem.admissions(policy)):
        scenario = problem.both(layout)
        batches, bounds = residents_of(problem, scenario, rule), problem.mixed_bounds(layout, rule, splits=True)
        if problem.open_system:
            if not (budgets := budgets_of(problem, scenario, FINE_TOKEN_BUDGETS, rule)):
                continue
            variables = (
                _within(batches, budgets[-1] // problem.cost_model.rows),
                Variable("max_num_batched_tokens", budgets),
            )
            yield grid(policy, problem, layout, variables, bounds, grows=rule == "grow")
            continue
        for budget in budgets_of(problem, scenario, TOKEN_BUDGETS, rule):
            slack, fewer = lockstep.ttft_slack(scenario), (_within(batches, budget // problem.cost_model.rows),)
            constants = {"max_num_batched_tokens": budget, "grows": rule == "grow"}
            yield grid(policy, problem, layout, fewer, bounds, slack, **constants)


def _within(variable: Variable, most: int) -> Variable:
    """Return the variable with its values up to `most`: vLLM refuses a token budget below the number of sequences."""
    return replace(variable, values=variable.values[: bisect.bisect_right(variable.values, most)])


def budgets_of(
    problem: SearchProblem, scenario: Scenario, budgets: tuple[int, ...], admission: Admission
) -> tuple[int, ...]:
    """Return the token budgets whose activations leave memory for a sequence, and the smallest budget in any case.

    No budget is below the rows of a fixed number of sequences.
    """
    need = scenario.load.resident_blocks(admission).mean
    least = problem.cost_model.rows * problem.fixed.get("max_num_seqs", 1)
    asked = sorted({max(budget, least) for budget in budgets})
    if fixed := problem.fixed.get("max_num_batched_tokens"):
        asked = [fixed] if fixed >= least else []
    return tuple(
        budget for budget in asked if budget == asked[0] or scenario.replica.room((float(budget), 1.0)) >= need
    )


def _at_value(problem: SearchProblem, like: Candidates, value: int) -> Candidates | None:
    """Return the space at another budget.

    None if the activations of `value` tokens leave no memory for a sequence, or if it is less than the fewest
    sequences.
    """
    scenario, rule = like.where, rule_of(like)
    if scenario.replica.room((float(value), 1.0)) < scenario.load.resident_blocks(rule).mean:
        return None
    batches = _within(residents_of(problem, scenario, rule), value // problem.cost_model.rows)
    return at_value(problem, "max_num_batched_tokens", like, value, batches) if batches.values else None


SPACE = PolicySpace(TRAITS.name, _spaces, "max_num_batched_tokens", _at_value)
