"""`exegpt tune --rate`: what serves requests that arrive at a rate, and on which cluster that is cheapest."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exegpt.cli import INFEASIBLE
from exegpt.errors import InputError
from exegpt.quantity import figure_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from exegpt.cli.answer import Delivery
    from exegpt.cli.export import Target
    from exegpt.cli.inputs import Setting
    from exegpt.price import Prices
    from exegpt.workload import Workload
    from xscheduler.arrivals import Arrivals
    from xscheduler.goodput import Bounds, Goodput
    from xscheduler.open_tune import Rated
    from xscheduler.tuned import Alternative

PATTERNS = ("poisson", "trace")


@dataclass(frozen=True)
class Offer:
    """A cluster's best answer at the rate, and what the cluster costs."""

    setting: "Setting"
    rated: "Rated"
    price_hour: float | None

    @property
    def feasible(self) -> bool:
        """Whether a schedule sustains the rate."""
        return self.rated.tuned.schedule is not None

    @property
    def price_million(self) -> float | None:
        """The price of a million output tokens at the rate."""
        if self.price_hour is None or not self.feasible:
            return None
        tokens_hour = 3600 * self.rated.rate_seq_s * self.setting.workload.output.mean
        return 1e6 * self.price_hour / tokens_hour

    @property
    def order(self) -> tuple[Any, ...]:
        """Those that sustain the rate come first, the cheapest of them before all; without prices, the smallest."""
        devices = self.setting.cluster.devices
        return (not self.feasible, devices if self.price_hour is None else self.price_hour, devices)


def answer(
    settings: "list[Setting]",
    bound_s: float,
    rate: str | None,
    pattern: str,
    seed: int,
    prices: "Prices | None",
    asked: dict[str, Any],
    delivery: "Delivery",
) -> int:
    """Find what sustains the rate on each cluster within the bound (seconds), and deliver; returns the exit code."""
    from exegpt import document
    from exegpt.cli import output
    from exegpt.cli.tune_report import write_report
    from exegpt.price import price_per_hour
    from xscheduler.goodput import Bounds

    if asked["tolerance"]:
        raise InputError(f"--tolerance {asked['tolerance']} is of searches without a rate: leave it out with --rate.")
    if asked["admission"] != ("reserve",):
        raise InputError("Searches at a rate replay schedules that reserve: leave --admission or --rate out.")
    for setting in settings:
        if prices is not None:
            price_per_hour(prices, setting.cluster)  # a missing price is said before the work
    per_second = asked_rate(settings[0].workload, rate)
    bounds = Bounds(bound_s if math.isfinite(bound_s) else None, asked["ttft_s"], asked["tpot_s"])
    runnable = delivery.target.policies if delivery.target else ()
    offers = [offer(one, bounds, per_second, arrivals(one, pattern, seed), prices, asked, runnable) for one in settings]
    offers.sort(key=lambda one: one.order)
    found = offers[0].rated.tuned
    if delivery.out and found.schedule:
        document.write(delivery.out, found.schedule)
    if delivery.report:
        write_report(delivery.report, offers[0].setting, [found], [bound_s], asked)
    if delivery.json:
        output.emit(offers_document(offers, delivery.target, seed))
    else:
        print_offers(offers, bound_s, delivery)
    return 0 if found.schedule else INFEASIBLE


def asked_rate(workload: "Workload", rate: str | None) -> float:
    """Requests per second: what was typed, or the trace's own rate."""
    from exegpt.trace import parse_rate

    if rate is not None:
        return parse_rate(rate)
    if workload.arrival_rate is None:
        raise InputError(
            f"Workload {workload.name} has no arrivals: pass a trace with an arrival column, or Poisson arrivals "
            "with --rate."
        )
    return workload.arrival_rate


def arrivals(setting: "Setting", pattern: str, seed: int) -> "Arrivals":
    """The pattern in which requests arrive."""
    from xscheduler.arrivals import Arrivals

    workload = setting.workload
    context = None if setting.model.architecture == "t5" else setting.model.context
    if pattern == "poisson":
        return Arrivals.poisson(workload, context, seed, setting.cluster.devices)
    if not workload.requests or max(r.arrival_s for r in workload.requests) <= 0:
        raise InputError(f"Workload {workload.name} has no arrivals: pass a trace with an arrival column.")
    return Arrivals.traced(workload, context)


