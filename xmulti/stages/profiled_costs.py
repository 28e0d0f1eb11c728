"""An exegpt profile as a model of a cost table: lines through the iteration times of a replica's cost model."""

from collections.abc import Mapping

from xcore.errors import InputError
from xcore.specs.cluster import ClusterSpec
from xcore.specs.cost_table import DegreeCosts, ModelCosts, PhaseLines
from xcore.specs.engine_memory import EngineMemory
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xcore.specs.schedule import BLOCK_SIZE, Stage
from xcore.specs.workload import LengthDistribution
from xsimulator.cost.cost_model import CostModel
from xsimulator.cost.stage import StageCost

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
_SHORT = 16
"""Tokens of the shorter sequences that define a line."""


def profiled_model(
    name: str,
    model: ModelSpec,
    cluster: ClusterSpec,
    profile: Profile,
    load_s: Mapping[int, float],
    outputs: LengthDistribution | None = None,
    context: int | None = None,
    memory: EngineMemory | None = None,
) -> ModelCosts:
    """Return a model's lines at the tensor-parallel degrees of `load_s` at which it fits.

    The lines of computing contain the complete iteration: a profile doesn't separate preparing and sampling. `memory`:
    the engine's use of memory, if it isn't the profile's.

    Raises:
        InputError: The model fits at no degree.
    """
    context = min(model.context, context or model.context)
    cost_model = CostModel(model, cluster, profile, profile.kv_dtype, memory=memory)
    degrees = [_degree(cost_model, tp, seconds, context) for tp, seconds in sorted(load_s.items())]
    known = tuple(degree for degree in degrees if degree)
    if not known:
        raise InputError(
            f"Model '{name}' does not fit on {', '.join(map(str, sorted(load_s)))} of the devices of {cluster.name}."
        )
    return ModelCosts(name, context, known, outputs)


def _degree(cost_model: CostModel, tp: int, load_s: float, context: int) -> DegreeCosts | None:
    """Return the lines of one degree; None if not even one sequence fits."""
    model = cost_model.model
    replica = cost_model.replica((Stage(tuple(range(tp)), tp, "both", None, (0, model.layers)),))
    kv_tokens = BLOCK_SIZE * replica.room((max(context, 2048), 1))
    if kv_tokens < context:
        return None
    (stage,) = replica.stage_costs
    token, position = model.parameters / tp, 2.0 * model.layers * model.hidden / tp
    prefill = [_prefill_line(stage, batch, context, token, position) for batch in BATCHES]
    decode = [_decode_line(stage, batch, min(context, kv_tokens // batch), token, position) for batch in BATCHES]
    nothing = ((0.0, 0.0),) * len(BATCHES)
    phases = [PhaseLines(BATCHES, tuple(of_one), nothing, nothing) for of_one in (prefill, decode)]
    return DegreeCosts(tp, token, position, kv_tokens, load_s, *phases)


def _prefill_line(stage: StageCost, batch: int, context: int, token: float, position: float) -> tuple[float, float]:
    """Return the line through prompts of length 1, and of the greatest length for one prefill of this batch."""
    lengths = (1, max(2, max(context, 2048) // batch))
    seconds = [float(stage.encode_fixed(batch, length)) for length in lengths]
    return _line([batch * (token * length + position * length**2) for length in lengths], seconds)


def _decode_line(stage: StageCost, batch: int, longest: int, token: float, position: float) -> tuple[float, float]:
    lengths = (_SHORT, max(2 * _SHORT, longest))
    seconds = [float(stage.decode(batch, float(length))) for length in lengths]
    return _line([batch * (token + position * length) for length in lengths], seconds)


def _line(x: list[float], seconds: list[float]) -> tuple[float, float]:
    slope = max(0.0, (seconds[1] - seconds[0]) / (x[1] - x[0]))
    return slope, seconds[0] - slope * x[0]
