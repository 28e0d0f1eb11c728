"""Keys and values in int8: caches are equal bit by bit however they were computed, and tokens those of a reference."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.kernels import linear
from tests.xrunner import cells
from tests.xrunner.cells import generate, requests, schedule
from tests.xrunner.core.test_job import run_cells
from tests.xrunner.core.test_prefix_caching import CACHING, alike
from xcore.errors import InputError
from xcore.specs.model import ModelSpec
from xrunner.comm.ranks import Ranks
from xrunner.core.capacity import cache_bytes
from xrunner.core.engine import Engine
from xrunner.core.job_setup import check_runnable, on_device
from xrunner.core.shared_cache import shared_caches
from xrunner.models import AttentionBatch, Batch, load_model
from xrunner.models.create import create_model

from .test_preemption import SMALL

BLOCK = 16
SHORT = [(1, 5), (40, 12), (5, 8), (17, 1), (64, 6)]


@pytest.fixture(scope="module")
def tiled():
    """Products in tiles, whose rows don't depend on each other; other CPUs' products may add in other orders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "can_tile", lambda dtype: dtype == torch.float32)
        yield


@pytest.fixture(scope="module")
def paths(directories, tmp_path_factory):
    """The directories of a Llama, a GPT-2 and a Mistral with a window."""
    path = tmp_path_factory.mktemp("windows") / "mistral"
    create_model(path, "mistral", kv_heads=2, seed=11, **cells.SIZES | {"layers": 2})
    config = (path / "config.json").read_text().replace('"sliding_window": null', '"sliding_window": 21')
    assert '"sliding_window": 21' in config
    (path / "config.json").write_text(config)
    return directories | {"mistral": path}


@pytest.fixture(scope="module")
def models(tiled, paths):
    """The models, each with keys and values in int8 and in float32."""
    return {(name, kv): load_model(at, kv_dtype=kv) for name, at in paths.items() for kv in ("int8", "fp32")}


def computed(model, ids, chunks, table, others=()):
    """A cache in which a sequence's tokens were computed in these chunks, in blocks of a table.

    Each iteration also computes a token of the other sequences, in the blocks behind.
    """
    cache = model.new_cache(16, BLOCK)
    for begin, end in itertools.pairwise(chunks):
        parts = [(ids[begin:end], begin, table)]
        parts += [(ids[i : i + 1], begin, [8 + i]) for i in others if begin < BLOCK]
        positions = [torch.arange(past, past + len(new)) for new, past, _ in parts]
        slots = [torch.tensor(t)[p // BLOCK] * BLOCK + p % BLOCK for (*_, t), p in zip(parts, positions, strict=True)]
        tables = torch.zeros(len(parts), len(table), dtype=torch.int32)
        for row, (*_, own) in zip(tables, parts, strict=True):
            row[: len(own)] = torch.tensor(own)
        offsets = torch.tensor([0, *(len(new) for new, *_ in parts)]).cumsum(0).int()
        contexts = torch.tensor([past + len(new) for new, past, _ in parts], dtype=torch.int32)
        part = AttentionBatch(0, int(offsets[-1]), tables, offsets, contexts)
        tokens = torch.cat([new for new, *_ in parts])
        model.forward(Batch(tokens, torch.cat(positions), torch.cat(slots), (part,), None), cache)
    whole = len(ids) // BLOCK  # of a block that is not full, some bytes belong to no token
    return [tensor[table[:whole]].contiguous().view(torch.uint8) for tensor in cache.keys + cache.values]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["llama", "mistral"]),
    st.sampled_from(["int8", "fp32"]),
    st.lists(st.integers(1, 79), max_size=6),
    st.sampled_from([(), (0,), (1, 2, 5)]),
    st.permutations(range(8)),
    st.integers(0, 1000),
)
def test_caches_are_equal_bit_by_bit(models, name, kv_dtype, cuts, others, table, seed):
    """Whole prompts, chunks, decoded tokens, in other blocks and beside other requests: in every layer."""
    model = models[name, kv_dtype]
    ids = torch.randint(0, 300, (80,), generator=torch.Generator().manual_seed(seed))
    whole = computed(model, ids, [0, 80], list(range(8)))
    assert all(part.any() for part in whole)
    for chunks in ([0, *sorted(set(cuts)), 80], [0, max(cuts, default=60), *range(max(cuts, default=60) + 1, 81)]):
        again = computed(model, ids, chunks, table, others)
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True)), chunks


def tokens(model, policy, todo=None, kv_blocks=60, **variables):
    plan = schedule(model.spec, policy, kv_blocks=kv_blocks, kv_dtype=model.kv_dtype, **variables)
    report = Engine(model, plan).run(todo or requests())
    return {result.id: tuple(result.output_ids) for result in report.results}, report


