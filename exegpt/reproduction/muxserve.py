"""MuxServe's synthetic workloads: 19 LLaMAs on 32 A100s, replayed with its authors' placements.

Every LLM has its own number of Poisson requests at its rate. MuxServe and time sharing use the published meshes,
dedicated devices the published tensor-parallel degrees. Iteration times are MuxServe's own measurements. One figure is
fitted, on the popularity α = 0.7 only: the slowdown of concurrent jobs. Everything else is predicted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from exegpt.report.sections import Section
from exegpt.reproduction.muxserve_cases import (
    SLO_SCALES,
    STRATEGIES,
    PublishedModel,
    Served,
    Sums,
    read_measured,
    simulate,
)
from exegpt.reproduction.muxserve_placement import SearchedPlacement, searched_placement, searched_section
from exegpt.reproduction.public_data import public_data
from xcore.quantity import figure_text, signed_percent
from xcore.specs.iteration_profile import IterationProfile
from xprofiler.muxserve_tables import muxserve_profiles

STANDS_ON = "Simulated with MuxServe's published cost tables and placements; nothing here was run on a GPU."
CONTENTIONS = tuple(1 + part / 20 for part in range(7))
FITTED_ON = "0.7"
SHOWN_SCALES = (2, 8, 20)
QUICK = (
    "three of 20 cases (α = 0.7, 1.3 and 2.1 at scale 0.5), a fifth of their requests; contention fitted on the first"
)
QUICK_CASES, QUICK_PART = (("0.7", "0.5"), ("1.3", "0.5"), ("2.1", "0.5")), 5
"""What `quick` leaves out, the cases that it runs, and the divisor of their numbers of requests."""
TRUNCATED = {("0.9", "0.5"), ("0.9", "0.75"), ("0.9", "1.0")}
"""Cases in which time sharing was measured with a tenth of the requests."""


@dataclass(frozen=True)
class Case:
    """Measured and simulated results by strategy."""

    alpha: str
    scale: str
    measured: dict[str, Served]
    simulated: dict[str, Served]


@dataclass(frozen=True)
class CasesResult:
    """Every case, and the fitted contention."""

    contention: float
    cases: tuple[Case, ...]
    placements: tuple[SearchedPlacement, ...] = ()
    """Placements that are searched for each case, beside the published ones."""


def reproduce(progress: Callable[[int, int], None], quick: bool = False) -> CasesResult:
    """Replay every published case, or as in `QUICK`."""
    folder = public_data("MuxServe's", "muxserve")
    profiles, measured = muxserve_profiles(folder / "llama_a100_cost.json"), read_measured(folder)
    if quick:
        measured = {case: _fewer(measured[case]) for case in QUICK_CASES}
    steps = 2 * len(measured) + sum(alpha == FITTED_ON for alpha, _ in measured) * len(CONTENTIONS)
    done = 0

    def step() -> None:
        nonlocal done
        progress(done, steps)
        done += 1

    contention = _fitted(profiles, measured, step)
    cases, placements = [], []
    for (alpha, scale), strategies in measured.items():
        step()
        simulated = {name: simulate(profiles, rows, name, contention) for name, rows in strategies.items()}
        published = {name: Served.published(rows) for name, rows in strategies.items()}
        cases.append(Case(alpha, scale, published, simulated))
        step()
        placements.append(
            searched_placement(alpha, scale, profiles, strategies["muxserve"], simulated["muxserve"], contention)
        )
    return CasesResult(contention, tuple(cases), tuple(placements))


def _fewer(strategies: dict[str, list[PublishedModel]]) -> dict[str, list[PublishedModel]]:
    """Return a case with a part of each LLM's requests."""
    return {
        name: [replace(row, requests=max(1, row.requests // QUICK_PART)) for row in rows]
        for name, rows in strategies.items()
    }


def _fitted(
    profiles: dict[str, IterationProfile],
    measured: dict[tuple[str, str], dict[str, list[PublishedModel]]],
    step: Callable[[], None],
) -> float:
    """Return the contention with the smallest error of MuxServe's plain sums at α = 0.7."""
    fitted = [strategies["muxserve"] for (alpha, _), strategies in measured.items() if alpha == FITTED_ON]

    def off(contention: float) -> float:
        errors = []
        for rows in fitted:
            step()
            published = Sums.of((row.throughput, row.rate) for row in rows).plain
            errors.append(abs(np.log(simulate(profiles, rows, "muxserve", contention).sums.plain / published)))
        return fmean(errors)

    return min(CONTENTIONS, key=off)


def sections(result: CasesResult) -> list[Section]:
    """Return the ratios of every case with a summary, the sums, requests within SLOs, and searched placements."""
    placements = [searched_section(result.placements)] if result.placements else []
    return [_ratios(result), _sums(result), _in_time(result), *placements]


def _ratios(result: CasesResult) -> Section:
    rows, first, near, signs = [], 0, {"spatial": [0, 0], "temporal": [0, 0]}, [0, 0]
    for case in result.cases:
        cells = [f"{case.alpha} × {case.scale}"]
        best = all(
            getattr(case.simulated["muxserve"].sums, how) >= getattr(case.simulated[other].sums, how)
            for other in near
            for how in ("plain", "weighted")
        )
        first += best
        for other in near:
            ours, theirs = (of["muxserve"].sums.plain / of[other].sums.plain for of in (case.simulated, case.measured))
            cells += [figure_text(theirs), figure_text(ours), signed_percent(ours / theirs - 1)]
            if other == "spatial" or (case.alpha, case.scale) not in TRUNCATED:
                near[other][0] += abs(ours / theirs - 1) <= 0.2
                near[other][1] += 1
        ours, theirs = (of["temporal"].sums.plain / of["spatial"].sums.plain for of in (case.simulated, case.measured))
        if abs(theirs - 1) > 0.1 and (case.alpha, case.scale) not in TRUNCATED:
            signs[0] += (ours > 1) == (theirs > 1)
            signs[1] += 1
        rows.append((*cells, "yes" if best else "no"))
    notes = (
        f"MuxServe has the largest sums of both kinds in {first} of {len(result.cases)} cases (measured: in all).",
        *(f"MuxServe over {name}: within 20 % in {n} of {count}." for name, (n, count) in near.items()),
        f"Whether time sharing beats dedicated devices is predicted correctly in {signs[0]} of {signs[1]} cases.",
        f"Contention {result.contention:g}, fitted on α = {FITTED_ON} alone.",
    )
    columns = ("α × scale", "over spatial", "here", "off", "over temporal", "here", "off", "first")
    return Section("MuxServe: 19 LLaMAs on 32 A100s, sums of requests/s", columns, tuple(rows), notes)


def _sums(result: CasesResult) -> Section:
    """Return the measured and simulated sums."""
    rows: list[tuple[str, ...]] = []
    off: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    for case in result.cases:
        cells = [f"{case.alpha} × {case.scale}"]
        for name in STRATEGIES:
            ours, theirs = case.simulated[name].sums.plain, case.measured[name].sums.plain
            cells += [figure_text(theirs), figure_text(ours)]
            if name != "temporal" or (case.alpha, case.scale) not in TRUNCATED:
                off[name].append(ours / theirs - 1)
        rows.append(tuple(cells))
    columns = ("α × scale", *(head for name in STRATEGIES for head in (name, "here")))
    notes = tuple(
        f"{name}: {signed_percent(min(each))} to {signed_percent(max(each))}." for name, each in off.items() if each
    )
    return Section("sums of requests/s, measured and here", columns, tuple(rows), notes)


def _in_time(result: CasesResult) -> Section:
    """Return the shares of requests within SLOs of a few scales, measured and simulated."""
    places, names = [SLO_SCALES.index(scale) for scale in SHOWN_SCALES], tuple(STRATEGIES)
    rows, off, right, pairs = [], [], 0, 0
    kept = {name: [0, 0] for name in names}
    for case in result.cases:
        for name in names:
            both = case.measured[name].in_time, case.simulated[name].in_time
            off += [abs(both[0][place] - both[1][place]) for place in places]
            within = [_scale_of_nearly_all(share) for share in both]
            kept[name] = [count + bool(scale) for count, scale in zip(kept[name], within, strict=True)]
            cells = (f"{100 * share[place]:.1f}" for place in places for share in both)
            scales = (f"{scale}×" if scale else "–" for scale in within)
            rows.append((f"{case.alpha} × {case.scale}", name, *cells, *scales))
        for other in names[1:]:
            for place in places:
                theirs, ours = (
                    of["muxserve"].in_time[place] - of[other].in_time[place] for of in (case.measured, case.simulated)
                )
                pairs += abs(theirs) > 0.02
                right += abs(theirs) > 0.02 and theirs * ours > 0
    counts = ", ".join(f"{name} {measured} (here {here})" for name, (measured, here) in kept.items())
    notes = (
        f"Off by {100 * fmean(off):.1f} points on average, at most {100 * max(off):.1f}.",
        f"Where MuxServe and another differ by more than two points, the same is ahead here in {right} of {pairs}.",
        f"Cases with 99 % within a published scale: {counts}.",
    )
    heads = (head for scale in SHOWN_SCALES for head in (f"{scale}× %", "here"))
    columns = ("α × scale", "strategy", *heads, "99 % within", "here")
    return Section("Requests within multiples of their latency alone", columns, tuple(rows), notes)


def _scale_of_nearly_all(in_time: tuple[float, ...]) -> int | None:
    """Return the smallest published SLO scale within which 99 % of the requests are; None if none is."""
    return next((scale for scale, share in zip(SLO_SCALES, in_time, strict=True) if share >= 0.99), None)
