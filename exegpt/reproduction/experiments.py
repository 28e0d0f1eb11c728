"""All reproductions by name: how each is run, what `--quick` leaves out, and how its result is shown."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from exegpt.report.sections import Section

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Result = TypeVar("Result", bound=DataclassInstance)

Progress = Callable[[int, int], None]
STANDS_ON = "Simulated with the stock roofline of every device, in fp16, with all of its memory; nothing ran on a GPU."


@dataclass(frozen=True)
class Reproduced:
    """A result: as a document, and as sections."""

    document: dict[str, object]
    sections: list[Section]


@dataclass(frozen=True)
class Experiment:
    """One paper's figure, table or whole evaluation."""

    run: Callable[[Progress, bool], Reproduced]
    """Called with the progress, and with whether it is `--quick`."""
    left_out: str = ""
    """What `--quick` leaves out; empty: nothing, since all of it is quick."""
    stands_on: str = STANDS_ON

    @property
    def reduction(self) -> str:
        """Return a sentence about `--quick`."""
        return f"--quick: {self.left_out}." if self.left_out else "--quick leaves nothing out here."


def _shown(
    work: "Callable[[Progress, bool], Result]", sections: "Callable[[Result], list[Section]]"
) -> Callable[[Progress, bool], Reproduced]:
    def run(progress: Progress, quick: bool) -> Reproduced:
        result = work(progress, quick)
        return Reproduced(asdict(result), sections(result))

    return run


def table4() -> Experiment:
    """Return the seconds to load models."""
    from exegpt.reproduction import table4 as table

    return Experiment(_shown(lambda progress, _: table.reproduce(progress), table.sections))


def table5() -> Experiment:
    """Return the shares of non-monotone points."""
    from exegpt.reproduction import table5 as table

    return Experiment(_shown(lambda progress, _: table.reproduce(progress), table.sections))


def table6() -> Experiment:
    """Return OPT-13B at the paper's schedules."""
    from exegpt.reproduction import table6 as table

    return Experiment(_shown(table.reproduce, table.sections), table.QUICK)


def table7() -> Experiment:
    """Return the variance of stage times."""
    from exegpt.reproduction import table7 as table

    return Experiment(_shown(table.reproduce, table.sections), table.QUICK)


def gains(figures: tuple[str, ...], model: str | None = None, workload: str | None = None) -> Experiment:
    """Return figure 6, figure 8 or both, of all models and tasks or of one."""
    from exegpt.reproduction import gains as figure

    return Experiment(
        _shown(
            lambda progress, quick: figure.reproduce(figures, model, workload, progress, quick),
            figure.sections,
        ),
        figure.QUICK,
    )


def figure7() -> Experiment:
    """Return the systems that the paper compares first."""
    from exegpt.reproduction import figure7 as figure

    return Experiment(_shown(figure.reproduce, figure.sections), figure.QUICK)


def figure9() -> Experiment:
    """Return the memory of WAA."""
    from exegpt.reproduction import figure9 as figure

    return Experiment(_shown(lambda progress, _: figure.reproduce(progress), figure.sections))


def figure10() -> Experiment:
    """Return the throughput on lengths of real data sets."""
    from exegpt.reproduction import figure10 as figure

    return Experiment(_shown(figure.reproduce, figure.sections), figure.QUICK)


def figure11() -> Experiment:
    """Return the throughput under changing outputs."""
    from exegpt.reproduction import figure11 as figure

    return Experiment(_shown(lambda progress, _: figure.reproduce(progress), figure.sections))


def search_cost(exhaustive_points: int | None = None) -> Experiment:
    """Return the cost of each search; exhaustive ones of spaces with at most so many points."""
    from exegpt.reproduction import search_cost as cost

    def work(progress: Progress, quick: bool) -> cost.SearchCost:
        usual = cost.QUICK_POINTS if quick else cost.EXHAUSTIVE_POINTS
        return cost.reproduce(usual if exhaustive_points is None else exhaustive_points, progress, quick)

    return Experiment(_shown(work, cost.sections), cost.QUICK)


def samullm() -> Experiment:
    """Return SamuLLM's applications."""
    from exegpt.reproduction import samullm as paper

    return Experiment(_shown(paper.reproduce, paper.sections), paper.QUICK, paper.STANDS_ON)


def muxserve() -> Experiment:
    """Return MuxServe's workloads."""
    from exegpt.reproduction import muxserve as paper

    return Experiment(_shown(paper.reproduce, paper.sections), paper.QUICK, paper.STANDS_ON)


def learned_order() -> Experiment:
    """Return vLLM-LTR's orders."""
    from exegpt.reproduction import learned_order as paper

    def work(progress: Progress, quick: bool) -> paper.LearnedOrder:
        return paper.reproduce(progress, paper.RATES[:: len(paper.RATES) - 1] if quick else paper.RATES)

    return Experiment(_shown(work, paper.sections), "all but the first and the last of six rates")


def hermes(graphs: Path | None = None) -> Experiment:
    """Return Hermes' evaluation, of demand graphs from a file or the usual ones."""
    from exegpt.reproduction import hermes as paper
    from exegpt.reproduction.hermes_sections import sections

    def work(progress: Progress, quick: bool) -> paper.Hermes:
        return paper.reproduce(progress, graphs, quick=quick)

    return Experiment(_shown(work, sections), paper.QUICK, paper.STANDS_ON)


def seallm(sweeps: bool = False) -> Experiment:
    """Return SeaLLM's loads and replacements, or its sweeps."""
    from exegpt.reproduction import seallm as paper

    return Experiment(
        _shown(lambda progress, quick: paper.reproduce(progress, sweeps, quick), paper.sections),
        paper.QUICK,
        paper.STANDS_ON,
    )


EXEGPT: dict[str, Callable[[], Experiment]] = {
    "table4": table4,
    "table5": table5,
    "table6": table6,
    "table7": table7,
    "figure6": lambda: gains(("figure6",)),
    "figure7": figure7,
    "figure8": lambda: gains(("figure8",)),
    "figure9": figure9,
    "figure10": figure10,
    "figure11": figure11,
    "search-cost": search_cost,
}
"""The ExeGPT paper's tables and figures."""
SEVERAL_MODELS: dict[str, Callable[[], Experiment]] = {
    "muxserve": muxserve,
    "samullm": samullm,
    "hermes": hermes,
    "learned-order": learned_order,
    "seallm": seallm,
}
"""The papers about several models."""
ALL = EXEGPT | SEVERAL_MODELS
