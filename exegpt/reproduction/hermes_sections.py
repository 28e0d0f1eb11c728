"""The printed sections of Hermes' evaluation."""

from dataclasses import astuple

from exegpt.report.sections import Section
from exegpt.reproduction import hermes_scale
from exegpt.reproduction.hermes import ACTIVE_ADAPTERS, FACTORS, PAPER, PAPER_ABLATIONS, Cached, Hermes
from exegpt.reproduction.hermes_setting import APPLICATIONS
from xcore.quantity import figure_text, signed_percent


def sections(result: Hermes) -> list[Section]:
    """Return the sections: completion, deadlines, ablations, caches and the knob."""
    return [
        _completion_section(result),
        *_scale_sections(result),
        Section(
            "Deadlines kept at 2x (paper: Hermes twice EDF's)",
            ("engine", "order", "all", *(f"{factor:g} x alone" for factor in FACTORS)),
            tuple((r.engine, r.order, _share(r.all), *map(_share, r.by_factor)) for r in result.in_time),
        ),
        Section(
            "Mean completion time at 3x without parts of Hermes",
            ("engine", "", "mean, s", "over Hermes", "paper"),
            tuple(
                (r.engine, r.name, figure_text(r.mean_s), signed_percent(r.over_hermes), _ablation_text(r.name))
                for r in result.ablations
            ),
            (
                f"Of two applications of different kinds, the one with the lower mean demand has the lower demand in "
                f"{_share(result.knowledge.ordered_pairs)} of all cases.",
                f"Error of the expected remaining demand at a later call: {result.knowledge.error_s:.1f} s from the "
                f"position alone, {result.knowledge.refined_error_s:.1f} s from the observed calls.",
            ),
        ),
        *_sensitivity_sections(result),
        _kinds_section(result),
        Section(
            "Caches beside the LLM, by Hermes' order",
            ("cache", "policy", "hits", "prewarming's hits over it", "mean, s", "with prewarming"),
            tuple(
                (r.cache, r.policy, _share(r.hits), signed_percent(r.hits_over), *_mean_cells(r)) for r in result.caches
            ),
            (
                "Paper: hits up to +111 % over LRU and +33 % over EPWQ, completion -18 and -6 %; LoRA (20 slots) +21 % "
                "over EPWQ.",
                f"LoRA: running calls use at most {ACTIVE_ADAPTERS} adapters.",
                f"{_share(result.knowledge.announceable)} of the LLM calls follow a call of another backend: they are "
                "announced.",
            ),
        ),
        Section(
            "Warming up a container while the previous unit runs, by the knob K",
            ("backend", "K", "saved, s", "wasted, s", "saved as printed, s", "wasted as printed, s"),
            tuple((r.backend, f"{r.knob:g}", *(f"{seconds:.2f}" for seconds in astuple(r)[2:])) for r in result.knobs),
            ("Paper, docker: saved 2.14 s at K = 0.1 to 0.47 s at 0.9, wasted 3.76 to 0.27 s: both fall.",),
        ),
    ]


def _sensitivity_sections(result: Hermes) -> list[Section]:
    """Return what the figures depend on."""
    return [
        Section(
            "The same with 8 at once, if runs of one application differ by a common log-normal factor",
            ("spread of its logarithm", "Hermes, s", "no refinement", "nor Gittins", "oracle"),
            tuple(
                (f"{r.spread:g}", figure_text(r.mean_s), *(signed_percent(over) for over in r.over_hermes.values()))
                for r in result.spreads
            ),
            ("Assumption: the paper doesn't say how far runs of one application differ; elsewhere the factor is 1.",),
        ),
        Section(
            "Mean completion time at 1x, 8 at once, by arrivals",
            ("arrivals", "Hermes, s", "vLLM, s", "Hermes over vLLM"),
            tuple(
                (r.arrivals, figure_text(r.hermes_s), figure_text(r.vllm_s), signed_percent(r.reduction))
                for r in result.real
            ),
            ("Of a trace: consecutive arrivals, stretched to the window. EXEGPT_DATA names the folder of the traces.",),
        ),
        Section(
            "Mean completion time at 3x, 8 at once, LLaMA-2-13B (paper: quite similar to 7B)",
            ("", "mean, s", "over Hermes", "paper, 7B"),
            tuple(
                (r.name, figure_text(r.mean_s), signed_percent(r.over_hermes), _ablation_text(r.name))
                for r in result.larger
            ),
            ("Assumption: seconds in proportion to the weights, 26 over 13.5 GB; 12,200 tokens of KV.",),
        ),
        Section(
            "Buckets of a demand (paper: the time is almost linear in them, completion doesn't gain)",
            ("buckets", "ranks of a demand, ms", "mean at 3x, s"),
            tuple((str(r.buckets), f"{r.policy_ms:.2f}", figure_text(r.mean_s)) for r in result.bucketings),
        ),
        Section(
            "Time of the policy, 8 at once (paper, Figure 15a: below 3 ms)",
            ("applications/min", "waiting calls", "to order them, ms"),
            tuple((f"{r.rate_per_minute:g}", f"{r.waiting:.1f}", f"{r.ms:.3f}") for r in result.policy_times),
        ),
    ]