def offer(
    setting: "Setting",
    bounds: "Bounds",
    rate: float,
    coming: "Arrivals",
    prices: "Prices | None",
    asked: dict[str, Any],
    runnable: tuple[str, ...] = (),
) -> Offer:
    """The best answer on one cluster; `runnable` policies are preferred where several are as good."""
    from exegpt.cli import output
    from exegpt.price import price_per_hour
    from xscheduler.open_tune import tune_at

    price = None if prices is None else price_per_hour(prices, setting.cluster)
    with output.progress(f"{setting.cluster.name} at {figure_text(rate, 6)}/s") as progress:
        found = tune_at(
            setting.model,
            setting.cluster,
            setting.workload,
            setting.profile,
            coming,
            bounds,
            rate,
            bound=asked["bound"],
            policies=asked["policies"],
            method=asked["method"],
            kv_dtype=setting.kv_dtype,
            runnable=runnable,
            progress=progress,
        )
    return Offer(setting, found, price)


def offer_document(one: Offer, target: "Target | None", seed: int) -> dict[str, Any]:
    """The object that `tune --rate --json` prints for a cluster."""
    from exegpt.cli.answer import answer_document

    rated = one.rated
    best = rated.sustained[rated.tuned.schedule.policy].goodput if rated.tuned.schedule else None
    document = answer_document(rated.tuned, one.setting, target)
    document["provenance"]["seed"] = seed
    for alternative in document["alternatives"]:
        found = rated.sustained.get(alternative["policy"])
        alternative["goodput_seq_s"] = found.goodput.low if found else None
        alternative["goodput_high_seq_s"] = found.goodput.high if found else None
        alternative["steady_throughput_seq_s"] = found.steady.throughput_seq_s if found else None
    return document | {
        "advice": headroom(rated),
        "rate_seq_s": rated.rate_seq_s,
        "goodput_seq_s": best.low if best else None,
        "goodput_high_seq_s": best.high if best else None,
        "highest_rate_seq_s": rated.highest_rate_seq_s,
        "cluster": one.setting.cluster.name,
        "price_per_hour": one.price_hour,
        "price_per_million_output_tokens": one.price_million,
    }


def headroom(rated: "Rated") -> list[str]:
    """How far the answer is from its goodput, and how full and busy its devices are at the rate."""
    from xscheduler.advice import use_of

    schedule, estimate = rated.tuned.schedule, rated.tuned.estimate
    if schedule is None or estimate is None:
        return []
    goodput = rated.sustained[schedule.policy].goodput
    sure = f", and no more than {figure_text(goodput.high)}/s" if goodput.high > goodput.low else ""
    times = figure_text(goodput.low / rated.rate_seq_s)
    return [
        f"headroom: the goodput of {figure_text(goodput.low)}/s{sure}, is {times} times the rate",
        use_of((schedule, estimate)),
    ]


def offers_document(offers: list[Offer], target: "Target | None", seed: int) -> dict[str, Any]:
    """The best offer's document; of several clusters, with all of them under `clusters`."""
    documents = [offer_document(one, target, seed) for one in offers]
    if len(offers) == 1:
        return documents[0]
    priced = offers[0].feasible and offers[0].price_hour is not None
    return documents[0] | {"clusters": documents, "cheapest": offers[0].setting.cluster.name if priced else None}


def print_offers(offers: list[Offer], bound_s: float, delivery: "Delivery") -> None:
    """The clusters side by side where there are several, then every policy on the best of them."""
    from exegpt.cli import output
    from exegpt.cli.answer import print_export, print_search, reasons
    from exegpt.duration import format_duration
    from exegpt.report.schedule_text import schedule_text

    best = offers[0]
    for text in dict.fromkeys(a for one in offers for a in (*one.setting.assumptions, *one.rated.tuned.assumptions)):
        output.note(f"· {text}")
    if len(offers) > 1:
        _print_clusters(offers)
    setting, rated = best.setting, best.rated
    title = f"{setting.model.name} on {setting.cluster.name}, {setting.workload.name}, {format_duration(bound_s)}, "
    columns = ["policy", "goodput/s", "steady/s", "latency", "TTFT p99", "schedule"]
    output.table(columns, _policy_rows(rated), title + f"{figure_text(rated.rate_seq_s, 6)} requests/s")
    schedule = rated.tuned.schedule
    if schedule is None:
        output.note(infeasible_rate_text(offers, bound_s))
    else:
        at = f" on {setting.cluster.name}" if len(offers) > 1 else ""
        sustained = (
            one for one in sorted(rated.tuned.alternatives, key=_reached(rated)) if one.policy in rated.sustained
        )
        output.listed(f"Best{at}: {schedule_text(schedule)}", reasons(sustained))
        output.listed("Advice:", headroom(rated))
        if delivery.target:
            print_export(schedule, delivery.target)
    print_search(rated.tuned)
    if delivery.out and schedule:
        print(f"Schedule written to {delivery.out}.")


