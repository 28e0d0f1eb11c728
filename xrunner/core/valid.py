"""Which schedules can be run with which models; other schedules can only be planned with."""

from xcore.errors import InputError
from xcore.policies.from_schedule import make_policy
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Schedule
from xrunner.models.weights import DTYPES


def why_not(schedule: Schedule, model: ModelSpec) -> str | None:
    """Return why this schedule can't be run with this model, in one sentence with the way out; None if it can."""
    try:
        schedule.check_model(model)
        schedule.check_stages()
        make_policy(schedule)
    except InputError as error:
        return str(error)
    return _dtypes(schedule) or _degrees(schedule, model)


def _dtypes(schedule: Schedule) -> str | None:
    if schedule.dtype not in DTYPES or schedule.kv_dtype != schedule.dtype:
        return (
            f"The schedule has dtype {schedule.dtype} and kv_dtype {schedule.kv_dtype}: both must be the same, "
            f"{' or '.join(DTYPES)}; tune with --dtype."
        )
    return None


def _degrees(schedule: Schedule, model: ModelSpec) -> str | None:
    for tp in sorted({stage.tp for stage in schedule.stages}):
        possible = model.tp_degrees(tp)
        if tp not in possible:
            return (
                f"The schedule has stages of tensor-parallel degree {tp}, but model '{model.name}' can only be split "
                f"into {', '.join(map(str, possible))}: tune again."
            )
    return None
