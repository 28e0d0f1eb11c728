"""What an engine says that it serves."""

from types import SimpleNamespace

import pytest

from exegpt.api import serving_engine
from exegpt.api.serving_engine import engine_setting
from exegpt.options.served import EngineOptions, ServedOptions
from tests.xserver.conftest import schedule_for
from xcore import document
from xcore.specs.profile import Profile


@pytest.mark.parametrize("workload", [None, "20/10"])
def test_a_given_schedule_has_its_own_workload(tiny, tiny_profile, workload, capsys):
    """Not task S, clipped to the model's context, as the default."""
    given = schedule_for(tiny)
    options = EngineOptions(ServedOptions(workload=workload), str(tiny))
    measured = SimpleNamespace(profile=document.read(Profile, tiny_profile), cluster=given.cluster)
    setting = engine_setting(options, measured, given)
    assert setting.workload.name == (workload or given.workload.name)
    (assumption,) = setting.assumptions
    assert assumption.startswith("profile: ") and assumption in capsys.readouterr().err
    assert engine_setting(options, measured, None).workload.name.startswith(workload or "S")


@pytest.mark.parametrize(("scale", "longest"), [(False, 30), (True, 127)])
def test_a_servers_trace_has_its_columns_and_fits_the_context(tiny, tiny_profile, tmp_path, scale, longest, capsys):
    """The context is 128 tokens."""
    path = tmp_path / "t.csv"
    path.write_text("in,out,ts\n" + "".join(f"{n},2,{50 * place}\n" for place, n in enumerate([30] * 20 + [300])))
    columns = "input=in,output=out,arrival=ts:ms"
    options = EngineOptions(ServedOptions(workload=str(path), columns=columns, scale_to_context=scale), str(tiny))
    measured = SimpleNamespace(profile=document.read(Profile, tiny_profile), cluster=schedule_for(tiny).cluster)
    workload = engine_setting(options, measured, None).workload
    assert workload.input.max <= longest and len(workload.requests) == (21 if scale else 20)
    err = capsys.readouterr().err
    assert "arrivals in column 'ts' are in milliseconds, as --columns says: 20 requests/s" in err
    assert ("1 of 21 rows" in err) is not scale


@pytest.mark.parametrize(
    ("policy", "off", "cached"), [("orca", False, True), ("orca", True, False), ("static", False, False)]
)
def test_prefixes_are_cached_wherever_the_policy_can(tiny, tiny_profile, monkeypatch, policy, off, cached):
    variables = {"static": {"encode_batch": 2}}.get(policy, {})
    monkeypatch.setattr(serving_engine, "_searched", lambda *_: (schedule_for(tiny, policy, **variables), None))
    measured = SimpleNamespace(profile=document.read(Profile, tiny_profile), cluster=schedule_for(tiny).cluster)
    options = EngineOptions(ServedOptions(no_prefix_caching=off), str(tiny))
    plan = serving_engine._found(options, None, measured, "paged")
    assert plan.opened.schedule.prefix_caching is cached
