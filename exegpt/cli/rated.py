"""The output of `exegpt tune --rate`: schedules that sustain an arrival rate, and the cheapest cluster that does."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from exegpt.api.tuning import ClusterOffer, TuneProblem, headroom, tune_rate
from exegpt.cli import INFEASIBLE
from exegpt.cli.answer import answer_document, bounded_times, policy_name, print_best, print_export, print_search, whose
from xcore.console import output
from xcore.console.schedule_text import schedule_text, variables_text
from xcore.duration import format_duration
from xcore.quantity import figure_text
from xcore.specs.price import NO_TOKEN_PRICE, TokenPrice
from xscheduler.export import Target
from xscheduler.setting_search import infeasible_text, reasons

if TYPE_CHECKING:
    from xscheduler.goodput import Goodput
    from xscheduler.open_tune import Rated
    from xscheduler.settings import Setting
    from xscheduler.tuned import Alternative

TOKEN_PRICES = ("price/M output", "price/M tokens")
"""The columns of `token_prices`."""


def answer(problem: TuneProblem) -> int:
    """Search each cluster for schedules that sustain the rate within the bound, and print; return the exit code."""
    offers = tune_rate(problem)
    if problem.options.json:
        output.emit(offers_document(offers, problem.target, problem.options.seed))
    else:
        print_offers(offers, problem)
    return 0 if offers[0].feasible else INFEASIBLE


def offer_document(offer: ClusterOffer, target: Target | None, seed: int) -> dict[str, Any]:
    """Return the object that `tune --rate --json` prints for a cluster."""
    rated = offer.rated
    best = rated.sustained[rated.tuned.schedule.policy].goodput if rated.tuned.schedule else None
    document = answer_document(rated.tuned, offer.setting, target, offer.export)
    document["provenance"]["seed"] = seed
    for alternative in document["alternatives"]:
        sustained = rated.sustained.get(alternative["policy"])
        alternative["goodput_seq_s"] = sustained.goodput.low if sustained else None
        alternative["goodput_high_seq_s"] = sustained.goodput.high if sustained else None
        alternative["steady_throughput_seq_s"] = sustained.steady.throughput_seq_s if sustained else None
    return document | {
        "advice": headroom(rated),
        "rate_seq_s": rated.rate_seq_s,
        "goodput_seq_s": best.low if best else None,
        "goodput_high_seq_s": best.high if best else None,
        "highest_rate_seq_s": rated.highest_rate_seq_s,
        "cluster": offer.setting.cluster.name,
        "price_per_hour": offer.price_hour,
        **(offer.token_price.document if offer.token_price else NO_TOKEN_PRICE),
    }


def offers_document(offers: list[ClusterOffer], target: Target | None, seed: int) -> dict[str, Any]:
    """Return the best offer's document; with several clusters, all offers are under `clusters`."""
    documents = [offer_document(offer, target, seed) for offer in offers]
    if len(offers) == 1:
        return documents[0]
    priced = offers[0].feasible and offers[0].price_hour is not None
    return documents[0] | {"clusters": documents, "cheapest": offers[0].setting.cluster.name if priced else None}


def print_offers(offers: list[ClusterOffer], problem: TuneProblem) -> None:
    """Print a table of the clusters if there are several, then every policy on the best of them."""
    best, bound_s = offers[0], problem.bounds_s[0]
    output.notes(a for offer in offers for a in (*offer.setting.assumptions, *offer.rated.tuned.assumptions))
    if len(offers) > 1:
        _print_clusters(offers)
    setting, rated = best.setting, best.rated
    title = f"{setting.model.name} on {setting.cluster.name}, {setting.workload.name}, {format_duration(bound_s)}, "
    per_token, which = problem.search.tpot_s is not None, f"p{problem.search.bound.percentile:g}"
    columns = [
        "policy",
        "goodput/s",
        "steady/s",
        "latency",
        f"TTFT {which}",
        *[f"TPOT {which}"][:per_token],
        "schedule",
    ]
    output.table(
        columns, _policy_rows(rated, setting, per_token), title + f"{figure_text(rated.rate_seq_s, 6)} requests/s"
    )
    schedule = rated.tuned.schedule
    if schedule is None:
        output.note(infeasible_rate_text(offers, bound_s))
    else:
        at = f" on {setting.cluster.name}" if len(offers) > 1 else ""
        sustained = (
            alternative
            for alternative in sorted(rated.tuned.alternatives, key=_reached(rated))
            if alternative.policy in rated.sustained
        )
        output.listed(f"Best{at}: {schedule_text(schedule)}", reasons(sustained))
        output.listed("Advice:", headroom(rated))
        print_price(best.price_hour, best.token_price)
        if problem.target:
            print_export(problem.target, best.export, bounded_times(problem.search))
    print_search(rated.tuned)
    if problem.options.out and schedule:
        print(f"Schedule written to {problem.options.out}{whose(problem, rated.tuned)}.")
    print_best(rated.tuned, setting)


