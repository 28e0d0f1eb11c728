"""The order of a plan's engines: by arrival, or by the scores of a ranker for each model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from xcore.batching import Hints
from xcore.errors import InputError
from xcore.orders.ranker import Ranker
from xcore.requests.request import Request
from xcore.specs.cluster_plan import Unit
from xcore.tokenizer import load_tokenizer
from xmulti.sharing.plan_order import RUN, PlanOrder, check_order
from xscheduler.ordering import prompt_scores

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class RankedOrder:
    """An order of requests whose lengths aren't known, with a ranker for each model if it is the learned one."""

    order: PlanOrder
    rankers: Mapping[str, Ranker] = field(default_factory=dict)
    tokenizers: "Mapping[str, Tokenizer | None]" = field(default_factory=dict)

    def scores(self, model: str, requests: Sequence[Request]) -> list[float]:
        """Return the scores of a model's requests under the learned order."""
        return prompt_scores(self.rankers[model], requests, self.tokenizers[model])

    def hints_of(self, model: str) -> Callable[[Request], Hints] | None:
        """Return the function that gives a model's requests their hints; None: the order needs none."""
        if not self.rankers:
            return None
        return lambda request: Hints(score=self.scores(model, [request])[0], slack_s=request.slack_s)

    def replayed(self, requests: Mapping[str, Sequence[Request]]) -> PlanOrder:
        """Return the order for a replay of these requests."""
        scores = {model: self.scores(model, rows) for model, rows in requests.items()} if self.rankers else {}
        return PlanOrder(self.order.name, scores, self.order.reference)


def order_flags(name: str | None, rankers: Mapping[str, Path], unit: Unit) -> list[str]:
    """Return the flags of `exegpt engine` for the order of a unit's requests."""
    if name is None:
        return []
    alone = len(unit) == 1
    files = [str(rankers[m.name]) if alone else f"{m.name}={rankers[m.name]}" for m in unit if rankers]
    return ["--order", name, *(word for file in files for word in ("--ranker", file))]


def ranked_order(
    name: str | None, files: Mapping[str, Path], directories: Mapping[str, str | Path]
) -> RankedOrder | None:
    """Return the order of engines with models in these `directories`; None for the order of the plan's method.

    Raises:
        InputError: There is no such order. Under the learned order, a model has no ranker or no tokenizer.
    """
    check_order(name, RUN)
    if name != "learned":
        if files:
            model, file = next(iter(files.items()))
            raise InputError(f"--ranker {model}={file} is only for --order learned: leave it out.")
        return RankedOrder(PlanOrder(name)) if name else None
    unknown = next((model for model in files if model not in directories), None)
    if unknown is not None:
        raise InputError(f"--ranker {unknown}=… names no model of the plan: it has {', '.join(directories)}.")
    lacking = next((model for model in directories if model not in files), None)
    if lacking is not None:
        raise InputError(
            f"--order learned needs a ranker for each model, but '{lacking}' has none: pass --ranker {lacking}=FILE, "
            "written by `exegpt rank train`."
        )
    rankers = {model: Ranker.load(files[model]) for model in directories}
    for model, ranker in rankers.items():
        if not len(ranker.reference):
            raise InputError(
                f"'{files[model]}' has no scores with which those of model '{model}' could be compared: it was written "
                "by an earlier version; train it again with `exegpt rank train`."
            )
    tokenizers = {model: load_tokenizer(Path(directory)) for model, directory in directories.items()}
    reference = {model: ranker.reference.tolist() for model, ranker in rankers.items()}
    order = RankedOrder(PlanOrder(name, reference=reference), rankers, tokenizers)
    for model in directories:
        try:
            order.scores(model, ())
        except InputError as error:
            raise InputError(f"Model '{model}': {error}") from None
    return order
