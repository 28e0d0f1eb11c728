"""Tables and charts of plans, for terminals and reports."""

from typing import TYPE_CHECKING

from xcore.quantity import counted

if TYPE_CHECKING:
    from exegpt.report.gantt import Gantt
    from xcore.specs.cluster_plan import Plan, PlannedModel
    from xcore.specs.price import Prices
    from xmulti.files.stage_plan import StagedNode, StagePlan
    from xmulti.plans.planning import Proposal
    from xmulti.stages.stage_planning import StageProposal

_COLUMNS = (
    "model",
    "node",
    "devices",
    "shared by",
    "asked",
    "goodput/s",
    "in time",
    "done in",
    "latency",
    "normalised",
    "tokens/s",
    "schedule",
)


def why_best(proposals: "list[Proposal]") -> str:
    """Return why the best plan is better than the second; empty if there are fewer than two."""
    best, second = proposals[0], next((other for other in proposals[1:] if other.found), None)
    return f"{best.method} is best: {best.why_before(second)}" if best.found and second else ""


def methods_table(proposals: "list[Proposal]", prices: "Prices | None") -> tuple[list[str], list[list[str]]]:
    """Return the columns, and a row for each method that has a plan."""
    done = "loaded and done in" if any(proposal.stages for proposal in proposals) else "done in"
    columns = ["method", "headroom", "all in time", "normalised", done, "devices", "GPU-hours"]
    return columns + ["price/h"] * bool(prices), [_method_row(p, p.found, prices) for p in proposals if p.found]


def _method_row(proposal: "Proposal", found: "Plan | StagePlan", prices: "Prices | None") -> list[str]:
    from xcore.duration import duration_text
    from xcore.quantity import figure_text, percent_text

    devices = found.cluster.devices if found.cluster else 0
    used, models = devices - found.free, proposal.plan.models if proposal.plan else ()
    shares = [model.attainment for model in models if model.attainment is not None]
    normalised = [model.normalised_latency for model in models if model.normalised_latency is not None]
    return [
        proposal.method,
        "–" if proposal.headroom is None else f"{figure_text(proposal.headroom)} times",
        percent_text(min(shares)) if shares else "–",
        figure_text(max(normalised)) if normalised else "–",
        "–" if proposal.seconds is None else duration_text(proposal.seconds),
        f"{used} of {devices}",
        f"{used} per hour" if proposal.gpu_hours is None else figure_text(proposal.gpu_hours),
        *([figure_text(price_in_use(found, prices))] if prices else []),
    ]


def price_in_use(plan: "Plan | StagePlan", prices: "Prices | None") -> float | None:
    """Return the price per hour of the devices in use; None without prices."""
    from xcore.specs.price import price_per_hour

    if not prices or not plan.cluster:
        return None
    return price_per_hour(prices, plan.cluster) * (1 - plan.free / plan.cluster.devices)


def print_plan(plan: "Plan | StagePlan") -> None:
    """Print each model's budget with its performance, or each stage with its models, and a chart of the devices."""
    from exegpt.report import gantt
    from xcore.console import output

    output.table(*plan_table(plan))
    print(gantt.text(picture(plan)))


def picture(plan: "Plan | StagePlan") -> "Gantt":
    """Return the chart of the models on each device over time."""
    from exegpt.report import gantt
    from xmulti.files.stage_plan import StagePlan

    return gantt.of_stages(plan) if isinstance(plan, StagePlan) else gantt.of_plan(plan)


def plan_table(plan: "Plan | StagePlan") -> tuple[list[str], list[list[str]], str]:
    """Return the columns, a row for each model or stage, and a title."""
    from xmulti.files.stage_plan import StagePlan

    return _stages_table(plan) if isinstance(plan, StagePlan) else _models_table(plan)


