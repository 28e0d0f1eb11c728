"""The launch commands of SGLang: `python -m sglang.launch_server`, with the flags of version 0.5.23."""

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
from xscheduler.exports.speculative_flags import sglang_flags, speculative_notes
from xscheduler.launch_command import LAYER_PARTITIONS, MAX_PREFILL_TOKENS

_KV_DTYPES = {"bf16": "bfloat16", "fp8": "fp8_e4m3"}
_PAGED_KINDS = ("B200", "B300", "GB200", "GB300")
"""GPUs of compute capability 10.x, whose attention kernels need pages (sglang/srt/arg_groups/overrides.py)."""
_PORT = 20000
"""The port on the first node at which the nodes of a replica find each other."""


class SglangLaunch:
    """How SGLang is started."""

    engine = "sglang"
    drafts = True
    length_flag = "--context-length"

    def check(self, model: ModelSpec, dtype: str, kv_dtype: str) -> None:
        """Raise InputError for dtypes in which SGLang can't run the model."""
        dtype_flags(self.engine, model, dtype, kv_dtype, _KV_DTYPES)

    def followed(self, schedule: Schedule) -> Schedule:
        """Return the schedule with SGLang's page size, admission and caching.

        A chunk must be a multiple of the page size: it is rounded down, and so are the sequences to at most as many.
        """
        control, page = schedule.control, _page(schedule)
        tokens, residents = control.of_kind("tokens"), control.of_kind("residents")
        if tokens and residents and tokens % page:
            chunk = max(page, tokens - tokens % page)
            variables = control.decisions | {schedule.traits.name_of("tokens") or "": chunk}
            control = schedule.traits.record(variables).with_batch(min(residents, chunk))
        return replace(schedule, control=control, block_size=page, admission="grow", prefix_caching=True)

    def together(self, schedule: Schedule) -> int:
        """Return how many replicas one command starts: those that share experts, or those of a node."""
        shared = schedule.model.spec.attention_dp
        return shared if shared > 1 else replicas_of_node(schedule)

    def start(self, schedule: Schedule, model: str, longest: int, together: int) -> Start:
        """Return what starts the replicas.

        With attention data parallelism, the limits of sequences and of a chunk are those of all its replicas together.
        """
        group, control, spec = ReplicaGroup.of(schedule, together), schedule.control, schedule.model.spec
        tp, shared = schedule.stages[0].tp, spec.attention_dp
        replicas = {"attn-dp-size": shared} if shared > 1 else {"dp-size": group.together}
        whole = {"ep-size": tp * shared} if spec.expert_parallel(tp, schedule.dtype) else {}
        tokens = control.of_kind("tokens") or 1
        values: dict[str, object] = {
            "tp-size": tp * shared,
            "pp-size": len(schedule.stages),
            **replicas,
            **whole,
            **dtype_flags(self.engine, spec, schedule.dtype, schedule.kv_dtype, _KV_DTYPES),
            "context-length": longest,
            "max-running-requests": (control.of_kind("residents") or 1) * shared,
            "chunked-prefill-size": tokens * shared,
            **({"max-prefill-tokens": tokens} if tokens > MAX_PREFILL_TOKENS else {}),
            "page-size": schedule.block_size,
            "mem-fraction-static": schedule.cluster.memory_fraction,
            **sglang_flags(schedule),
        }
        words = ("python", "-m", "sglang.launch_server", "--model-path", model, "--enable-mixed-chunk", *flags(values))
        layers = partition(schedule, LAYER_PARTITIONS[self.engine])
        commands = tuple(Command((*words, *_of_node(rank, group)), layers) for rank in range(group.nodes))
        return Start(commands, group, (*group.where("--dp-size"), *speculative_notes(schedule)))


def _page(schedule: Schedule) -> int:
    """Return the tokens of a page with the attention kernels that SGLang chooses; 1 where none is needed.

    Latent attention has pages of 64 tokens on GPUs of compute capability 10.x, and everywhere if it has an index.
    """
    paged, latent = schedule.cluster.device.kind.startswith(_PAGED_KINDS), schedule.model.spec.latent
    if latent and (paged or latent.index_bytes):
        return 64
    return 16 if paged else 1


def _of_node(rank: int, group: ReplicaGroup) -> tuple[str, ...]:
    """Return the flags of one of the nodes that a replica, or replicas that share experts, span."""
    if group.nodes == 1:
        return ()
    return flags({"nnodes": group.nodes, "node-rank": rank, "dist-init-addr": f"{NODE0}:{_PORT}"})