def print_price(price_hour: float | None, price: TokenPrice | None) -> None:
    """Print the price per hour and per million tokens; nothing without prices."""
    if price_hour is None or price is None:
        return
    million, total = token_prices(price)
    print(
        f"Price: {output.number(price_hour)} per hour, {million} per million output tokens, {total} per million tokens "
        "with the prompts'."
    )


def _print_clusters(offers: list[ClusterOffer]) -> None:
    priced = offers[0].price_hour is not None
    if not priced:
        output.note(
            "· without prices, clusters are ranked by their number of devices; --price FILE ranks them by price"
        )
    columns = ["cluster", *(["price/h", *TOKEN_PRICES] if priced else []), "goodput/s", "latency", "schedule"]
    rows = [_offer_row(offer, priced) for offer in offers]
    output.table(columns, rows, f"Clusters at {figure_text(offers[0].rated.rate_seq_s, 6)} requests/s")


def infeasible_rate_text(offers: list[ClusterOffer], bound_s: float | None) -> str:
    """Return why no schedule sustains the rate, and the highest sustained rate."""
    best = max(offers, key=lambda offer: offer.rated.highest_rate_seq_s)
    highest, rate = best.rated.highest_rate_seq_s, best.rated.rate_seq_s
    if not highest and not best.rated.sustained:
        return infeasible_text(best.rated.tuned, bound_s)
    where = f" (on {best.setting.cluster.name})" if len(offers) > 1 else ""
    reached = f"the highest sustained rate is {figure_text(highest)}/s{where}"
    return f"No schedule sustains {figure_text(rate, 6)}/s within the bounds: {reached}."


def _reached(rated: "Rated") -> Callable[["Alternative"], tuple[float, bool]]:
    """Return a key that sorts policies by falling goodput; among equals, the answer's policy comes first."""
    reached = {policy: sustained.goodput_seq_s for policy, sustained in rated.sustained.items()}
    best = rated.tuned.schedule.policy if rated.tuned.schedule else None
    return lambda alternative: (-reached.get(alternative.policy, -1.0), alternative.policy != best)


def _policy_rows(rated: "Rated", setting: "Setting", per_token: bool) -> list[list[str]]:
    rows = []
    for other in sorted(rated.tuned.alternatives, key=_reached(rated)):
        sustained, e = rated.sustained.get(other.policy), other.estimate
        if sustained is None:
            rows.append([other.policy, *["–"] * (4 + per_token), other.reason])
            continue
        rates = [_goodput_text(sustained.goodput), output.number(sustained.steady.throughput_seq_s)]
        times = (e.latency_s, e.ttft_bounded_s, e.tpot_bounded_s) if e else (None, None, None)
        texts = [output.seconds(seconds) for seconds in times[: 2 + per_token]]
        rows.append([policy_name(other, setting), *rates, *texts, variables_text(sustained.schedule)])
    return rows


def token_prices(price: TokenPrice | None) -> list[str]:
    """Return the cells of the columns `TOKEN_PRICES`."""
    return [output.number(price.output), output.number(price.total)] if price else ["–", "–"]


def _goodput_text(goodput: "Goodput") -> str:
    """Return the lower and upper rate of a goodput, or one rate if they are equal."""
    low, high = output.number(goodput.low), output.number(goodput.high)
    return low if low == high else f"{low}–{high}"


def _offer_row(offer: ClusterOffer, priced: bool) -> list[str]:
    tuned = offer.rated.tuned
    prices = [output.number(offer.price_hour), *token_prices(offer.token_price)] if priced else []
    if tuned.schedule is None or tuned.estimate is None:
        reached = offer.rated.highest_rate_seq_s
        return [offer.setting.cluster.name, *prices, output.number(reached), "–", "does not sustain the rate"]
    goodput = offer.rated.sustained[tuned.schedule.policy].goodput
    figures = [_goodput_text(goodput), output.seconds(tuned.estimate.latency_s)]
    return [offer.setting.cluster.name, *prices, *figures, schedule_text(tuned.schedule)]
