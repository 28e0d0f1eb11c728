"""A job's profile: measured again while the machine is busy."""

from dataclasses import replace

import pytest

from tests.xprofiler import small
from xcore.requests.starting import say_starting, starting_text
from xcore.specs.model import ModelSpec
from xprofiler import job, points, store
from xprofiler.job import measured_job
from xprofiler.profiles import measured_profile, profile_text
from xrunner.comm.ranks import Ranks
from xrunner.models.create import create_model
from xrunner.models.device import CPU


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
    left, real = [0.9, 0.6, 0.12, 0.1], job.measure_job

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


def test_a_busy_machines_profile_is_used_once_and_not_kept(model, spreads):
    first = measured_job(model, "fp32", Ranks()).profile
    assert spreads == [0.12, 0.1] and first.spread == pytest.approx(0.6)
    assert "used for this run only" in profile_text(first)
    second = measured_job(model, "fp32", Ranks()).profile
    assert spreads == [0.1] and second.spread == pytest.approx(0.12) and "this run" not in profile_text(second)
    assert measured_job(model, "fp32", Ranks()).profile == second and spreads == [0.1]


def test_a_busy_machines_profile_that_an_older_version_kept_is_measured_anew(model, spreads):
    spec = ModelSpec.from_directory(model)
    busy = measured_job(model, "fp32", Ranks())
    job.keep(busy, spec, Ranks(), CPU, job.FEW)
    assert store.find_here(spec, "fp32", CPU) is None
    assert measured_job(model, "fp32", Ranks()).profile.spread == pytest.approx(0.12)


def test_a_quiet_machine_is_measured_once(model, spreads):
    spreads[:] = [0.1, 0.0]
    assert measured_job(model, "fp32", Ranks()).profile.spread == pytest.approx(0.1) and spreads == [0.0]


def test_a_first_start_tells_what_it_measures(model, spreads, capsys, tmp_path):
    spreads[:] = [0.1]
    socket = tmp_path / "engine.sock"
    assert starting_text(socket) == ""
    told = []

    def say(text):
        say_starting(socket, text)
        told.append(starting_text(socket))

    measured_profile(model, "fp32", Ranks(), CPU, "triton", say)
    count = int(told[-1].split()[-2])
    assert told == [f"measuring this machine, {done} of {count} points" for done in range(1, count + 1)]
    assert f"measuring this machine for tiny: {count} points" in capsys.readouterr().err
    measured_profile(model, "fp32", Ranks(), CPU, "triton", say)
    assert len(told) == count and "measuring" not in capsys.readouterr().err  # stored