def _print_clusters(offers: list[Offer]) -> None:
    from exegpt.cli import output

    priced = offers[0].price_hour is not None
    if not priced:
        output.note("· no prices: clusters by their number of devices; --price FILE compares what they cost")
    columns = ["cluster", *(["price/h", "price/M tokens"] if priced else []), "goodput/s", "latency", "schedule"]
    rows = [_offer_row(one, priced) for one in offers]
    output.table(columns, rows, f"Clusters at {figure_text(offers[0].rated.rate_seq_s, 6)} requests/s")


def infeasible_rate_text(offers: list[Offer], bound_s: float) -> str:
    """Why no schedule sustains the rate, and what can be reached."""
    from exegpt.cli.answer import infeasible_text

    best = max(offers, key=lambda one: one.rated.highest_rate_seq_s)
    highest, rate = best.rated.highest_rate_seq_s, best.rated.rate_seq_s
    if not highest and not best.rated.sustained:
        return infeasible_text(best.rated.tuned, bound_s)
    where = f" (on {best.setting.cluster.name})" if len(offers) > 1 else ""
    reached = f"the highest rate that any does is {figure_text(highest)}/s{where}"
    return f"No schedule sustains {figure_text(rate, 6)}/s within the bounds: {reached}."


def _reached(rated: "Rated") -> "Callable[[Alternative], tuple[float, bool]]":
    """A key by which policies stand by falling goodput, the answer's before those that reach as much."""
    reached = {policy: found.goodput_seq_s for policy, found in rated.sustained.items()}
    best = rated.tuned.schedule.policy if rated.tuned.schedule else None
    return lambda alternative: (-reached.get(alternative.policy, -1.0), alternative.policy != best)


def _policy_rows(rated: "Rated") -> list[list[str]]:
    from exegpt.cli import output
    from exegpt.report.schedule_text import variables_text

    rows = []
    for other in sorted(rated.tuned.alternatives, key=_reached(rated)):
        found, e = rated.sustained.get(other.policy), other.estimate
        if found is None:
            rows.append([other.policy, "–", "–", "–", "–", other.reason])
            continue
        rates = [_goodput_text(found.goodput), output.number(found.steady.throughput_seq_s)]
        times = [output.seconds(e.latency_s), output.seconds(e.ttft_p99_s)] if e else ["–", "–"]
        rows.append([other.policy, *rates, *times, variables_text(found.schedule)])
    return rows


def _goodput_text(goodput: "Goodput") -> str:
    """The rates between which a goodput lies, one where they don't differ."""
    from exegpt.cli import output

    low, high = output.number(goodput.low), output.number(goodput.high)
    return low if low == high else f"{low}–{high}"


def _offer_row(one: Offer, priced: bool) -> list[str]:
    from exegpt.cli import output
    from exegpt.report.schedule_text import schedule_text

    tuned = one.rated.tuned
    prices = [output.number(one.price_hour), output.number(one.price_million)] if priced else []
    if tuned.schedule is None or tuned.estimate is None:
        reached = one.rated.highest_rate_seq_s
        return [one.setting.cluster.name, *prices, output.number(reached), "–", "does not sustain the rate"]
    goodput = one.rated.sustained[tuned.schedule.policy].goodput
    figures = [_goodput_text(goodput), output.seconds(tuned.estimate.latency_s)]
    return [one.setting.cluster.name, *prices, *figures, schedule_text(tuned.schedule)]
