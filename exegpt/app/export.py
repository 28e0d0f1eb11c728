"""A schedule as the nearest command line of another engine: flags that vLLM 0.33 accepts."""

from dataclasses import dataclass

from exegpt.builtin_models import HUB_IDS, stands_for
from exegpt.engine_memory import VLLM
from exegpt.errors import InputError
from exegpt.model import ModelSpec
from exegpt.policies import TRAITS, traits_of
from exegpt.schedule import BLOCK_SIZE, Schedule

ENGINES = ("vllm",)
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def check_exportable(model: ModelSpec, engine: str) -> None:
    """InputError for a model that `engine` doesn't run."""
    if model.architecture == "t5":
        raise InputError(f"{engine} doesn't run encoder-decoders like '{model.name}': leave --export out.")


@dataclass(frozen=True)
class Target:
    """Another engine (one of ENGINES), and the directory where it finds the model, where that has one."""

    engine: str
    weights: str | None = None

    @property
    def policies(self) -> tuple[str, ...]:
        """Those that the engine has: what is predicted for them is what it does."""
        return tuple(traits.name for traits in TRAITS.values() if self.engine in traits.engines)

    def nearest(self, schedule: Schedule) -> tuple[str, str]:
        """The command lines that come nearest to a schedule, and what is lost."""
        return export(schedule, self.engine, self.weights)


def export(schedule: Schedule, engine: str, weights: str | None = None) -> tuple[str, str]:
    """The command lines, one a node, that come nearest to `schedule` in `engine` (one of ENGINES), and what is lost.

    `weights` is the model's directory where it has one. Raises InputError for a model that the engine doesn't run.
    """
    check_exportable(schedule.model.spec, engine)
    nearest = traits_of(schedule).nearest
    if nearest is None:
        raise InputError(
            f"Policy '{schedule.policy}' doesn't say what comes nearest to it in {engine}: leave --export out."
        )
    near, (tp, pp), longest = nearest(schedule), _parallel(schedule), _longest(schedule)
    lost = [*near.lost]
    # a budget below a whole prompt is refused where prompts aren't cut
    budget = max(near.budget, near.residents, 1 if near.chunked else longest)
    if (tp, pp) != _stage_sizes(schedule):
        lost.append("stages of unequal tensor parallelism become equal ones")
    flags: dict[str, object] = {
        "tensor-parallel-size": tp,
        "pipeline-parallel-size": pp,
        "data-parallel-size": _replicas_together(schedule),
        **_dtypes(schedule, lost),
        "max-model-len": longest,
        "max-num-seqs": near.residents,
        "max-num-batched-tokens": budget,
        "block-size": schedule.block_size,
        "gpu-memory-utilization": schedule.cluster.memory_fraction,
    }
    lost += _crowded(schedule, budget, near.residents)
    name = weights or _hub_name(schedule.model.spec.name)
    switches = f"--{'' if near.chunked else 'no-'}enable-chunked-prefill"
    switches += f" --{'' if schedule.prefix_caching else 'no-'}enable-prefix-caching"
    command = f"vllm serve {name} {switches} " + " ".join(f"--{key} {value}" for key, value in flags.items())
    commands, where = _placed(command, schedule)
    return "\n".join(commands), "; ".join([*where, *lost]) or "nothing is lost"


def _hub_name(name: str) -> str:
    """Where the engine finds a model: a Hugging Face id as it was typed, else that of the same sizes, else the name."""
    if "/" in name or name in HUB_IDS:
        return HUB_IDS.get(name) or name
    try:
        return HUB_IDS.get(stands_for(name) or name) or name
    except InputError:  # a directory's
        return name


def _replica_devices(schedule: Schedule) -> int:
    return sum(stage.tp for stage in schedule.stages)


def _replicas_together(schedule: Schedule) -> int:
    """Replicas that one command starts: those of a node."""
    return min(schedule.replicas, max(1, schedule.cluster.devices_per_node // _replica_devices(schedule)))


def _placed(command: str, schedule: Schedule) -> tuple[list[str], list[str]]:
    """The command of each node that a replica spans, and where they are to be run."""
    nodes = -(-_replica_devices(schedule) // schedule.cluster.devices_per_node)
    copies = schedule.replicas // _replicas_together(schedule)
    each = f"for each of the {copies} " if copies > 1 else ""
    if nodes == 1:
        return [command], [f"run it on each of {copies} nodes behind a load balancer"] if copies > 1 else []
    spread = f"{command} --nnodes {nodes} --master-addr $NODE0 --node-rank "
    where = f"{each and each + 'replicas '}run one command on each of {nodes} nodes, $NODE0 the first one's address"
    return [f"{spread}{rank}{' --headless' if rank else ''}" for rank in range(nodes)], [where]


def _crowded(schedule: Schedule, tokens: int, sequences: int) -> list[str]:
    """A sentence where the engine's cache, with these flags, is smaller than the schedule's."""
    from xsimulator.cost.memory import device_memory

    model, cluster, last = schedule.model.spec, schedule.cluster, len(schedule.stages) - 1
    dtypes = (schedule.dtype, schedule.kv_dtype)
    blocks = min(
        device_memory(model, cluster, stage, *dtypes, (i == 0, i == last), VLLM).at(tokens, sequences).blocks
        for i, stage in enumerate(schedule.stages)
    )
    held, asked = max(0, blocks) * BLOCK_SIZE, schedule.kv_blocks * schedule.block_size
    if held >= asked:
        return []
    short = f"the engine's cache holds {held:,} tokens with these flags, and the schedule's {asked:,}"
    return [f"{short}: it preempts sequences" if held else f"{short}: it doesn't start"]


def _longest(schedule: Schedule) -> int:
    """Tokens of the longest request, which the cache must hold: with the model's whole context it often couldn't."""
    workload, context = schedule.workload, schedule.model.spec.context
    held = schedule.kv_blocks * schedule.block_size
    return min(workload.input.max + workload.output.max, context, held)


def _stage_sizes(schedule: Schedule) -> tuple[int, int] | None:
    """Tensor-parallel degree and number of stages; None where degrees differ or each side has its own stages."""
    degrees = {stage.tp for stage in schedule.stages}
    if len(degrees) > 1 or {stage.phase for stage in schedule.stages} != {"both"}:
        return None
    return degrees.pop(), len(schedule.stages)


def _parallel(schedule: Schedule) -> tuple[int, int]:
    """Equal stages over a replica's devices, of the largest degree that any stage has and that divides them."""
    devices = sum(stage.tp for stage in schedule.stages)
    model = schedule.model.spec
    fit = [
        tp
        for tp in range(1, devices + 1)
        if devices % tp == 0
        and tp <= max(stage.tp for stage in schedule.stages)
        and model.heads % tp == 0
        and devices // tp <= model.layers
    ]
    sizes = _stage_sizes(schedule)
    return sizes if sizes else (max(fit), devices // max(fit))


def _dtypes(schedule: Schedule, lost: list[str]) -> dict[str, str]:
    """Of weights, and of keys and values, as the engine names them."""
    flags = {"dtype": "auto", "quantization": "fp8"} if schedule.dtype == "fp8" else {"dtype": _DTYPES[schedule.dtype]}
    held = "auto"
    if schedule.kv_dtype == "fp8":
        held = "fp8"
    elif schedule.kv_dtype == "bf16" != schedule.dtype:
        held = "bfloat16"
    elif schedule.kv_dtype != schedule.dtype:
        lost.append(f"keys and values are kept in the model's own dtype, not in {schedule.kv_dtype}")
    return {**flags, "kv-cache-dtype": held}
