"""Figure 10: ExeGPT over FasterTransformer on lengths of real data sets, OPT-13B and GPT-3 39B.

The paper's data sets aren't at hand. Public lengths of the same kinds stand for them: multi30k for WMT (translation),
ShareGPT for Alpaca (conversation), and MLPerf's for CNN/DailyMail (the same articles, tokens of Llama-3.1). A tenth of
the rows, drawn at random, is what schedules are found for. The other nine tenths are what they then run on, by their
steady states, in which inputs and outputs are independent. Rows beyond a model's context are left out.

The paper doesn't say which two bounds it took: here they are FasterTransformer's 30th percentile, and none. Its bars
have no numbers, so its statements are compared.
"""

import csv
import gzip
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np

from exegpt.report.sections import Section
from exegpt.reproduction.faster_transformer import best_under, bounds, static_batches
from exegpt.reproduction.public_data import public_data
from exegpt.reproduction.setup import WAA, Setup, paper_mode, setup
from xcore.arrays import Integers
from xcore.quantity import counted, figure_text, signed_percent
from xcore.specs.workload import RequestLengths, Workload
from xcore.traces.fit_context import fit_context
from xscheduler.allocation import uniform_stages
from xsimulator import estimate
from xsimulator.steady import static

DATA = {
    "WMT": ("lengths", "multi30k_en_de.csv", "en_tokens", "de_tokens"),
    "Alpaca": ("lengths", "sharegpt_8k.csv", "num_prefill_tokens", "num_decode_tokens"),
    "CNN": ("measured", "mlperf/lengths_llama3-1-8b-datacenter.csv.gz", "input_length", "output_length"),
}
"""The paper's data sets: folder, file, and the columns of inputs and outputs of each stand-in."""
MODELS = (("opt-13b", "4xA40"), ("gpt3-39b", "2x8xA40"))
QUICK = "one model (OPT-13B) of two"
"""What `quick` leaves out."""
SCHEDULED, SEED = 0.1, 0
PAPER = {"mean": 4.4, "largest": 8.7}
PAPER_AHEAD = {"WMT": "WAA", "Alpaca": "RRA", "CNN": "WAA"}


@dataclass(frozen=True)
class Figure10Row:
    """One data set and model under one bound; sequences/s on the rows that schedules weren't found for."""

    data: str
    model: str
    rows: int
    bound_s: float | None
    ft_seq_s: float
    rra_seq_s: float | None
    waa_seq_s: float | None

    @property
    def gain(self) -> float:
        """Return the better of RRA and WAA over FasterTransformer."""
        return max(self.rra_seq_s or 0.0, self.waa_seq_s or 0.0) / self.ft_seq_s

    @property
    def ahead(self) -> str:
        """Return the better policy."""
        return "WAA" if (self.waa_seq_s or 0.0) > (self.rra_seq_s or 0.0) else "RRA"


@dataclass(frozen=True)
class Figure10:
    """All rows."""

    rows: tuple[Figure10Row, ...]


def reproduce(progress: Callable[[int, int], None] = lambda done, total: None, quick: bool = False) -> Figure10:
    """Search and evaluate every data set and model; InputError if the lengths are missing."""
    paths = {name: public_data("the lengths of", folder) / file for name, (folder, file, *_) in DATA.items()}
    cases, rows = [(place, name) for place in (MODELS[:1] if quick else MODELS) for name in DATA], []
    for done, (place, name) in enumerate(cases, 1):
        rows += case(setup(*place, "S"), name, paths[name])
        progress(done, len(cases))
    return Figure10(tuple(rows))


def case(where: Setup, name: str, path: Path) -> list[Figure10Row]:
    """Return a model's rows for one data set."""
    scheduled, run = split(name, path, where)
    planned, ran = replace(where, workload=scheduled), replace(where, workload=run)
    batches, rows = static_batches(planned), []
    scenario = ran.scenario(uniform_stages(where.model, where.cluster, where.cluster.devices_per_node), form="paper")
    for bound_s in (bounds(batches)[1], None):
        batch = best_under(batches, bound_s).batch
        ft = static.outcome(scenario, batch).throughput
        rates = [_rate(planned, ran, bound_s, policies) for policies in (("rra",), WAA)]
        rows.append(Figure10Row(name, where.model.name, len(run.requests or ()), bound_s, ft, *rates))
    return rows


def read_lengths(path: Path, prompt: str, answer: str) -> list[RequestLengths]:
    """Return the lengths in two columns of a CSV file, which may be compressed; rows without output are left out."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        lengths = [(int(row[prompt]), int(row[answer])) for row in csv.DictReader(file)]
    return [RequestLengths(*pair) for pair in lengths if min(pair) > 0]


def split(name: str, path: Path, where: Setup) -> tuple[Workload, Workload]:
    """Return the rows that schedules are found for, and the others, without those beyond the context."""
    whole, _ = fit_context(Workload.from_requests(name, read_lengths(path, *DATA[name][2:])), where.model)
    rows = whole.requests or ()
    order = np.random.default_rng(SEED).permutation(len(rows))
    first = round(SCHEDULED * len(rows))

    def at(places: Integers) -> Workload:
        return Workload.from_requests(name, [rows[place] for place in places])

    return at(order[:first]), at(order[first:])


def _rate(planned: Setup, ran: Setup, bound_s: float | None, policies: tuple[str, ...]) -> float | None:
    schedule = paper_mode(planned, bound_s, policies=policies).schedule
    return estimate(schedule, ran.profile, ran.workload).throughput_seq_s if schedule else None


def sections(figure: Figure10) -> list[Section]:
    """Return the rows, and the paper's statements beside ours."""
    gains = [row.gain for row in figure.rows]
    ours = {"mean": fmean(gains), "largest": max(gains)}
    statements = [
        (f"{name} gain over FT", figure_text(ours[name]), figure_text(said), signed_percent(ours[name] / said - 1))
        for name, said in PAPER.items()
    ]
    for name, said in PAPER_AHEAD.items():
        rows = [row for row in figure.rows if row.data == name]
        count = sum(row.ahead == said for row in rows)
        statements.append((f"{said} ahead on {name}", f"{count} of {counted(len(rows), 'row')}", "generally", ""))
    heads = ("data", "model", "rows run", "bound", "FT", "RRA", "WAA", "gain")
    return [
        Section(
            "figure10: lengths of public data sets that stand for the paper's, sequences/s",
            heads,
            tuple(_cells(row) for row in figure.rows),
            (
                "Stand-ins: multi30k for WMT, ShareGPT for Alpaca, MLPerf's CNN/DailyMail in tokens of Llama-3.1. "
                f"Schedules are found for {SCHEDULED:.0%} of the rows, and evaluated on the others.",
            ),
        ),
        Section("figure10: the paper's statements", ("", "here", "paper", "deviation"), tuple(statements)),
    ]


def _cells(row: Figure10Row) -> tuple[str, ...]:
    bound = "∞" if row.bound_s is None else f"{figure_text(row.bound_s)} s"
    rates = map(figure_text, (row.ft_seq_s, row.rra_seq_s, row.waa_seq_s, row.gain))
    return (row.data, row.model, f"{row.rows:,}", bound, *rates)
