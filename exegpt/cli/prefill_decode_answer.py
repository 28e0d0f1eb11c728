"""The output of `exegpt tune --disaggregated`: prefill replicas beside decode replicas."""

from exegpt.api.tuning import ClusterOffer, TuneProblem
from xcore.console import output
from xcore.document import to_dict
from xcore.duration import format_duration
from xcore.quantity import figure_text
from xcore.specs.schedule import Schedule
from xscheduler.exports.disaggregated_launch import ROUTERS


def prefill_decode_document(offer: ClusterOffer) -> dict[str, object]:
    """Return what `--json` has of prefill and decode replicas: nothing unless they were asked for."""
    if offer.prefill_decode is None:
        return {}
    answer = offer.prefill_decode.answer
    if answer is None:
        return {"prefill_decode": None}
    sides = {"prefill": answer.plan.prefill, "decode": answer.plan.decode}
    document: dict[str, object] = {
        "layout": answer.plan.name,
        "devices": answer.plan.devices,
        "sustains": answer.goodput_seq_s >= offer.rated.rate_seq_s,
        "goodput_seq_s": answer.goodput_seq_s,
        "estimate": to_dict(answer.estimate),
        "transfer_s": answer.transfer_s,
        "rate_seq_s": answer.rate_seq_s,
        "layouts": offer.prefill_decode.layouts,
        **{side: _side(schedule) for side, schedule in sides.items()},
    }
    if offer.prefill_decode.commands:
        document["commands"] = {command.side: command.text for command in offer.prefill_decode.commands}
    return {"prefill_decode": document}


def _side(schedule: Schedule) -> dict[str, int]:
    variables = {name: value for name, value in schedule.control.decisions.items() if value is not None}
    allocation = {"replicas": schedule.replicas, "tp_degree": schedule.stages[0].tp}
    return {**allocation, **variables, "kv_blocks": schedule.kv_blocks}


def print_prefill_decode(offer: ClusterOffer, problem: TuneProblem) -> None:
    """Print the best layout of prefill and decode replicas beside the best schedule, if it was asked for."""
    if offer.prefill_decode is None:
        return
    answer = offer.prefill_decode.answer
    if answer is None:
        where, layouts = offer.setting.cluster.name, offer.prefill_decode.layouts
        why = f"none of {layouts} layouts on {where} keeps the bounds"
        return output.note(
            f"Prefill and decode replicas: {why if layouts else f'{where} does not hold a replica of each side'}."
        )
    estimate, rate = answer.estimate, figure_text(answer.rate_seq_s, 6)
    less = answer.rate_seq_s < offer.rated.rate_seq_s
    missed = f"they do not sustain {figure_text(offer.rated.rate_seq_s, 6)} requests/s; " if less else ""
    times = [
        f"{name} {format_duration(seconds)}"
        for name, seconds in (
            ("latency", estimate.latency_s),
            ("TTFT", estimate.ttft_bounded_s),
            ("TPOT", estimate.tpot_bounded_s),
        )
        if seconds is not None
    ]
    lines = [
        f"{_compared(offer)}, of {offer.prefill_decode.layouts} layouts",
        f"{missed}at {rate} requests/s: {', '.join(times)}",
        f"keys and values of a prompt take {format_duration(answer.transfer_s)} to a decode replica on average",
        "accuracy: not compared with a deployment whose decode replicas only decode",
    ]
    if problem.settings[0].divides:
        lines.append("experts: the devices of a replica have a part of each; other divisions are not searched for it")
    output.listed(f"Prefill and decode replicas: {answer.plan.name}", lines)
    if problem.target and offer.prefill_decode.commands:
        for command in offer.prefill_decode.commands:
            each = (
                f"each of {command.replicas} {command.side} replicas"
                if command.replicas > 1
                else f"the {command.side} replica"
            )
            print(f"Launch command for {each}, {problem.target.engine}:")
            print(command.text)
        print(f"  {ROUTERS[problem.target.engine]}")


def _compared(offer: ClusterOffer) -> str:
    """Return their goodput, beside that of the best schedule whose replicas do both."""
    assert offer.prefill_decode and offer.prefill_decode.answer
    goodput, other = offer.prefill_decode.answer.goodput_seq_s, offer.rated.highest_rate_seq_s
    text = f"goodput {figure_text(goodput)}/s"
    if not other:
        return f"{text}; no schedule above keeps the bounds"
    return f"{text}, {figure_text(goodput / other, 3)} times that of the best schedule above ({figure_text(other)}/s)"
