"""The output of `exegpt tune --rate`: schedules that sustain an arrival rate, and the cheapest cluster that does."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from exegpt.api.tuning import ClusterOffer, RateAnswer, TuneProblem, headroom, tune_rates
from exegpt.cli import INFEASIBLE
from exegpt.cli.answer import answer_document, bounded_times, policy_name, print_best, print_export, print_search, whose
from exegpt.cli.load_day import curve_document, print_curve
from exegpt.cli.prefill_decode_answer import prefill_decode_document, print_prefill_decode
from exegpt.cli.prices import TOKEN_PRICES, print_price, token_prices
from xcore.console import output
from xcore.console.schedule_text import schedule_text, variables_text
from xcore.duration import format_duration
from xcore.quantity import figure_text
from xcore.specs.price import NO_TOKEN_PRICE
from xscheduler.drafts import gain_texts
from xscheduler.export import Target
from xscheduler.setting_search import infeasible_text, reasons

if TYPE_CHECKING:
    from xscheduler.goodput import Goodput
    from xscheduler.open_tune import Rated
    from xscheduler.settings import Setting
    from xscheduler.tuned import Alternative


def answer(problem: TuneProblem) -> int:
    """Search each cluster for schedules that sustain the rates within the bounds, and print; return the exit code."""
    answers = tune_rates(problem)
    if problem.options.json:
        documents = [rate_document(answer, problem) for answer in answers]
        documents[0] |= curve_document(problem, answers[0].offers[0])
        output.emit(documents[0] if len(documents) == 1 else frontier_document(documents, problem))
    elif len(answers) == 1:
        print_offers(answers[0].offers, problem)
        print_curve(problem, answers[0].offers[0])
    else:
        _print_frontier(answers, problem)
    return 0 if any(answer.offers[0].feasible for answer in answers) else INFEASIBLE


def rate_document(answer: RateAnswer, problem: TuneProblem) -> dict[str, object]:
    """Return the object that `tune --rate --json` prints for one bound and one rate."""
    bound = {"latency_bound_s": answer.bound_s}
    return offers_document(answer.offers, problem.target, problem.options.seed) | bound


def frontier_document(documents: list[dict[str, object]], problem: TuneProblem) -> dict[str, object]:
    """Return the object for several bounds or rates."""
    setting, seed = problem.settings[0], problem.options.seed
    return {"frontier": documents, "provenance": output.provenance(setting.profile, seed)}


def offer_document(offer: ClusterOffer, target: Target | None, seed: int) -> dict[str, object]:
    """Return the object that `tune --rate --json` prints for a cluster."""
    rated = offer.rated
    best = rated.sustained[rated.tuned.schedule.policy].goodput if rated.tuned.schedule else None

    def rates(policy: str) -> dict[str, float | None]:
        sustained = rated.sustained.get(policy)
        return {
            "goodput_seq_s": sustained.goodput.low if sustained else None,
            "goodput_high_seq_s": sustained.goodput.high if sustained else None,
            "steady_throughput_seq_s": sustained.steady.throughput_seq_s if sustained else None,
        }

    return answer_document(rated.tuned, offer.setting, target, offer.export, seed, rates) | {
        "advice": headroom(rated),
        "rate_seq_s": rated.rate_seq_s,
        "goodput_seq_s": best.low if best else None,
        "goodput_high_seq_s": best.high if best else None,
        "highest_rate_seq_s": rated.highest_rate_seq_s,
        "cluster": offer.setting.cluster.name,
        **prefill_decode_document(offer),
        **({"speculation": offer.drafting.document} if offer.drafting else {}),
        "price_per_hour": offer.price_hour,
        **(offer.token_price.document if offer.token_price else NO_TOKEN_PRICE),
    }


def offers_document(offers: list[ClusterOffer], target: Target | None, seed: int) -> dict[str, object]:
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
        if best.drafting:
            output.listed("Speculative decoding:", gain_texts(best.drafting))
        print_price(best.price_hour, best.token_price)
        if problem.target:
            print_export(problem.target, best.export, bounded_times(problem.search))
    print_prefill_decode(best, problem)
    print_search(rated.tuned)
    if problem.options.out and schedule:
        print(f"Schedule written to {problem.options.out}{whose(problem, rated.tuned)}.")
    print_best(rated.tuned, setting)


def _print_frontier(answers: list[RateAnswer], problem: TuneProblem) -> None:
    """Print a row with the best schedule on the best cluster for each bound and rate."""
    offers = [offer for answer in answers for offer in answer.offers]
    output.notes(a for offer in offers for a in (*offer.setting.assumptions, *offer.rated.tuned.assumptions))
    priced, setting = problem.prices is not None, problem.settings[0]
    prices = ["price/h", *TOKEN_PRICES] if priced else []
    rows = []
    for answer in answers:
        best = answer.offers[0]
        rate = f"{figure_text(answer.rate_seq_s, 6)}/s"
        rows.append([format_duration(answer.bound_s), rate, *_offer_row(best, priced)])
    columns = ["bound", "rate", "cluster", *prices, "goodput/s", "latency", "schedule"]
    title = f"{setting.model.name}, {setting.workload.name}, the best schedule under each bound at each rate"
    output.table(columns, rows, title)
    for answer in answers:
        if problem.target and answer.offers[0].feasible:
            print(f"Under {format_duration(answer.bound_s)} at {figure_text(answer.rate_seq_s, 6)}/s:")
            print_export(problem.target, answer.offers[0].export, bounded_times(problem.search))
    met = [answer for answer in answers if answer.offers[0].feasible]
    if problem.options.out and met:
        last = met[-1]
        at = f" under {format_duration(last.bound_s)} at {figure_text(last.rate_seq_s, 6)}/s"
        print(f"Schedule{at} written to {problem.options.out}{whose(problem, last.offers[0].rated.tuned)}.")


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
