"""The launch commands of vLLM: `vllm serve`."""

from dataclasses import replace

from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Schedule
from xscheduler.exports.launch_parts import (
    NODE0,
    Command,
    ReplicaGroup,
    Start,
    dtype_flags,
    flags,
    partition,
    replicas_of_node,
)
from xscheduler.exports.speculative_flags import speculative_notes, vllm_flags
from xscheduler.launch_command import LAYER_PARTITIONS

_KV_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8"}


class VllmLaunch:
    """How vLLM is started."""

    engine = "vllm"
    drafts = True
    length_flag = "--max-model-len"

    def check(self, model: ModelSpec, dtype: str, kv_dtype: str) -> None:
        """Raise InputError for dtypes in which vLLM can't run the model."""
        dtype_flags(self.engine, model, dtype, kv_dtype, _KV_DTYPES)

    def followed(self, schedule: Schedule) -> Schedule:
        """Return the schedule with vLLM's admission and caching."""
        return replace(schedule, admission="grow", prefix_caching=True)

    def together(self, schedule: Schedule) -> int:
        """Return how many replicas one command starts: those of a node.

        For a mixture of experts it is those that share experts: vLLM's replicas of one command always do.
        """
        return schedule.model.spec.attention_dp if schedule.model.spec.experts else replicas_of_node(schedule)

    def start(self, schedule: Schedule, model: str, longest: int, together: int) -> Start:
        """Return what starts the replicas."""
        group, control, spec = ReplicaGroup.of(schedule, together), schedule.control, schedule.model.spec
        values: dict[str, object] = {
            "tensor-parallel-size": schedule.stages[0].tp,
            "pipeline-parallel-size": len(schedule.stages),
            "data-parallel-size": group.together,
            **dtype_flags(self.engine, spec, schedule.dtype, schedule.kv_dtype, _KV_DTYPES),
            "max-model-len": longest,
            "max-num-seqs": control.of_kind("residents"),
            "max-num-batched-tokens": control.of_kind("tokens"),
            "block-size": schedule.block_size,
            "gpu-memory-utilization": schedule.cluster.memory_fraction,
            **vllm_flags(schedule),
        }
        switches = ["--enable-chunked-prefill", "--enable-prefix-caching"]
        if spec.expert_parallel(schedule.stages[0].tp, schedule.dtype):
            switches.append("--enable-expert-parallel")
        words = ("vllm", "serve", model, *switches, *flags(values))
        layers = partition(schedule, LAYER_PARTITIONS[self.engine])
        ranks = range(group.nodes)
        commands = tuple(Command((*words, *self._of_node(rank, group)), layers) for rank in ranks)
        return Start(commands, group, (*group.where("--data-parallel-size"), *speculative_notes(schedule)))

    def _of_node(self, rank: int, group: ReplicaGroup) -> tuple[str, ...]:
        """Return the flags of one of the nodes that a replica, or replicas that share experts, span."""
        if group.nodes == 1:
            return ()
        headless = ("--headless",) if rank else ()
        if group.together == 1:
            return (*flags({"nnodes": group.nodes, "master-addr": NODE0, "node-rank": rank}), *headless)
        later = flags({"data-parallel-start-rank": rank * group.devices}) if rank else ()
        return (*flags({"data-parallel-size-local": group.devices, "data-parallel-address": NODE0}), *later, *headless)
