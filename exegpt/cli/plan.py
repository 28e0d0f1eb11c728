"""`exegpt plan`: several models on one cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exegpt.cli import INFEASIBLE, options
from exegpt.errors import InputError

if TYPE_CHECKING:
    from exegpt.app.multimodel.planning import Proposal
    from exegpt.plan import Plan
    from exegpt.price import Prices
    from xsimulator.multimodel.call_replay import CallReplay


def plan(
    file: Annotated[Path, typer.Argument(help="YAML file of models, each with workload, rate and latency bound.")],
    cluster: Annotated[str, typer.Option("--cluster", "-c", help="local, 4xA40, 2x8xA100-80GB, or a YAML file.")],
    method: Annotated[
        str,
        typer.Option(
            help="exegpt (joint search of all budgets), muxserve, temporal, seallm, alpaserve, spatial, samullm "
            "(stages, for numbers of requests), or best: the best of these."
        ),
    ] = "exegpt",
    dtype: options.DTYPE = None,
    kv_dtype: options.KV_DTYPE = None,
    memory_fraction: options.MEMORY_FRACTION = None,
    engine: options.ENGINE = None,
    threads: options.THREADS = None,
    price: Annotated[
        Path | None, typer.Option(help="YAML: device kind → price per device-hour. Adds a price to every method.")
    ] = None,
    advice: Annotated[
        bool,
        typer.Option(
            "--advice/--no-advice",
            help="Also plan with one more device (or node), and with a looser bound of the tightest model.",
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan to this file.")] = None,
    report: options.REPORT = None,
    json: options.JSON = False,
) -> int:
    """Divide a cluster's devices among several models, so that each meets its latency bound at its request rate.

    Example: exegpt plan models.yaml --cluster 4xA100-80GB --method best

    Example: exegpt plan application.yaml --cluster 8xA100-80GB --method samullm
    """
    from dataclasses import asdict

    from exegpt import document
    from exegpt.app.choices import check_choice
    from exegpt.app.files import check_distinct, check_output
    from exegpt.app.multimodel.beside_stages import ASSUMED, beside_stages
    from exegpt.app.multimodel.demands import read_demands
    from exegpt.app.multimodel.expected_calls import expected_calls
    from exegpt.app.multimodel.model_frontier import Frontiers
    from exegpt.app.multimodel.models_file import is_application, read_models
    from exegpt.app.multimodel.plan_advice import advice_about, gains
    from exegpt.app.multimodel.planning import METHODS, propose
    from exegpt.app.settings import set_threads, threads_of_device
    from exegpt.cli.plan_report import write_plan_report
    from exegpt.duration import duration_text
    from exegpt.price import price_per_hour, read_prices
    from exegpt.report import output

    check_output(out)
    check_output(report)
    check_distinct((out, report), (file, cluster, price))
    prices = read_prices(price) if price else None
    check_choice(method, (*METHODS, "samullm", "best"), "--method")
    set_threads(threads or threads_of_device(cluster))
    how = {"dtype": dtype, "kv_dtype": kv_dtype, "memory_fraction": memory_fraction, "engine": engine}
    if method == "samullm" or (method == "best" and is_application(document.read_yaml(file, "models"))):
        from exegpt.cli.plan_stages import plan_stages

        if advice or prices:
            option = "--advice" if advice else "--price"
            raise InputError(f"{option} is for budgets, but only stages are planned here: omit it.")
        return plan_stages(file, cluster, how, out, report, json)
    demands = read_demands(file, cluster, **how)
    expected = expected_calls(file, read_models(file))
    if prices:
        price_per_hour(prices, demands[0].setting.cluster)  # refused before a search, not after it
    where, methods = demands[0].setting.cluster, METHODS if method == "best" else (method,)
    frontiers = Frontiers()
    proposals = propose(demands, where, methods, frontiers)
    now = proposals[0].plan or proposals[0].near
    if method == "best":
        proposals = beside_stages(proposals, demands, file, cluster, **how)
    best, budgets = proposals[0].found, proposals[0].plan
    profiles = {demand.name: demand.setting.profile for demand in demands}
    replay = expected.replayed(budgets, profiles) if budgets and expected else None
    gained = gains(demands, where, methods, now, frontiers) if advice else []
    assumptions = [f"{demand.name}: {text}" for demand in demands for text in demand.setting.assumptions]
    assumptions += simulated_alone(budgets)
    assumptions += [ASSUMED] if any(proposal.stages for proposal in proposals) else []
    if best and out:
        document.write(out, best)
    if report:
        write_plan_report(report, proposals, [gain.text(now) for gain in gained], prices, assumptions)
    if json:
        advised = [asdict(gain) | {"text": gain.text(now)} for gain in gained]
        output.emit(_document(proposals, advised, prices, assumptions, replay))
        return 0 if best else INFEASIBLE
    output.notes(assumptions)
    _print(proposals, prices)
    if replay:
        print(f"{len(replay.finish_s):,} calls of the application: done in {duration_text(replay.seconds)}.")
    if gained:
        output.listed(
            "Advice about budgets:" if proposals[0].stages else "Advice:", [gain.text(now) for gain in gained]
        )
    elif advice:
        output.note("· advice: none, since a machine can't get more devices, and no model has a bound to loosen")
    elif about := advice_about(demands, where):
        print(f"The effect of {about}: --advice.")
    if best and out:
        print(f"Plan written to {out}.")
    return 0 if best else INFEASIBLE


def simulated_alone(best: "Plan | None") -> list[str]:
    """Notes about parts of the best plan that are simulated but can't be run that way."""
    if best is None:
        return []
    spatial = [model for model in best.models if model.share and model.share.by == "space"]
    names = [model.name for model in spatial if best.cluster.is_cpu or len(model.devices) > 1]
    if not names:
        return []
    return [
        f"shares of multiprocessors ({', '.join(names)}) are simulated only: on CPUs, and on several devices at once, "
        "models take turns under `exegpt run` and `exegpt serve` (--method temporal plans for time sharing)"
    ]


