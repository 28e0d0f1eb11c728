"""A schedule in one line."""

from exegpt.duration import duration_text
from exegpt.schedule import Schedule

_VARIABLES = (
    "encode_batch",
    "decode_iterations",
    "decode_batch",
    "micro_batches",
    "encode_micro_batches",
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefills_per_step",
)


def schedule_text(schedule: Schedule) -> str:
    """Its policy, control variables and stages."""
    return f"{schedule.policy} {variables_text(schedule)}"


def variables_text(schedule: Schedule) -> str:
    """Its control variables and stages, for where the policy is said already."""
    own = {name: getattr(schedule, name) for name in _VARIABLES}
    if schedule.encode_micro_batches == 1:
        own["encode_micro_batches"] = None
    return " ".join(f"{name}={value}" for name, value in own.items() if value) + f" on {stages_text(schedule)}"


def stages_text(schedule: Schedule) -> str:
    """Its stages in brief: `2×TP4`, `encode TP2 + decode 2×TP1`, and how many replicas of them."""
    parts = []
    for phase in ("encode", "both", "decode"):
        degrees = [stage.tp for stage in schedule.stages if stage.phase == phase]
        counts = [f"{n}×TP{tp}" if n > 1 else f"TP{tp}" for tp in dict.fromkeys(degrees) for n in [degrees.count(tp)]]
        if counts:
            parts.append(("" if phase == "both" else f"{phase} ") + ",".join(counts))
    text = " + ".join(parts)
    return f"{schedule.replicas} replicas of {text}" if schedule.replicas > 1 else text


def bound_text(schedule: Schedule) -> str:
    """The latency bound that it was found for, and whom that is about."""
    bound_s = schedule.latency_bound_s
    return f"{duration_text(bound_s)} ({schedule.bound})" if bound_s else "none"