def test_tokens_are_the_same_whole_chunked_preempted_and_with_prefixes(models):
    model = models["llama", "int8"]
    want, _ = tokens(model, "orca")
    assert tokens(model, "chunked")[0] == want and tokens(model, "rra")[0] == want
    got, report = tokens(model, "chunked", kv_blocks=SMALL, admission="grow")
    assert got == want and report.preemptions > 1
    want, _ = tokens(model, "orca", alike())
    assert tokens(model, "chunked", alike(), 8, **CACHING)[0] == want


def quantising(model):
    """A cache of transformers that keeps each head's key and value of a token as whole multiples of max / 127."""
    from transformers import DynamicCache

    def kept(x):
        step = x.abs().amax(-1, keepdim=True) / 127
        return (x / step).round() * step

    class Cache(DynamicCache):
        def update(self, key_states, value_states, *rest, **options):
            return super().update(kept(key_states), kept(value_states), *rest, **options)

    return Cache(config=model.config)


@pytest.mark.parametrize(
    ("name", "policy"),
    [("llama", "chunked"), ("mistral", "orca"), pytest.param("gpt2", "orca", marks=pytest.mark.slow)],
)
def test_tokens_are_those_of_transformers_with_a_cache_that_is_quantised_alike(models, paths, name, policy):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(paths[name], dtype=torch.float32)
    theirs.generation_config.eos_token_id = None
    todo = requests(SHORT)
    got, _ = tokens(models[name, "int8"], policy, todo)
    differing = 0
    for request in todo:
        want, gaps = generate(theirs, request, past_key_values=quantising(theirs))
        place = next((i for i, (a, b) in enumerate(zip(got[request.id], want, strict=True)) if a != b), None)
        differing += place is not None
        assert place is None or gaps[place] < 0.02, (request.id, place, gaps[place])
    assert differing <= 1  # codes at half a step may go either way


@pytest.mark.parametrize("pool", ["quotas", "merged"])
def test_models_of_several_kv_dtypes_share_a_memory(models, pool):
    kinds = [("llama", "int8"), ("mistral", "fp32"), ("mistral", "int8")]
    plans = [schedule(models[k].spec, "orca", kv_blocks=30, kv_dtype=models[k].kv_dtype) for k in kinds]
    engines = [
        Engine(models[kind], plan, shared=shared)
        for kind, plan, shared in zip(kinds, plans, shared_caches(plans, pool, Ranks()), strict=True)
    ]
    for kind, engine in [*zip(kinds, engines, strict=True), (kinds[0], engines[0])]:
        got = {result.id: tuple(result.output_ids) for result in engine.run(requests(SHORT)).results}
        assert got == tokens(models[kind], "orca", requests(SHORT))[0], kind


def test_memory_is_what_a_plan_counts(models):
    from xsimulator.cost.memory import device_memory

    model = models["llama", "int8"]
    plan = schedule(model.spec, "orca", kv_dtype="int8")
    held = model.new_cache(40, BLOCK).bytes
    assert held == cache_bytes(model, plan, 40) == 40 * BLOCK * 5 * model.spec.kv_bytes(1, "int8")
    assert held == 40 * BLOCK * 5 * 2 * 2 * (16 + 4)  # layers, keys and values, heads, codes and a scale
    counted = device_memory(model.spec, plan.cluster, plan.stages[0], "fp32", "int8", (True, True))
    assert counted.idle.block == held / 40


@pytest.mark.slow
def test_scales_go_from_encoding_to_decoding_ranks(job, tmp_path, directories, models):
    model, todo = models["llama", "int8"], requests(SHORT)
    sides = {"stages": ((1, 1), (1,)), "heads": ((2,), (1,))}
    plans = {n: ("llama", cells.disaggregated(model.spec, *d, kv_dtype="int8")) for n, d in sides.items()}
    want, _ = tokens(model, "orca", todo)
    for name, ran in run_cells(job, tmp_path, directories, 3, plans, todo=todo).items():
        assert {r["id"]: tuple(r["output_ids"]) for r in ran["results"]} == want, name


def test_what_cannot_run_is_refused_in_one_sentence(directories, tmp_path):
    spec = ModelSpec.from_directory(directories["llama"])
    plan = schedule(spec, "orca", kv_dtype="int8")
    check_runnable(plan, spec)
    with pytest.raises(InputError, match="on a CPU only: use --device cpu, or fp32"):
        on_device(plan, torch.device("cuda"), "triton")
    with pytest.raises(InputError, match="has kv_dtype int8, but the model was loaded in fp32"):
        Engine(load_model(directories["llama"]), plan)
    odd = dataclasses.replace(spec, head_size=18)
    with pytest.raises(InputError, match="heads of size 18, and int8 keys and values need a multiple of 4"):
        check_runnable(schedule(odd, "orca", kv_dtype="int8"), odd)
    create_model(tmp_path / "t5", "t5", layers=2, hidden=64, heads=4, ffn=72, vocab=300)
    encoder_decoder = ModelSpec.from_directory(tmp_path / "t5")
    with pytest.raises(InputError, match="is an encoder-decoder, which can't run with int8"):
        load_model(tmp_path / "t5", kv_dtype="int8")
    assert encoder_decoder.encoder_layers
