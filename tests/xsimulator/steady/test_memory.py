"""Memory: weights add up, and the reserved blocks are what a simulated crowd of queries holds."""

from dataclasses import replace

import numpy as np
import pytest

from tests.xcore.small_specs import schedule
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.engine_memory import DATA_SHEET, VLLM
from xcore.specs.model import BYTES
from xcore.specs.schedule import BLOCK_SIZE, Stage
from xcore.specs.workload import LengthDistribution, Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler.allocation import tp_degrees, uniform_stages
from xsimulator import estimate
from xsimulator.cost.cost_model import CostModel
from xsimulator.cost.memory import StageMemory, device_memory
from xsimulator.steady import chunked, orca, static
from xsimulator.steady.blocks import BlockDistribution
from xsimulator.steady.load import Load
from xsimulator.steady.outcome import memory_share
from xsimulator.steady.residents import decode_iterations_of
from xsimulator.steady.scenario import Scenario


def blocks_of(inputs, outputs):
    """Blocks that a decoder-only query holds: all that it may ever cache."""
    return -(-(inputs + outputs - 1) // BLOCK_SIZE)


@pytest.mark.parametrize("encode_batch", [8, 40])
@pytest.mark.parametrize(("name", "iterations"), [("S", 7), ("T", 13), ("G", 64), ("C1", 1)])
def test_reserved_blocks_are_the_simulated_percentile(name, iterations, encode_batch):
    workload, rng = task(name), np.random.default_rng(1)
    phases = 20_000
    n = phases * encode_batch
    inputs, outputs = workload.input.sample(n, rng), workload.output.sample(n, rng)
    stays = np.maximum(1, -(-(outputs - 1) // iterations))  # from its encoding to the end of its last phase
    begin = np.repeat(np.arange(phases), encode_batch)
    held = blocks_of(inputs, outputs)
    change = np.bincount(begin, held, phases) - np.bincount(np.minimum(begin + stays, phases), held, phases + 1)[:-1]
    resident = np.cumsum(change)[stays.max() :]
    quantile = BlockDistribution.of(workload).reservation(iterations).quantile(encode_batch, 1e9)
    assert quantile == pytest.approx(np.quantile(resident, 0.999), rel=0.02)


@pytest.mark.parametrize("name", ["S", "T"])
def test_iteration_levels_residents_are_length_biased(name):
    """Slots that are refilled at once: whom one finds there has been drawn with the time it stays."""
    workload, rng = task(name), np.random.default_rng(2)
    slots, n = 32, 400
    inputs, outputs = (
        distribution.sample(slots * n, rng).reshape(slots, n) for distribution in (workload.input, workload.output)
    )
    ends, held = np.cumsum(outputs, axis=1), blocks_of(inputs, outputs)
    times = np.arange(2000, ends[:, -1].min())
    resident = sum(held[s][np.searchsorted(ends[s], times, side="right")] for s in range(slots))
    assert BlockDistribution.of(workload, resident=True).reservation(None).mean * slots == pytest.approx(
        resident.mean(), rel=0.01
    )
    assert BlockDistribution.of(workload, resident=True).reservation(None).quantile(slots, slots) == pytest.approx(
        np.quantile(resident, 0.999), rel=0.03
    )


def test_never_more_than_everybody_at_the_longest():
    workload = task("T")
    longest = blocks_of(workload.input.max, workload.output.max)
    for resident in range(1, 6):
        assert (
            longest
            <= BlockDistribution.of(workload, resident=True).reservation(None).quantile(resident, resident)
            <= resident * longest
        )


def test_certain_lengths_are_reserved_exactly_but_for_the_blocks_end():
    """Half a block is the mean of what a last block leaves empty."""
    need = BlockDistribution.of(Workload.fixed(33, 16)).reservation(None)
    assert need.longest == 3
    assert need.mean == pytest.approx((33 + 15 + 7.5) / 16)


@pytest.mark.parametrize("name", ["opt-13b", "llama-3.1-8b", "gpt2"])
def test_stages_hold_the_models_weights_together(name):
    model, cluster = builtin_model(name), parse_cluster("4xA40")
    for tp in tp_degrees(model, cluster):
        stages = uniform_stages(model, cluster, tp)
        ends = [(i == 0, i == len(stages) - 1) for i in range(len(stages))]
        total = sum(
            device_memory(model, cluster, s, "fp16", "fp16", end).idle.weights * tp
            for s, end in zip(stages, ends, strict=True)
        )
        twice = model.vocab * model.hidden if model.tied_embeddings and len(stages) > 1 else 0
        assert total == pytest.approx((model.parameters + twice) * BYTES["fp16"])


def test_blocks_fill_what_is_left():
    model, cluster = builtin_model("opt-13b"), parse_cluster("4xA40")
    (stage,) = uniform_stages(model, cluster, 4)
    memory = device_memory(model, cluster, stage, "fp16", "fp16", (True, True)).at(4096, 64)
    assert memory.bytes(memory.blocks) <= memory.usable < memory.bytes(memory.blocks + 1)
    assert memory.block == BLOCK_SIZE * model.layers * model.kv_bytes(4)


@pytest.mark.parametrize("name", ["opt-13b", "t5-3b"])
def test_every_ranks_bytes_are_weights_and_blocks_and_workspace_by_hand(name):
    """Two replicas of two stages: the embedding lies on the first, the head on the last."""
    model, cluster, workload = builtin_model(name), parse_cluster("4xA40"), task("S")
    tables = roofline_profile(model, cluster)
    half, encoders = model.layers // 2, model.encoder_layers // 2
    ranges = [((i * encoders, (i + 1) * encoders) if encoders else None, (i * half, (i + 1) * half)) for i in (0, 1)]
    plan = schedule(
        "static",
        model,
        workload,
        cluster=cluster,
        stages=tuple(Stage((i,), 1, "both", *held) for i, held in enumerate(ranges)),
        dtype="fp16",
        kv_dtype="fp16",
        replicas=2,
        encode_batch=12,
        encode_micro_batches=2,
    )
    blocks = static.blocks(Scenario.of(plan, tables, None, "exact", True), 12)
    tied_head = model.vocab * model.hidden if model.tied_embeddings else 0
    ends = model.embedding_parameters, model.head_parameters + tied_head
    expected = []
    for outer in ends:
        parameters = half * model.layer_parameters + encoders * model.encoder_layer_parameters + outer
        workspace = int(6 * workload.input.mean) * (2 * model.hidden + (3 if model.gated else 2) * model.ffn)
        kv = blocks * 16 * half * 2 * model.kv_heads * model.head_size
        expected.append(2 * (parameters + workspace + kv) + 2**28)
    assert estimate(plan, tables).memory_bytes == pytest.approx(expected * 2)


def test_an_encoder_decoders_blocks_hold_its_input_and_the_start_token_too():
    """As many tokens as the ledger keeps room for: input and output, for the first output token has to be decoded."""
    workload = Workload.fixed(33, 16)
    assert BlockDistribution.of(workload, encoder_decoder=True).reservation(None).longest == -(-(33 + 16) // BLOCK_SIZE)
    assert BlockDistribution.of(workload).reservation(None).longest == -(-(33 + 15) // BLOCK_SIZE)


@pytest.mark.parametrize("stride", [1.0, 2.5, 3.7, 12.25])
def test_blocks_between_whole_numbers_of_iterations_are_a_crowds(stride):
    """Cohorts of age j · k are there where D > j · k."""
    workload, rng, n = task("S"), np.random.default_rng(4), 400_000
    inputs, outputs = workload.input.sample(n, rng), workload.output.sample(n, rng)
    stays = np.maximum(1, np.ceil((outputs - 1) / stride))
    reservation = BlockDistribution.of(workload).reservation(stride)
    assert reservation.mean == pytest.approx((blocks_of(inputs, outputs) * stays).mean(), rel=0.01)


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("outputs", [np.arange(30, 62), np.arange(2, 34)])
def test_the_moments_of_a_querys_blocks_are_those_of_whole_blocks(outputs, resident):
    """Enumerated: what a query loses at its last block's end varies too; residents are found as often as they stay."""
    inputs = np.arange(1, 65)
    workload = Workload(
        "w", LengthDistribution.from_samples(inputs), LengthDistribution.from_samples(outputs), int(outputs[-1])
    )
    need, p = decode_iterations_of(workload.output, False)
    p = p * (need + 1) / (p @ (need + 1)) if resident else p
    blocks = -(-(inputs[:, None] + need) // BLOCK_SIZE)
    weights = np.outer(np.full(len(inputs), 1 / len(inputs)), p)
    mean = float((weights * blocks).sum())
    variance = float((weights * (blocks - mean) ** 2).sum())
    reservation = BlockDistribution.of(workload, resident=resident).reservation(None)
    assert reservation.mean == pytest.approx(mean, rel=0.005)
    assert reservation.variance == pytest.approx(variance, rel=0.02)


def test_a_stage_without_a_cache_has_room_for_any_as_long_as_its_weights_fit():
    """An encoder's, which may fill its device to the last byte."""
    full = StageMemory(5.0, 1.0, 0.0, 6.0 + DATA_SHEET.base_bytes)
    assert full.blocks > 2**50
    assert replace(full, usable=full.usable - 1).blocks < 0


def test_memory_holds_the_largest_step_that_an_engine_may_make():
    """What vLLM reserves as it starts: its budget and its sequences, whatever iterations compute on average."""
    model, cluster, workload = builtin_model("opt-13b"), parse_cluster("1xA40"), task("S")
    profile = roofline_profile(model, cluster)
    stages = uniform_stages(model, cluster, 1)
    scenario = Scenario(CostModel(model, cluster, profile, "fp16").replica(stages), Load(workload, False))
    assert chunked.outcome(scenario, 32, 2048).demand.step == (2048.0, 32)
    assert orca.outcome(scenario, 32, 2).demand.step == (2 * workload.input.max + 32, 32)
    engine = Scenario(CostModel(model, cluster, profile, "fp16", memory=VLLM).replica(stages), Load(workload, False))
    shares = [memory_share(engine, chunked.outcome(engine, 8, budget)) for budget in (64, 2048, 262_144)]
    assert shares == sorted(shares) and shares[0] < 1 < shares[2]
