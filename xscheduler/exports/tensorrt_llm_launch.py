"""The launch commands of TensorRT-LLM: `trtllm-serve` with a configuration file.

Keys are fields of `LlmArgs` and of the records in it (tensorrt_llm/llmapi/llm_args.py, versions 1.2 and 1.3).
"""

from dataclasses import replace

from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Schedule
from xscheduler.exports.launch_parts import DTYPES, Command, ReplicaGroup, Start, converts, kv_name, stage_layers

_BLOCK = 32
"""Tokens of a block, the default."""
_FILE = "trtllm.yaml"


class TensorrtLlmLaunch:
    """How TensorRT-LLM is started."""

    engine = "tensorrt-llm"
    drafts = False
    length_flag = "max_seq_len"

    def check(self, model: ModelSpec, dtype: str, kv_dtype: str) -> None:
        """Raise InputError for dtypes in which TensorRT-LLM can't run the model: it converts no weights."""
        converts(self.engine, model, dtype, ())
        self._kv_name(model, dtype, kv_dtype)

    def followed(self, schedule: Schedule) -> Schedule:
        """Return the schedule with the block size, the admission and the caching of TensorRT-LLM."""
        return replace(schedule, block_size=_BLOCK, admission="reserve", prefix_caching=True)

    def together(self, schedule: Schedule) -> int:
        """Return how many replicas one command starts: those that share experts, else one."""
        return schedule.model.spec.attention_dp

    def start(self, schedule: Schedule, model: str, longest: int, together: int) -> Start:
        """Return what starts the replicas: over several nodes, MPI starts a rank for each device."""
        import yaml

        group = ReplicaGroup.of(schedule, together)
        words: tuple[str, ...] = ("trtllm-serve", model, "--config", _FILE)
        where = group.where("")
        if group.nodes > 1:
            hosts = ",".join(f"$NODE{node}:{group.devices}" for node in range(group.nodes))
            ranks = str(group.nodes * group.devices)
            words = ("mpirun", "-n", ranks, "-H", hosts, "trtllm-llmapi-launch", *words)
            each = f", once for each of the {group.copies} groups of nodes" if group.copies > 1 else ""
            where = (
                f"run it on the first of {group.nodes} nodes{each}; $NODE0 to $NODE{group.nodes - 1} are their "
                f"addresses, and each node has {_FILE} in the same folder",
            )
        config = yaml.safe_dump(self._config(schedule, group, longest), sort_keys=False)
        return Start((Command(words),), group, where, {_FILE: config})

    def _config(self, schedule: Schedule, group: ReplicaGroup, longest: int) -> dict[str, object]:
        """Return the content of the configuration file; with attention data parallelism, limits are a replica's."""
        spec, control, layers = schedule.model.spec, schedule.control, stage_layers(schedule)
        tp, shared = schedule.stages[0].tp, spec.attention_dp
        return {
            "tensor_parallel_size": tp * shared,
            "pipeline_parallel_size": len(schedule.stages),
            **({"pp_partition": list(layers)} if len(set(layers)) > 1 else {}),
            **({"moe_expert_parallel_size": tp * shared} if spec.expert_parallel(tp, schedule.dtype) else {}),
            **({"enable_attention_dp": True} if shared > 1 else {}),
            **({"gpus_per_node": group.devices} if group.nodes > 1 else {}),
            "dtype": DTYPES.get(schedule.dtype, "auto"),
            "max_batch_size": control.of_kind("residents"),
            "max_num_tokens": control.of_kind("tokens"),
            "max_seq_len": longest,
            "enable_chunked_prefill": True,
            "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
            "kv_cache_config": {
                "dtype": self._kv_name(spec, schedule.dtype, schedule.kv_dtype),
                "free_gpu_memory_fraction": schedule.cluster.memory_fraction,
                "tokens_per_block": schedule.block_size,
                "enable_block_reuse": True,
            },
        }

    def _kv_name(self, model: ModelSpec, dtype: str, kv_dtype: str) -> str:
        return kv_name(self.engine, model, dtype, kv_dtype, {"fp8": "fp8"})
