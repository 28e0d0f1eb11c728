"""`exegpt plan`: several models on one cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exegpt.cli import INFEASIBLE, options

if TYPE_CHECKING:
    from exegpt.app.planning import Proposal
    from exegpt.plan import Plan, PlannedModel
    from exegpt.price import Prices


def plan(
    file: Annotated[Path, typer.Argument(help="YAML: the models, each with its workload, rate and bound.")],
    cluster: Annotated[str, typer.Option("--cluster", "-c", help="local, 4xA40, 2x8xA100-80GB, or a YAML file.")],
    method: Annotated[
        str,
        typer.Option(
            help="exegpt (budgets searched together), muxserve, temporal, seallm, spatial, or best: the best of these. "
            "samullm: stages, for numbers of requests."
        ),
    ] = "exegpt",
    dtype: options.DTYPE = None,
    kv_dtype: options.KV_DTYPE = None,
    memory_fraction: options.MEMORY_FRACTION = None,
    engine: options.ENGINE = None,
    threads: options.THREADS = None,
    price: Annotated[
        Path | None, typer.Option(help="YAML: device kind → price per device-hour; printed for every method.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan to this file.")] = None,
    json: options.JSON = False,
) -> int:
    """Share a cluster's devices out among several models, so that each meets its bound at its rate.

    Example: exegpt plan models.yaml --cluster 4xA100-80GB --method best

    Example: exegpt plan application.yaml --cluster 8xA100-80GB --method samullm
    """
    from exegpt import document
    from exegpt.app.choices import check_choice
    from exegpt.app.files import check_distinct, check_output
    from exegpt.app.models_file import read_demands
    from exegpt.app.planning import METHODS, propose
    from exegpt.app.settings import set_threads
    from exegpt.price import price_per_hour, read_prices
    from exegpt.report import output

    check_output(out)
    check_distinct((out,), (file, cluster, price))
    prices = read_prices(price) if price else None
    check_choice(method, (*METHODS, "samullm", "best"), "--method")
    set_threads(threads)
    how = {"dtype": dtype, "kv_dtype": kv_dtype, "memory_fraction": memory_fraction, "engine": engine}
    if method == "samullm":
        from exegpt.cli.plan_stages import plan_stages

        return plan_stages(file, cluster, how, out, json)
    demands = read_demands(file, cluster, **how)
    if prices:
        price_per_hour(prices, demands[0].setting.cluster)  # refused before a search, not after it
    proposals = propose(demands, demands[0].setting.cluster, METHODS if method == "best" else (method,))
    best = proposals[0].plan
    if best and out:
        document.write(out, best)
    if json:
        output.emit(_document(proposals, [a for demand in demands for a in demand.setting.assumptions]))
        return 0 if best else INFEASIBLE
    for demand in demands:
        output.notes(f"{demand.name}: {assumption}" for assumption in demand.setting.assumptions)
    _print(proposals, prices)
    if best and out:
        print(f"Plan written to {out}.")
    return 0 if best else INFEASIBLE


def _document(proposals: "list[Proposal]", assumptions: list[str]) -> dict[str, Any]:
    """The object that `plan --json` prints."""
    from exegpt.document import to_dict
    from exegpt.report import output

    best = proposals[0].plan
    return {
        "plan": to_dict(best) if best else None,
        "methods": [
            {"method": p.method, "plan": to_dict(p.plan) if p.plan else None, "reason": p.why_not} for p in proposals
        ],
        "why": proposals[0].why_before(proposals[1]) if best and len(proposals) > 1 else None,
        "assumptions": assumptions,
        "provenance": output.provenance(),
    }


def _print(proposals: "list[Proposal]", prices: "Prices | None") -> None:
    """The best plan's models, then what all methods come to and why the best is."""
    from exegpt.report import output

    best, *others = proposals
    if best.plan is None:
        output.note(best.why_not)
    else:
        print_plan(best.plan)
    if not others:
        return
    price = ("price/h",) if prices else ()
    columns = ("method", "rates could be", "all in time", "done in", "devices", *price)
    if rows := [_method_row(proposal, prices) for proposal in proposals if proposal.plan]:
        output.table(columns, rows, "methods")
    for other in others:
        if other.plan is None:
            output.note(f"{other.method}: {other.why_not}")
    second = next((other for other in others if other.plan), None)
    if best.plan and second:
        print(f"{best.method} is the best: {best.why_before(second)}.")


def _method_row(proposal: "Proposal", prices: "Prices | None") -> list[str]:
    from exegpt.duration import duration_text
    from exegpt.price import price_per_hour
    from exegpt.quantity import figure_text, percent_text

    plan = proposal.plan
    assert plan is not None
    used = plan.cluster.devices - plan.free
    shares = [model.attainment for model in plan.models if model.attainment is not None]
    cost = [figure_text(price_per_hour(prices, plan.cluster) * used / plan.cluster.devices)] if prices else []
    return [
        proposal.method,
        "–" if proposal.headroom is None else f"{figure_text(proposal.headroom)} times",
        percent_text(min(shares)) if shares else "–",
        "–" if proposal.seconds is None else duration_text(proposal.seconds),
        f"{used} of {plan.cluster.devices}",
        *cost,
    ]


def print_plan(plan: "Plan") -> None:
    """Each model's budget and what it gives."""
    from exegpt.report import output

    free = f", {plan.free} of them free" if plan.free else ""
    columns = ("model", "devices", "shared by", "asked", "goodput/s", "done in", "latency", "tokens/s", "schedule")
    title = f"{plan.method}: {len(plan.models)} models on {plan.cluster.name}{free}"
    output.table(columns, [_row(model) for model in plan.models], title)


def _row(model: "PlannedModel") -> list[str]:
    from exegpt.duration import duration_text, format_duration
    from exegpt.quantity import figure_text
    from exegpt.report.schedule_text import schedule_text

    what = f"{model.requests:,} requests" if model.requests else f"{figure_text(model.rate_seq_s or 0.0)}/s"
    bound_s, estimate = model.schedule.latency_bound_s, model.estimate
    return [
        model.name,
        ranges(model.devices),
        _share_text(model),
        what if bound_s is None else f"{what} in {format_duration(bound_s)}",
        "–" if model.goodput_seq_s is None else figure_text(model.goodput_seq_s),
        "–" if model.seconds is None else duration_text(model.seconds),
        "–" if estimate.latency_s is None else duration_text(estimate.latency_s),
        figure_text(estimate.throughput_tok_s),
        schedule_text(model.schedule),
    ]


def _share_text(model: "PlannedModel") -> str:
    """How it has its devices: alone, taking turns, by priority, or decoding on some of the multiprocessors."""
    if model.share is None:
        return "–"
    return f"space, {model.share.decode:.0%}" if model.share.by == "space" else model.share.by


def ranges(devices: tuple[int, ...]) -> str:
    """Device numbers in short: 0–3, 8."""
    parts: list[list[int]] = []
    for device in devices:
        if parts and device == parts[-1][1] + 1:
            parts[-1][1] = device
        else:
            parts.append([device, device])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in parts)