def _models_table(plan: "Plan") -> tuple[list[str], list[list[str]], str]:
    """Return the table of models; columns that are empty for all models are omitted."""
    from xcore.quantity import NOTHING

    rows = [row for replicas in plan.replicas.values() for row in _rows(plan, replicas)]
    kept = [place for place in range(len(_COLUMNS)) if any(row[place] != NOTHING for row in rows)]
    free = f", {plan.free} of them free" if plan.free else ""
    title = f"{plan.method}: {counted(len(plan.replicas), 'model')} on {plan.cluster.name}{free}"
    return [_COLUMNS[place] for place in kept], [[row[place] for place in kept] for row in rows], title


def _rows(plan: "Plan", replicas: "tuple[PlannedModel, ...]") -> list[list[str]]:
    """Return a model's row; if it has several replicas, a row for each, and the model's figures in the first one."""
    from xcore.quantity import NOTHING

    first, *others = [_row(plan, model) for model in replicas]
    of_replicas = {_COLUMNS.index(name) for name in ("node", "devices", "shared by", "schedule")}
    rows = [[text if place in of_replicas else NOTHING for place, text in enumerate(row)] for row in others]
    return [first, *([f"  replica {number}", *row[1:]] for number, row in enumerate(rows, 2))]


def _row(plan: "Plan", model: "PlannedModel") -> list[str]:
    from xcore.console.schedule_text import schedule_text
    from xcore.duration import duration_text, format_duration
    from xcore.quantity import NOTHING, figure_text, percent_text

    what = f"{model.requests:,} requests" if model.requests else f"{figure_text(model.rate_seq_s or 0.0)}/s"
    bound_s, estimate = model.schedule.latency_bound_s, model.estimate
    return [
        model.name,
        ", ".join(map(str, plan.nodes_of(model))) if plan.cluster.nodes > 1 else NOTHING,
        ranges(model.devices),
        _share_text(model),
        what if bound_s is None else f"{what} in {format_duration(bound_s)}",
        figure_text(model.goodput_seq_s),
        percent_text(model.attainment),
        "–" if model.seconds is None else duration_text(model.seconds),
        "–" if estimate.latency_s is None else duration_text(estimate.latency_s),
        figure_text(model.normalised_latency),
        figure_text(estimate.throughput_tok_s),
        schedule_text(model.schedule),
    ]


def _share_text(model: "PlannedModel") -> str:
    """Return how a model shares its devices: not at all, by time, by priority, or with its decoding share by space."""
    if model.share is None:
        return "–"
    return f"space, {model.share.decode:.0%}" if model.share.by == "space" else model.share.by


def ranges(devices: tuple[int, ...]) -> str:
    """Return device numbers as ranges: 0–3, 8."""
    parts: list[list[int]] = []
    for device in devices:
        if parts and device == parts[-1][1] + 1:
            parts[-1][1] = device
        else:
            parts.append([device, device])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in parts)


def others_text(proposals: "list[StageProposal]") -> tuple[str, ...]:
    """Return sentences with the times of the heuristics' plans."""
    from xcore.duration import duration_text
    from xmulti.stages.stage_planning import METHODS

    return tuple(
        f"For comparison, {METHODS[other.method]} (--method {other.method}): {duration_text(other.plan.seconds)}."
        for other in proposals[1:]
    )


def _stages_table(plan: "StagePlan") -> tuple[list[str], list[list[str]], str]:
    from xcore.duration import duration_text

    rows = [
        [duration_text(stage.start_s), duration_text(stage.end_s), ", ".join(_node_text(node) for node in stage.nodes)]
        for stage in plan.stages
    ]
    title = f"{plan.method}: {counted(len(plan.stages), 'stage')} on {counted(plan.devices, 'device')}"
    return ["from", "to", "models"], rows, title


def _node_text(node: "StagedNode") -> str:
    """Return a node with its GPUs as text: `chat 0–3 (2×TP2)`."""
    return f"{node.name} {ranges(tuple(sorted(node.devices)))} ({node.dp}×TP{node.tp})"