def _kinds_section(result: Hermes) -> Section:
    """Return the source of the oracle's gain: each kind's change of its mean, weighted by its share of applications."""
    rows, gaps = [], {}
    for kind in result.kinds:
        gaps[kind.application] = kind.share * (kind.mean_s["Hermes"] - kind.mean_s["oracle"])
        head = (kind.application, _share(kind.share), figure_text(kind.service_s), f"{kind.deviation:.2f}")
        known = (figure_text(kind.expected_s), figure_text(kind.rank_s))
        rows.append((*head, *known, *(figure_text(mean_s) for mean_s in kind.mean_s.values())))
    orders = tuple(result.kinds[0].mean_s) if result.kinds else ()
    most = sorted(gaps, key=lambda name: -gaps[name])[:2]
    note = " and ".join(f"{name} {gaps[name] / sum(gaps.values()):.0%}" for name in most)
    facts = ("application", "of all", "service, s", "deviation / mean", "expected", "Gittins rank")
    columns = (*facts, *(f"{order}, s" for order in orders))
    return Section(
        "Mean completion time by application, 3x, 8 at once",
        columns,
        tuple(rows),
        (f"The oracle's savings come from {note}.",) if most else (),
    )


def _completion_section(result: Hermes) -> Section:
    rows = []
    for r in result.completions:
        paper = PAPER.get(r.order) if r.load == "1x" else None
        changes = (
            [signed_percent(r.mean_reduction), signed_percent(r.p95_reduction)] if r.order != "Hermes" else ["", ""]
        )
        published = [signed_percent(figure) for figure in paper] if paper else ["", ""]
        texts = (figure_text(r.mean_s), figure_text(r.p95_s), f"{r.over_alone:.2f}")
        rows.append((r.engine, r.load, r.order, *texts, changes[0], published[0], changes[1], published[1]))
    times = ("engine", "load", "order", "mean, s", "P95, s", "mean over alone")
    columns = (*times, "Hermes' mean", "paper", "Hermes' P95", "paper")
    notes = (
        f"Demands: {result.source}, correlated within a run; {APPLICATIONS} applications in 30, 15 and 10 minutes.",
        "VTC's clients are the kinds of applications, or the applications themselves: the paper doesn't say which.",
    )
    return Section("Completion times of applications", columns, tuple(rows), notes)


def _scale_sections(result: Hermes) -> list[Section]:
    """Return two 70B on eight GPUs, and the distributions on both settings."""
    rows = []
    for r in result.scale:
        paper = hermes_scale.PAPER.get(r.order) if r.load == "3x" else None
        ours = (r.mean_reduction, r.p95_reduction)
        changes = [*map(signed_percent, ours)] if not r.order.startswith("Hermes") else ["", ""]
        published = [*map(signed_percent, paper)] if paper else ["", ""]
        cells = (changes[0], published[0], changes[1], published[1])
        rows.append((r.load, r.order, figure_text(r.mean_s), figure_text(r.p95_s), *cells))
    columns = ("load", "order", "mean, s", "P95, s", "Hermes' mean", "paper", "Hermes' P95", "paper")
    of_7b = [(r.engine, r.load, r.order, r.quantiles_s) for r in result.completions if not r.order.endswith("each")]
    of_70b = [("two 70B", r.load, r.order, r.quantiles_s) for r in result.scale]
    quantiles = tuple((*case, *map(figure_text, seconds)) for *case, seconds in [*of_7b, *of_70b])
    return [
        Section(
            "Two LLaMA-3-70B at TP 4 on eight H800 (Figure 10)",
            columns,
            tuple(rows),
            (
                "Iterations by the roofline, batch and context. Demands count an output token as its part of an "
                f"iteration of {hermes_scale.limits().batch}; 'seconds alone': as an iteration of one, as Hermes' "
                "repository does.",
            ),
        ),
        Section(
            "Quantiles of completion times, s (Figures 9b and 10b)",
            ("engine", "load", "order", *(f"{quantile:.0%}" for quantile in hermes_scale.QUANTILES)),
            quantiles,
        ),
    ]


def _mean_cells(row: Cached) -> tuple[str, str]:
    return figure_text(row.mean_s), signed_percent(row.mean_change)


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _ablation_text(name: str) -> str:
    if name == "oracle":
        return "> -10 %"
    return signed_percent(PAPER_ABLATIONS[name]) if name in PAPER_ABLATIONS else ""
