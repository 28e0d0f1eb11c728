"""Spaces of a policy without its own space file: a grid over its control record."""

import itertools

from xcore.policies import TRAITS
from xcore.policies.control import Kind, OneOf, kinds
from xscheduler import ceilings
from xscheduler.search_problem import SearchProblem
from xscheduler.space import Variable
from xscheduler.spaces.chunked import TOKEN_BUDGETS, budgets_of
from xscheduler.spaces.grids import enumerated, grid, pipelines
from xscheduler.spaces.policy_space import Spaces


def declared(policy: str, problem: SearchProblem) -> Spaces:
    """Yield every combination of a few values of the variables that a policy declares, each as a space of one point.

    Nothing is known about the direction in which figures rise.
    """
    for layout in pipelines(problem, uniform=True):
        scenario = problem.both(layout)
        bounds = problem.mixed_bounds(layout, "reserve", TRAITS[policy].splits_prompts)
        few: dict[str, tuple[int, ...]] = {
            "prompts": _powers(8),
            "residents": _powers(ceilings.batch_that_fits(scenario)),
            "tokens": budgets_of(problem, scenario, TOKEN_BUDGETS, "reserve"),
            "period": _powers(problem.load.workload.output.max),
            "micro-batches": (len(layout.degrees),),
            "encode-micro-batches": (len(layout.degrees),),
        }
        traits = TRAITS[policy]
        budget, residents = traits.name_of("tokens"), traits.name_of("residents")
        kind_of = kinds(traits.control)
        tried = [enumerated(problem, name, _few(kind_of[name], few)) for name in traits.searched]
        for values in itertools.product(*tried):
            controls = dict(zip(traits.searched, values, strict=True))
            if budget and residents and controls[budget] < controls[residents]:
                continue
            name, value = controls.popitem()
            yield grid(policy, problem, layout, (Variable(name, (value,)),), bounds, **controls)


def _few(kind: Kind | OneOf | None, of_kind: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    return kind.values if isinstance(kind, OneOf) else of_kind[str(kind)]


def _powers(most: int) -> tuple[int, ...]:
    """Return the powers of two up to `most`."""
    return tuple(2**i for i in range(most.bit_length()))