def _document(
    proposals: "list[Proposal]",
    advice: list[dict[str, Any]],
    prices: "Prices | None",
    assumptions: list[str],
    replay: "CallReplay | None",
) -> dict[str, Any]:
    """The object that `plan --json` prints."""
    from exegpt.document import to_dict
    from exegpt.report import output

    best = proposals[0].found
    return {
        "plan": to_dict(best) if best else None,
        "methods": [_method(proposal, prices) for proposal in proposals],
        "why": proposals[0].why_before(proposals[1]) if best and len(proposals) > 1 else None,
        "application": {"calls": len(replay.finish_s), "seconds": replay.seconds} if replay else None,
        "advice": advice,
        "assumptions": assumptions,
        "provenance": output.provenance(),
    }


def _method(proposal: "Proposal", prices: "Prices | None") -> dict[str, Any]:
    from exegpt.cli.plan_tables import price_in_use
    from exegpt.document import to_dict

    plan = proposal.found
    return {
        "method": proposal.method,
        "plan": to_dict(plan) if plan else None,
        "reason": proposal.why_not,
        "seconds": proposal.seconds,
        "gpu_hours": proposal.gpu_hours,
        "price_per_hour": price_in_use(plan, prices) if plan else None,
    }


def _print(proposals: "list[Proposal]", prices: "Prices | None") -> None:
    """Print the best plan's models, then all methods' results and why the best one is best."""
    from exegpt.cli.plan_tables import methods_table, print_plan, why_best
    from exegpt.report import output

    best, *others = proposals
    if best.found is None:
        output.note(best.why_not)
    else:
        print_plan(best.found)
    columns, rows = methods_table(proposals, prices)
    if rows:
        output.table(columns, rows, "methods" if others else "all models together")
    for other in others:
        if other.found is None:
            output.note(f"{other.method}: {other.why_not}")
    if why := why_best(proposals):
        print(f"{why}.")
