"""A schedule in one line."""

from xcore.duration import duration_text
from xcore.policies.control import kinds
from xcore.quantity import counted
from xcore.specs.schedule import Schedule


def schedule_text(schedule: Schedule) -> str:
    """Return a schedule's policy, control variables and stages."""
    return f"{schedule.policy} {variables_text(schedule)}"


def variables_text(schedule: Schedule) -> str:
    """Return a schedule's control variables and stages, without the policy's name."""
    kind_of = kinds(type(schedule.control))
    variables: dict[str, int | str | None] = {
        name: value
        for name, value in schedule.control.variables.items()
        if not (kind_of[name] == "encode-micro-batches" and value == 1)
    }
    if schedule.admission != "reserve":
        variables["admission"] = schedule.admission
    if schedule.prefix_caching:
        variables["prefix_caching"] = "on"
    if schedule.speculation:
        variables["draft_tokens"] = schedule.speculation.drafted
    return " ".join(f"{name}={value}" for name, value in variables.items() if value) + f" on {stages_text(schedule)}"


def stages_text(schedule: Schedule) -> str:
    """Return a schedule's stages and replicas in brief: `PP2×TP4, EP`, `encode TP2 + decode PP3 of TP2,2 TP1`."""
    parts = []
    spec = schedule.model.spec
    for phase in ("encode", "both", "decode"):
        degrees = [stage.tp for stage in schedule.stages if stage.phase == phase]
        if degrees:
            ep = spec.attention_dp == 1 and any(spec.expert_parallel(tp, schedule.dtype) for tp in degrees)
            name = "" if phase == "both" else f"{phase} "
            parts.append(f"{name}{_pipeline_text(degrees)}{', EP' if ep else ''}")
    text = " + ".join(parts)
    text = f"{schedule.replicas} replicas of {text}" if schedule.replicas > 1 else text
    text += f", attention DP{spec.attention_dp}" if spec.attention_dp > 1 else ""
    return f"{text}, {counted(schedule.idle, 'device')} idle" if schedule.idle else text


def _pipeline_text(degrees: list[int]) -> str:
    """Return a pipeline's stages by their tensor-parallel degrees."""
    counts = {tp: degrees.count(tp) for tp in degrees}
    if len(degrees) == 1:
        return f"TP{degrees[0]}"
    if len(counts) == 1:
        return f"PP{len(degrees)}×TP{degrees[0]}"
    return f"PP{len(degrees)} of " + ",".join(f"{n} TP{tp}" if n > 1 else f"TP{tp}" for tp, n in counts.items())


def bound_text(schedule: Schedule) -> str:
    """Return the bounds for which a schedule was tuned, and the requests that meet them."""
    others = {"TTFT": schedule.ttft_bound_s, "TPOT": schedule.tpot_bound_s}
    kept = [f"{name} {duration_text(bound_s)}" for name, bound_s in others.items() if bound_s]
    texts = [f"{' and '.join(kept)} for {schedule.meaning.requests_text}"] if kept else []
    if schedule.latency_bound_s:
        texts.insert(0, f"{duration_text(schedule.latency_bound_s)} for {schedule.meaning.latency_text}")
    return ", ".join(texts) or "none"
