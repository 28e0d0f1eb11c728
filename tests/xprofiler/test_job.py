"""A job's profile: measured again while the machine is busy."""

from dataclasses import replace

import pytest

from tests.xprofiler import small
from xprofiler import job, points, store
from xprofiler.job import measured_job
from xrunner.comm.ranks import Ranks
from xrunner.models.create import create_model


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("EXEGPT_CACHE", str(tmp_path / "cache"))
    small.shrink(monkeypatch.setattr)
    monkeypatch.setattr(job, "FEW", points.FEW)
    create_model(tmp_path / "tiny", "llama", layers=1, hidden=32, heads=2, kv_heads=1, vocab=300, context=48, ffn=48)
    return tmp_path / "tiny"


@pytest.fixture
def spreads(monkeypatch):
    """The spreads of what is measured, one after the other; those that are left weren't needed."""
    left, real = [0.9, 0.6, 0.7, 0.1], job.measure_job

    def measure(*given, **options):
        measured, spread = real(*given, **options), left.pop(0)
        (tables,) = measured.profile.degrees
        rest = replace(tables.decoder.rest, spread=(spread,) * len(tables.decoder.rest.values))
        calm = {
            name: replace(getattr(tables.decoder, name), spread=None)
            for name in ("encode_attention", "decode_attention")
        }
        layer = replace(tables.decoder, rest=rest, **calm)
        degree = replace(tables, decoder=layer, head=replace(tables.head, spread=None))
        return replace(measured, profile=replace(measured.profile, degrees=(degree,)))

    monkeypatch.setattr(job, "measure_job", measure)
    return left


def test_the_calmest_of_three_is_kept(model, spreads):
    first = measured_job(model, "fp32", Ranks())
    assert spreads == [0.1] and first.profile.spread == pytest.approx(0.6) and not store.is_calm(first.profile)
    assert measured_job(model, "fp32", Ranks()).profile == first.profile and spreads == [0.1]


def test_a_quiet_machine_is_measured_once(model, spreads):
    spreads[:] = [0.1, 0.0]
    assert measured_job(model, "fp32", Ranks()).profile.spread == pytest.approx(0.1) and spreads == [0.0]
