"""A cost model: seconds of a model's iterations on the stages of a cluster, and the memory left for KV blocks.

It depends on the model, the cluster, the profile and the placement of layers, not on requests.
"""

import functools
from dataclasses import dataclass, replace

from xcore.errors import InputError
from xcore.specs.cluster import ClusterSpec
from xcore.specs.device_spec import LinkSpec
from xcore.specs.engine_memory import EngineMemory
from xcore.specs.engine_spec import engine_of
from xcore.specs.model import ModelSpec, activation_bytes
from xcore.specs.profile import DegreeTables, Profile, Table
from xcore.specs.schedule import Schedule, Stage
from xcore.specs.speculation import Speculation
from xsimulator.cost.group import Group
from xsimulator.cost.memo import memoized
from xsimulator.cost.memory import DeviceMemory, StageMemory, device_memory, with_drafts
from xsimulator.cost.side import Links, Side
from xsimulator.cost.speculative_tables import Drafting, Verification, drafting, verifying
from xsimulator.cost.stage import StageCost, stage_costs

HOST_LINK = LinkSpec(25e9, 10e-6)
"""The link from a device to pinned host memory, and back, where no copy was measured: PCIe 4.0 with 16 lanes.

25 of 32 GB/s is an assumption.
"""
Step = tuple[float, float]
"""The largest step: its tokens, and the sequences for which it samples a token."""


@dataclass(frozen=True, eq=False)
class CostModel:
    """A model on a cluster with its profile: the groups and sides that all its replicas share."""

    model: ModelSpec
    cluster: ClusterSpec
    profile: Profile
    kv_dtype: str
    watched: bool = True
    """Whether to record the tables that are queried outside their grid."""
    memory: EngineMemory | None = None
    """Memory that the engine takes; None: that of the profile's engine."""
    tokens: float = 0.0
    """Mean tokens of a request, of which layers with windows keep a part; 0: they keep all."""
    speculation: Speculation | None = None

    @functools.cached_property
    def engine_memory(self) -> EngineMemory:
        """Return the memory that the engine takes."""
        return self.memory or engine_of(self.profile).memory

    @memoized
    def group(self, tp: int) -> Group:
        """Return the cost of iterations on a tensor-parallel group of this degree."""
        tables = self.profile.degree(tp)
        return self._group(tables if self.speculation is None else verifying(tables, self.model, self._verification))

    @memoized
    def drafting_group(self, tp: int, layers: int) -> Group:
        """Return the cost of iterations on the last stage's group, which has `layers` layers and drafts tokens."""
        drafts = self._drafting(tp)
        return self._group(drafting(self.profile.degree(tp), self.model, self._verification, drafts, layers))

    def _group(self, tables: DegreeTables) -> Group:
        return Group(tables, self.profile.overhead, self.watched, rows=self.rows)

    @property
    def rows(self) -> int:
        """Return the tokens of a decoding sequence that an iteration computes."""
        return self.speculation.rows if self.speculation else 1

    @property
    def _verification(self) -> Verification:
        return Verification(self.cluster.device, self.rows)

    def _drafting(self, tp: int) -> Drafting:
        """Return what drafts beside a last stage of `tp` devices."""
        speculation = self.speculation
        assert speculation, "only speculation drafts"
        if speculation.draft is None:
            return Drafting(self.profile.degree(tp), speculation.layers, self.model)
        degrees = [tables for tables in self.profile.draft or () if tables.tp <= tp]
        if not degrees:
            raise InputError(
                f"The profile has no times of the draft model '{speculation.draft.name}': pass a roofline profile."
            )
        return Drafting(max(degrees, key=lambda d: d.tp), float(speculation.draft.layers), speculation.draft)

    @memoized
    def side(self, stages: tuple[Stage, ...]) -> Side:
        """Return the cost of iterations on the stages that one phase runs through."""
        drafts = self.drafting_group if self.speculation else None
        return Side(stages, stage_costs(stages, self.group, drafts), self._links)

    @functools.cached_property
    def _links(self) -> Links:
        token_bytes = self.model.hidden * activation_bytes(self.profile.dtype)
        profile, per_node = self.profile, self.cluster.devices_per_node
        return Links(per_node, token_bytes, profile.send, profile.send_between_nodes)

    def replica(self, stages: tuple[Stage, ...]) -> "ReplicaCost":
        """Return the cost on one replica's stages."""
        return ReplicaCost(self, stages)


