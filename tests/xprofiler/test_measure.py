"""Measuring a tiny model's layers: every point is there, an interruption costs nothing, and it is found again."""

import json
from dataclasses import replace

import pytest

from xcore.document import read
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile, Table
from xprofiler import attention_probe, machine, measure, points, store
from xprofiler.points import FEW, FULL
from xprofiler.recorder import Recorder
from xprofiler.timing import Timing
from xrunner.models import Shard, load_model
from xrunner.models.cache import KVCache
from xrunner.models.create import create_model
from xrunner.rank.iteration_graphs import SIZES

from .small import shrink


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    create_model(path, "llama", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, vocab=300, context=48)
    return path


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Few points, a pool that fits the CPU's caches, and a cache folder of the test's own."""
    monkeypatch.setenv("EXEGPT_CACHE", str(tmp_path))
    shrink(monkeypatch.setattr)


def test_a_profile_has_every_table_positive_and_is_found_again(directory):
    points = []
    profile = measure.measure_profile(directory, progress=lambda *at: points.append(at))
    assert profile.source == "measured"
    tables = profile.degree(1)
    layer = tables.decoder
    for table in (layer.rest, layer.encode_attention, layer.chunk_attention, layer.decode_attention, tables.head):
        assert min(table.values) > 0
        assert len(table.spread) == len(table.values)
    assert layer.decode_attention.covers(4, 48)  # the whole context
    assert profile.switch and profile.switch.values[0] == 0.0 and profile.switch.covers(2**20)
    assert profile.merged_blocks and 1 <= profile.merged_blocks < 100
    assert FULL.other_bytes[-1] == FEW.other_bytes[-1] == 2**28  # where the points aren't few
    assert points[-1][1] == points[-1][2] == len(points)
    spec = ModelSpec.from_directory(directory)
    stored = store.find(spec, "fp32", machine.provenance())
    assert stored == profile
    assert store.find(spec, "bf16", machine.provenance()) is None


def test_padded_iterations_take_as_long_as_the_next_measured_number_of_tokens():
    table = Table(("tokens",), ((1.0, 2.0, 4.0, 16.0, 64.0),), (1.0, 3.0, 4.0, 9.0, 21.0), (0.1, 0.2, 0.3, 0.4, 0.5))
    stairs = measure.padded(table, 16)
    for tokens in range(1, 17):
        assert stairs.at(tokens) == next(s for n, s in zip(*table.points, table.values, strict=True) if n >= tokens)
    assert [stairs.at(n) for n in (17, 40, 64, 100)] == [table.at(n) for n in (17, 40, 64, 100)]
    assert measure.padded(table, 0) == table
    grid = replace(points.FULL, tokens=(1, 260, 2052, 4100)).padded_to(SIZES)
    assert grid.tokens == (*SIZES, 2052, 4100) and grid.padded == 2048


def test_contexts_end_in_the_middle_of_a_block(directory):
    spec = replace(ModelSpec.from_directory(directory), context=2048)
    assert points.grids(points.FULL, spec)["decode_attention"].points[1][:6] == (1, 8, 24, 40, 72, 136)
    assert points.grids(points.FULL, spec)["decode_attention"].points[1][-1] == spec.longest_request


def test_an_interrupted_measurement_goes_on_where_it_stopped(directory, tmp_path, monkeypatch):
    def interrupt(table, done, total):
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure.measure_profile(directory, progress=interrupt)
    (partial,) = (tmp_path / "profiles").glob("*.partial")
    before = partial.read_text()
    written = []
    monkeypatch.setattr(measure.Recorder, "forget", lambda recorder: written.append(partial.read_text()))
    profile = measure.measure_profile(directory)
    assert written[0].startswith(before)  # what was measured stands, the rest follows
    points = [tuple(json.loads(line)[key] for key in ("table", "turn")) for line in written[0].splitlines()]
    at = [str(json.loads(line)["at"]) for line in written[0].splitlines()]
    assert len(set(zip(points, at, strict=True))) == len(points)  # and nothing was measured twice
    (stored,) = (tmp_path / "profiles").glob("*.json")
    assert read(Profile, stored) == profile


def test_a_shards_layer_counts_two_all_reduces(directory, monkeypatch):
    model = load_model(directory, shard=Shard(1, 2, lambda x: x))
    monkeypatch.setattr(measure, "time_all_reduce", lambda links, reduce, rows, hidden, dtype: Timing(float(rows), 0.5))
    recorder = Recorder()
    layer, encoder, reduced = measure._shard(model, recorder, points.FULL, None, None)
    assert encoder is None
    computed = recorder.compiled(points.grids(points.FULL, model.spec, 2)["rest"], len(model.layers)).values
    assert layer.rest.values == tuple(c + 2 * rows for c, rows in zip(computed, (1, 4, 16), strict=True))
    assert layer.rest.spread == pytest.approx((0.5,) * 3, abs=0.05)  # nearly all of it
    assert reduced.points == ((1 * 32 * 4.0, 4 * 32 * 4.0, 16 * 32 * 4.0),)  # float32 of 32 hidden
    assert layer.decode_attention.covers(4, 48) and min(layer.decode_attention.values) > 0


def test_sizes_alone_are_measured_with_random_weights(directory, monkeypatch):
    """With as many layers as outgrow the caches: a profile of the same model."""
    spec = ModelSpec.from_directory(directory)
    loaded = []
    real = measure.random_model
    monkeypatch.setattr(measure, "random_model", lambda *at, **by: loaded.append(real(*at, **by)) or loaded[-1])
    monkeypatch.setattr(measure, "COLD_BYTES", 2**14)
    profile = measure.measure_job(spec, "fp32", measure.Ranks()).profile
    assert [len(model.layers) for model in loaded] == [1]
    assert profile.model == spec.fingerprint and min(profile.degree(1).decoder.rest.values) > 0
    assert store.find(spec, "fp32", machine.provenance()) == profile


@pytest.mark.slow
def test_an_encoder_decoder_has_tables_of_both_stacks(tmp_path, monkeypatch):
    create_model(tmp_path / "t5", "t5", layers=2, hidden=32, heads=2, ffn=64, vocab=300, context=48)
    tables = measure.measure_profile(tmp_path / "t5").degree(1)
    assert tables.encoder and tables.decoder.cross_projection
    for table in (tables.encoder.rest, tables.decoder.rest, tables.decoder.cross_projection):
        assert min(table.values) > 0 and len(table.spread) == len(table.values)
    assert tables.encoder.encode_attention == tables.decoder.encode_attention

    def sums(links, reduce, rows, hidden, dtype):
        return Timing(100.0 * rows, 0.5)

    monkeypatch.setattr(measure, "time_all_reduce", sums)
    shard = load_model(tmp_path / "t5", shard=Shard(0, 2, lambda x: x))
    decoder, encoder, _ = measure._shard(shard, Recorder(), points.FULL, None, None)
    assert [round(value / 100) for value in decoder.rest.values] == [3 * rows for rows in (1, 4, 16)]
    assert [round(value / 100) for value in encoder.rest.values] == [2 * rows for rows in (1, 4, 16)]


def test_provenance_has_the_machine_and_its_rates(monkeypatch):
    facts = machine.provenance()
    assert facts["processor"] and int(facts["cores"]) >= 1 and facts["torch"]
    assert machine.matrix_flops_s(size=64) > 0
    assert machine.read_bandwidth_bytes_s(size=2**16) > 0


def test_the_attention_probe_reads_a_kv_cache_in_order(directory, monkeypatch):
    """Small pages and scattered blocks cost decoding attention a third on some machines, and a run has neither."""
    allocated = []
    real = KVCache.allocate
    monkeypatch.setattr(KVCache, "allocate", lambda *given: allocated.append(real(*given)) or allocated[-1])
    seen = []
    monkeypatch.setattr(
        attention_probe, "attention", lambda q, keys, values, tables, *rest, **_: seen.append((keys, tables))
    )
    probe = attention_probe.AttentionProbe(ModelSpec.from_directory(directory), 2, 40)
    call = probe.call(2, 1, 39)
    call()
    call()
    assert [keys is allocated[0].keys[0] for keys, _ in seen] == [True, True]
    assert [tables.flatten().tolist() for _, tables in seen] == [[*range(6)], [*range(6, 12)]]
