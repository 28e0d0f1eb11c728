"""Convert schedules to launch commands of another engine, and predict its performance."""

from dataclasses import dataclass, replace

from xcore.errors import InputError
from xcore.policies import TRAITS, runs
from xcore.specs.builtin_models import HUB_IDS
from xcore.specs.engine_spec import engine_of
from xcore.specs.estimate import Estimate
from xcore.specs.model import BYTES, ModelSpec
from xcore.specs.model_names import same_name
from xcore.specs.profile import Profile
from xcore.specs.schedule import BLOCK_SIZE, Schedule
from xscheduler.launch_command import LAYER_PARTITION
from xscheduler.settings import Setting

ENGINES = ("vllm",)
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Export:
    """An engine's launch commands, and its predicted performance."""

    commands: tuple[str, ...]
    """One command per node of a replica."""
    schedule: Schedule
    """The schedule that the engine follows: it uses all its memory and its own admission rule."""
    estimate: Estimate
    """The estimate of `schedule`."""
    notes: tuple[str, ...]

    @property
    def command(self) -> str:
        """The commands, one per line."""
        return "\n".join(self.commands)


@dataclass(frozen=True)
class Target:
    """Another engine (one of ENGINES), and the directory in which it finds the model, if the model has one."""

    engine: str
    weights: str | None = None

    def check(self, setting: Setting, policies: tuple[str, ...]) -> None:
        """Raise InputError for a setting that the engine can't run.

        Also raises it if the predictions are for another engine, or if the engine runs none of the policies.
        """
        model, predicted = setting.model, engine_of(setting.profile).name
        if model.architecture == "t5":
            raise InputError(f"{self.engine} can't run encoder-decoder models like '{model.name}': leave --export out.")
        if not predicted.startswith(self.engine):
            raise InputError(
                f"--export {self.engine} prints flags with the predicted performance of {self.engine}, but the "
                f"predictions are for engine {predicted}: pass --engine {self.engine}, or leave --export out."
            )
        if not any(runs(self.engine, policy) for policy in policies):
            known = ", ".join(policy for policy in TRAITS if runs(self.engine, policy))
            raise InputError(
                f"--export {self.engine} needs a policy that {self.engine} runs ({known}), but --policy has only "
                f"{', '.join(policies)}: add one of them, or leave --policy out."
            )
        _dtypes(model, setting.profile.dtype, setting.kv_dtype)

    def follows(self, schedule: Schedule, profile: Profile) -> Schedule:
        """Return the schedule that the engine follows with a schedule's flags."""
        from xsimulator.cost.cost_model import ReplicaCost

        step = float(schedule.control.limit), float(schedule.control.batch)
        blocks = ReplicaCost.of(schedule, profile).room(step) * BLOCK_SIZE // schedule.block_size
        return replace(schedule, kv_blocks=blocks, admission="grow", prefix_caching=True)

    def export(self, followed: Schedule, estimate: Estimate, alike: bool = False) -> Export:
        """Return the commands that make the engine follow a schedule (from `follows`) with this estimate.

        With `alike`, the prediction assumes that prompts share prefixes as in the workload.
        """
        longest, length = _longest(followed)
        cached = (
            "prompts share prefixes as in the workload"
            if alike
            else "no prompts share a prefix, so reuse can only improve on it"
        )
        commands, where = _placed(self._command(followed, longest), followed)
        caching = f"prefix caching: on, the default of {self.engine}; the prediction assumes that {cached}"
        return Export(tuple(commands), followed, estimate, (*where, length, caching))

    def _command(self, schedule: Schedule, longest: int) -> str:
        """Return the command that starts the replicas of a node."""
        model, control = schedule.model.spec, schedule.control
        flags: dict[str, object] = {
            "tensor-parallel-size": schedule.stages[0].tp,
            "pipeline-parallel-size": len(schedule.stages),
            "data-parallel-size": replicas_together(schedule),
            **_dtypes(model, schedule.dtype, schedule.kv_dtype),
            "max-model-len": longest,
            "max-num-seqs": control.of_kind("residents"),
            "max-num-batched-tokens": control.of_kind("tokens"),
            "block-size": schedule.block_size,
            "gpu-memory-utilization": schedule.cluster.memory_fraction,
        }
        values = " ".join(f"--{key} {value}" for key, value in flags.items())
        name = self.weights or _hub_name(model.name)
        switches = "--enable-chunked-prefill --enable-prefix-caching"
        if model.expert_parallel(schedule.stages[0].tp, schedule.dtype):
            switches += " --enable-expert-parallel"
        return f"{_partition(schedule)}{self.engine} serve {name} {switches} {values}"