@dataclass(frozen=True, eq=False)
class ReplicaCost:
    """The cost of iterations on one replica's stages."""

    cost_model: CostModel
    stages: tuple[Stage, ...]

    @staticmethod
    def of(schedule: Schedule, profile: Profile) -> "ReplicaCost":
        """Return the cost on a schedule's stages."""
        tokens = schedule.workload.mean_tokens
        where = (schedule.model.spec, schedule.cluster, profile, schedule.kv_dtype)
        return CostModel(*where, tokens=tokens, speculation=schedule.speculation).replica(schedule.stages)

    def watched(self) -> "ReplicaCost":
        """Return a copy that records from now on which tables are queried outside the profile's grid."""
        return replace(self.cost_model, watched=True).replica(self.stages)

    @property
    def extrapolated(self) -> set[str]:
        """Return the tables of the profile that any replica of the cost model queried outside their grid."""
        return set().union(*(cost.group.extrapolated for cost in self.stage_costs))

    @property
    def encoder_decoder(self) -> bool:
        """Return whether the model has encoder layers."""
        return self.cost_model.model.encoder_layers > 0

    @property
    def disaggregated(self) -> bool:
        """Return whether prompts are prefilled and tokens decoded on different stages."""
        return self.encode is not self.decode

    def _side(self, phase: str) -> Side:
        return self.cost_model.side(tuple(s for s in self.stages if s.phase in ("both", phase)))

    @functools.cached_property
    def encode(self) -> Side:
        """Return the stages that prefill prompts."""
        return self._side("encode")

    @functools.cached_property
    def decode(self) -> Side:
        """Return the stages that decode: the same as `encode`, unless the schedule is disaggregated."""
        return self.encode if all(s.phase == "both" for s in self.stages) else self._side("decode")

    @functools.cached_property
    def stage_costs(self) -> tuple[StageCost, ...]:
        """Return the cost of iterations on each stage, in the order of `stages`."""
        sides = {"both": iter(self.encode.costs), "encode": iter(self.encode.costs), "decode": iter(self.decode.costs)}
        return tuple(next(sides[s.phase]) for s in self.stages)

    # ---- memory ----

    @functools.cached_property
    def _memory_kinds(self) -> tuple[tuple[tuple[str, DeviceMemory], ...], tuple[int, ...]]:
        """Return the different pairs of a phase and a device memory, and for each stage the index of its pair."""
        cost_model = self.cost_model
        model, cluster, dtypes = cost_model.model, cost_model.cluster, (cost_model.profile.dtype, cost_model.kv_dtype)
        kinds: dict[tuple[str, StageCost], tuple[str, DeviceMemory]] = {}
        for stage, cost in zip(self.stages, self.stage_costs, strict=True):
            if (stage.phase, cost) not in kinds:
                ends = (cost.first, cost.last and not (self.encoder_decoder and stage.phase == "encode"))
                kept = model.kept_share(cost_model.tokens)
                memory = device_memory(model, cluster, stage, *dtypes, ends, cost_model.engine_memory, kept)
                if cost_model.speculation and cost.last:
                    memory = with_drafts(memory, model, cost_model.speculation, stage.tp, *dtypes)
                kinds[stage.phase, cost] = (stage.phase, memory)
        places = {key: place for place, key in enumerate(kinds)}
        of_stages = (places[s.phase, c] for s, c in zip(self.stages, self.stage_costs, strict=True))
        return tuple(kinds.values()), tuple(of_stages)

    def memory_kinds(self, step: Step, encoding: Step | None = None) -> tuple[tuple[str, StageMemory], ...]:
        """Return the phase and the memory of a device, once for every kind of stage.

        `step` is the largest step. `encoding` is the largest step on stages that only prefill (None: `step` there too).
        """
        kinds, _ = self._memory_kinds
        rows = self.cost_model.rows
        if rows > 1:  # a row of logits for each token that is verified
            step = (max(step[0], rows * step[1]), rows * step[1])
        return tuple(
            (phase, memory.at(*(encoding if encoding and phase == "encode" else step))) for phase, memory in kinds
        )

    def memory(self, step: Step, encoding: Step | None = None) -> tuple[StageMemory, ...]:
        """Return the memory of each stage's devices; see `memory_kinds` for the arguments."""
        kinds = self.memory_kinds(step, encoding)
        return tuple(kinds[place][1] for place in self._memory_kinds[1])

    def room(self, step: Step, phase: str | None = None) -> int:
        """Return the KV blocks that fit on every stage (of one phase, if given) if `step` is the largest step."""
        kinds = self.memory_kinds(step)
        return min(memory.blocks for own, memory in kinds if phase is None or own == phase)

    # ---- disaggregated: from the encoding to the decoding side (paper section 3) ----

    def kv_transfer_seconds(self, tokens: float) -> float:
        """Return the seconds of the KV transfer of a batch with `tokens` tokens, through host memory.

        The time begins at the end of the batch's prefill and ends when the decoding side has its keys and values.

        A decoder-only model's keys and values go from every device over its own link to pinned host memory and on to
        the decoding side. All stages but the last send theirs while the next stage computes, so the transfer time is
        that of the busiest stage. An encoder-decoder transfers the encoder's output, from which the decoders compute
        their keys and values.
        """
        token_bytes, seconds = self.kv_transfer_link
        return 2.0 * seconds.at(tokens * token_bytes)

    def swap_seconds(self, tokens: int) -> float:
        """Return the seconds in which every device copies its keys and values of `tokens` tokens to the host, or back.

        All devices copy at once, each over its own link. Without a measured copy, the link is `HOST_LINK`.
        """
        token_bytes, profile = self.kv_transfer_link[0], self.cost_model.profile
        if profile.host_copy:
            return profile.host_copy.at(tokens * token_bytes)
        return HOST_LINK.latency_s + tokens * token_bytes / HOST_LINK.bandwidth_bytes_s

    @functools.cached_property
    def kv_transfer_link(self) -> tuple[float, Table]:
        """Return the bytes per token that the busiest device sends, and the seconds by bytes of one of its copies.

        There are two copies: to host memory, and from there to the decoding side.
        """
        model, profile = self.cost_model.model, self.cost_model.profile
        sent = model.hidden * activation_bytes(profile.dtype)
        if not self.encoder_decoder:
            layers = ((s, stop - start) for s in self.encode.stages for start, stop in [s.decoder_layers or (0, 0)])
            sent = max(count * model.kv_bytes(s.tp, self.cost_model.kv_dtype) for s, count in layers)
        per_node = self.cost_model.cluster.devices_per_node
        nodes = {rank // per_node for stage in self.stages for rank in stage.devices}
        return sent, profile.host_copy or (profile.send if len(nodes) == 1 else profile.send_between_nodes)
