"""Which schedules can be run with which models; the others can be planned with."""

import itertools

from exegpt.errors import InputError
from exegpt.model import ModelSpec
from exegpt.models.weights import DTYPES
from exegpt.policies import make_policy
from exegpt.schedule import Schedule


def why_not(schedule: Schedule, model: ModelSpec) -> str | None:
    """Why this schedule can't be run with this model: one sentence with the way out; None where it can."""
    try:
        schedule.check_model(model)
        make_policy(schedule)
    except InputError as error:
        return str(error)
    return _dtypes(schedule) or _devices(schedule) or _degrees(schedule, model) or _layers(schedule, model)


def _dtypes(schedule: Schedule) -> str | None:
    if schedule.dtype not in DTYPES or schedule.kv_dtype != schedule.dtype:
        return (
            f"The schedule has dtype {schedule.dtype} and kv_dtype {schedule.kv_dtype}: runs need both to be alike, "
            f"{' or '.join(DTYPES)}; tune with --dtype."
        )
    return None


def _devices(schedule: Schedule) -> str | None:
    devices = sorted(device for stage in schedule.stages for device in stage.devices)
    if devices != list(range(len(devices))):
        return f"The schedule's stages have the devices {devices}: each from 0 on must be in exactly one; tune again."
    wrong = next((stage for stage in schedule.stages if len(stage.devices) != stage.tp), None)
    if wrong:
        return f"A stage of degree {wrong.tp} has the devices {list(wrong.devices)}: it needs {wrong.tp}; tune again."
    return None


def _degrees(schedule: Schedule, model: ModelSpec) -> str | None:
    for tp in sorted({stage.tp for stage in schedule.stages}):
        possible = model.tp_degrees(tp)
        if tp not in possible:
            return (
                f"The schedule has stages of tensor-parallel degree {tp}, and model '{model.name}' can be cut into "
                f"{', '.join(map(str, possible))}: tune again."
            )
    return None


def _layers(schedule: Schedule, model: ModelSpec) -> str | None:
    """Every line of stages must hold every layer that works in its phase once, in order, and no other."""
    for phase in sorted({stage.phase for stage in schedule.stages}):
        line = [stage for stage in schedule.stages if stage.phase == phase]
        encodes, decodes = phase != "decode", phase != "encode" or not model.encoder_layers
        stacks = (
            ("encoder layers", [stage.encoder_layers for stage in line], model.encoder_layers * encodes),
            ("layers", [stage.decoder_layers for stage in line], model.layers * decodes),
        )
        for name, held, count in stacks:
            if not _whole(held, count):
                ranges = ", ".join("none" if layers is None else "{}:{}".format(*layers) for layers in held)
                return (
                    f"The stages of phase {phase} hold the {name} {ranges} of the {count} of model '{model.name}': "
                    "each must be in exactly one, in order; tune again."
                )
    return None


def _whole(held: list[tuple[int, int] | None], layers: int) -> bool:
    """Whether stages hold so many layers, each at least one; none at all where there are none."""
    if not layers:
        return not any(held)
    parts = [one for one in held if one is not None]
    edges = [0, *(stop for _, stop in parts)]
    whole = len(parts) == len(held) and edges[-1] == layers and all(a < b for a, b in parts)
    return whole and parts == list(itertools.pairwise(edges))