def _partition(schedule: Schedule) -> str:
    """Return the environment variable with the layers of each pipeline stage; empty if all stages have equally many."""
    counts = [stop - start for start, stop in (stage.decoder_layers or (0, 0) for stage in schedule.stages)]
    return f"{LAYER_PARTITION}={','.join(map(str, counts))} " if len(set(counts)) > 1 else ""


def _hub_name(name: str) -> str:
    """Return the name under which the engine finds a model.

    This is the Hugging Face id of a built-in model. Other names stay as the user typed them: a model with the same
    sizes is another one.
    """
    if "/" in name:
        return name
    return next((hub for builtin, hub in HUB_IDS.items() if hub and same_name(name, builtin)), name)


def _replica_devices(schedule: Schedule) -> int:
    return sum(stage.tp for stage in schedule.stages)


def replicas_together(schedule: Schedule) -> int:
    """Return how many replicas one command starts: the replicas of a node.

    For a mixture of experts it is those that share experts: vLLM's replicas of one command always do.
    """
    if schedule.model.spec.experts:
        return schedule.model.spec.attention_dp
    return min(schedule.replicas, max(1, schedule.cluster.devices_per_node // _replica_devices(schedule)))


def _placed(command: str, schedule: Schedule) -> tuple[list[str], list[str]]:
    """Return the command of each node that a replica spans, and sentences that say where to run them."""
    per_node, together = schedule.cluster.devices_per_node, replicas_together(schedule)
    devices = _replica_devices(schedule) * (together if schedule.model.spec.experts else 1)
    nodes = -(-devices // per_node)
    copies, rest = divmod(schedule.replicas, together)
    if nodes > 1:
        each = f"for each of the {copies} replicas " if copies > 1 else ""
        where = f"{each}run one command on each of {nodes} nodes; $NODE0 is the address of the first node"
        return [f"{command} {_of_node(rank, nodes, together, per_node)}" for rank in range(nodes)], [where]
    if schedule.model.spec.experts and copies > 1:
        return [command], [
            f"start {copies} of it, at most {per_node // devices} on a node and each with {devices} of its GPUs "
            "(CUDA_VISIBLE_DEVICES), behind a load balancer"
        ]
    if copies == 1 and not rest:
        return [command], []
    each = f"each of {copies} nodes" if copies > 1 else "one node"
    other = f" and, with --data-parallel-size {rest}, on another node," if rest else ""
    return [command], [f"run it on {each}{other} behind a load balancer"]


def _of_node(rank: int, nodes: int, together: int, per_node: int) -> str:
    """Return the flags of one of the nodes that a replica, or replicas that share experts, span."""
    if together == 1:
        return f"--nnodes {nodes} --master-addr $NODE0 --node-rank {rank}{' --headless' if rank else ''}"
    later = f" --data-parallel-start-rank {rank * per_node} --headless" if rank else ""
    return f"--data-parallel-size-local {per_node} --data-parallel-address $NODE0{later}"


def _longest(schedule: Schedule) -> tuple[int, str]:
    """Return the tokens of the longest accepted request, and the reason for it.

    The engine starts only if its KV cache holds one such request.
    """
    context, held = schedule.model.spec.context, schedule.kv_blocks * schedule.block_size
    if held >= context:
        return context, f"--max-model-len {context} is the model's context"
    return held, (
        f"--max-model-len {held} is the number of tokens that fit in the KV cache; the model's context has {context:,}"
    )


def _dtypes(model: ModelSpec, dtype: str, kv_dtype: str) -> dict[str, str]:
    """Return the flags for the dtypes of weights and of keys and values, with the engine's names.

    Raises InputError for a dtype in which the engine can't keep keys and values, or to which it can't convert weights.
    """
    flags, computed = {"dtype": _DTYPES.get(dtype, "auto")}, dtype
    if BYTES[dtype] < 2:
        computed = model.dtype if model.dtype in _DTYPES else "bf16"
        if model.dtype != dtype and dtype != "fp8":
            raise InputError(
                f"vllm doesn't convert weights to {dtype} when it loads them: pass the name or directory of a "
                f"checkpoint in {dtype} as --model, or leave --export out."
            )
        if model.dtype != dtype:
            flags["quantization"] = dtype
    if kv_dtype == computed:
        held = "auto"
    elif kv_dtype in ("fp8", "bf16", "fp16"):
        held = _DTYPES.get(kv_dtype, kv_dtype)
    else:
        raise InputError(
            f"vllm stores keys and values in the model's dtype, bf16, fp16 or fp8, not in {kv_dtype}: leave out "
            f"--kv-dtype {kv_dtype} or --export."
        )
    return {**flags, "kv-cache-dtype": held}
