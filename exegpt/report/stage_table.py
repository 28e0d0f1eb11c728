"""A schedule's stages as a small table: devices, layers and utilisation."""

from xcore.specs.estimate import Estimate
from xcore.specs.schedule import Schedule, Stage

COLUMNS = ("stage", "devices", "TP", "phase", "layers", "busy")


def stage_rows(schedule: Schedule, estimate: Estimate | None = None) -> list[list[str]]:
    """Return a row for every stage of the first replica, with its devices' utilisation if an estimate has it."""
    busy = stage_utilisation(schedule, estimate)
    return [
        [
            str(number),
            _span(stage.devices[0], stage.devices[-1]),
            str(stage.tp),
            stage.phase,
            _layers(stage),
            "–" if share is None else f"{share:.0%}",
        ]
        for number, (stage, share) in enumerate(zip(schedule.stages, busy, strict=True))
    ]


def stage_utilisation(schedule: Schedule, estimate: Estimate | None) -> list[float | None]:
    """Return the busy fraction of every stage of the first replica; None if it isn't known."""
    if estimate is None or not estimate.utilisation:
        return [None] * len(schedule.stages)
    ranks = [sum(s.tp for s in schedule.stages[:i]) for i in range(len(schedule.stages))]
    return [estimate.utilisation[rank] for rank in ranks]


def _layers(stage: Stage) -> str:
    parts = []
    for name, layers in (("encoder ", stage.encoder_layers), ("decoder ", stage.decoder_layers)):
        if layers:
            parts.append((name if stage.encoder_layers else "") + _span(layers[0], layers[1] - 1))
    return ", ".join(parts)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"
