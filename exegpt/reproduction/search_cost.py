"""The cost of searches (section 7.7): branch and bound, exhaustive search and Optuna over the paper's own spaces.

The bound is FasterTransformer's 30th percentile.
"""

from collections.abc import Callable
from dataclasses import dataclass

from exegpt.report.sections import Section
from exegpt.reproduction.faster_transformer import bounds, static_batches
from exegpt.reproduction.setup import WAA, PaperKeywords, Setup, paper_mode, setup
from xcore.quantity import figure_text
from xscheduler.tuned import Tuned

SCENARIOS = (
    ("opt-13b", "4xA40", "S"),
    ("opt-13b", "4xA40", "T"),
    ("gpt3-39b", "2x8xA40", "T"),
    ("gpt3-341b", "6x8xA40", "C1"),
)
SPACES = ("RRA", "RRA, a node's T_P", "WAA")
"""The spaces to search.

The second one is the paper's RRA without partial tensor parallelism and with one encoding micro-batch per stage. It is
small enough for an exhaustive search if the model is small.
"""
METHODS: dict[str, PaperKeywords] = {
    "branch and bound": {"method": "bnb"},
    "branch and bound, 5 %": {"method": "bnb", "tolerance": 0.05},
    "Optuna": {"method": "optuna"},
    "exhaustive": {"method": "exhaustive"},
}
PAPER = {"RRA": "3 s to 2 min", "WAA": "1 to 5 min", "exhaustive": "5 h to a day"}
EXHAUSTIVE_POINTS = 60_000
"""Default size of the largest space that is searched exhaustively: some twenty seconds."""


QUICK_POINTS = 10_000
QUICK_SCENARIOS = SCENARIOS[:2]
QUICK = f"two scenarios (OPT-13B) of four, and no exhaustive search of more than {QUICK_POINTS:,} points"
"""What `--quick` searches and leaves out."""


@dataclass(frozen=True)
class SearchCostRow:
    """One search of one space."""

    scenario: str
    bound_s: float
    space: str
    method: str
    points: int
    """Points in the space."""
    evaluations: int
    """Points simulated."""
    seconds: float
    throughput_seq_s: float
    """0 if the search found no point that meets the bound."""
    reached: float | None
    """Throughput over the best throughput of all searches of this space; None if no search found a point."""
    exact: bool
    """Whether the best is known, because the space was searched exhaustively too."""


@dataclass(frozen=True)
class SearchCost:
    """All searches."""

    rows: tuple[SearchCostRow, ...]


def reproduce(
    exhaustive_points: int = EXHAUSTIVE_POINTS,
    progress: Callable[[int, int], None] = lambda done, total: None,
    quick: bool = False,
) -> SearchCost:
    """Search every scenario's spaces by every method; exhaustively if they have at most `exhaustive_points`."""
    asked = [(names, space) for names in (QUICK_SCENARIOS if quick else SCENARIOS) for space in SPACES]
    rows: list[SearchCostRow] = []
    for done, (names, space) in enumerate(asked, 1):
        where = setup(*names)
        bound_s = bounds(static_batches(where))[1]
        assert bound_s is not None
        rows += _rows(where, bound_s, space, exhaustive_points)
        progress(done, len(asked))
    return SearchCost(tuple(rows))


def _rows(where: Setup, bound_s: float, space: str, exhaustive_points: int) -> list[SearchCostRow]:
    searches: dict[str, Tuned] = {}
    for name, how in METHODS.items():
        if name != "exhaustive" or searches["branch and bound"].search.space <= exhaustive_points:
            policies, fixed = _asked(where, space)
            if fixed:
                how = {**how, "encode_micro_batches": (1,)}
            searches[name] = paper_mode(where, bound_s, policies, fixed=fixed, **how)
    rates = {name: tuned.estimate.throughput_seq_s if tuned.estimate else 0.0 for name, tuned in searches.items()}
    best, exact = max(rates.values()), "exhaustive" in searches
    return [
        SearchCostRow(
            where.name,
            bound_s,
            space,
            name,
            tuned.search.space,
            tuned.search.evaluations,
            tuned.search.seconds,
            rates[name],
            rates[name] / best if best else None,
            exact,
        )
        for name, tuned in searches.items()
    ]


def _asked(where: Setup, space: str) -> tuple[tuple[str, ...], dict[str, int] | None]:
    """Return the policies of a space, and the variables that it fixes."""
    if space == "WAA":
        return WAA, None
    if space == "RRA":
        return ("rra",), None
    groups = {"tp_degree": where.cluster.devices_per_node, "tp_gpus": where.cluster.devices}
    return ("rra",), {"replicas": 1, **groups}


def sections(cost: SearchCost) -> list[Section]:
    """Return one table."""
    rows = tuple(
        (
            row.scenario,
            f"{figure_text(row.bound_s)} s",
            row.space,
            row.method,
            f"{row.points:,}",
            f"{row.evaluations:,}",
            f"{row.evaluations / row.points:.2%}",
            f"{row.seconds:.2f}",
            figure_text(row.throughput_seq_s) if row.throughput_seq_s else "–",
            "–" if row.reached is None else f"{row.reached:.1%}{'' if row.exact else ' of the best found'}",
            PAPER.get(row.method, "" if row.method == "Optuna" else PAPER[row.space[:3]]),
        )
        for row in cost.rows
    )
    heads = "scenario bound space method points simulated share seconds seq/s reached paper".split()
    note = "Seconds were measured on this machine. –: no schedule meets the bound."
    return [Section("search-cost: searches under FasterTransformer's 30th percentile", tuple(heads), rows, (note,))]
