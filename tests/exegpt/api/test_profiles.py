"""Profiles that fit a model, a cluster and an attention."""

from dataclasses import replace

import pytest
import torch

from xcore import document
from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import local_cluster, parse_cluster
from xcore.specs.engine_spec import engine_of
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xprofiler import store
from xprofiler.profiles import find_profile
from xprofiler.roofline import roofline_profile
from xrunner.models import attention_planning
from xscheduler.settings import find_setting

GPU = torch.device("cuda", 0)


def test_a_profile_is_of_its_attention(monkeypatch, tmp_path, tiny, tiny_profile):
    """A stored one is used for the same alone; of a file's a note names it."""
    monkeypatch.setenv("EXEGPT_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    monkeypatch.setattr(attention_planning, "described", lambda attention, device: f"{attention} 0.7")
    spec, measured = ModelSpec.from_directory(tiny), document.read(Profile, tiny_profile)
    facts = store.facts(GPU, attention="flashinfer")
    assert facts["attention"] == "flashinfer 0.7" and store.facts(GPU)["attention"] == "triton 0.7"
    by_flashinfer = replace(measured, provenance=facts)
    assert by_flashinfer.fingerprint != measured.fingerprint
    store.save(by_flashinfer, spec, facts)
    assert store.find_here(spec, measured.dtype, GPU, "flashinfer") == by_flashinfer
    assert store.find_here(spec, measured.dtype, GPU) is None
    path = tmp_path / "profile.json"
    document.write(path, by_flashinfer)
    for attention, note in (
        ("triton", ", measured with flashinfer 0.7 attention, not with triton"),
        ("flashinfer", ""),
    ):
        _, which = find_profile(str(path), spec, local_cluster(), measured.dtype, attention=attention)
        assert which == f"profile: '{path}'{note}"
    _, which = find_profile(str(tiny_profile), spec, local_cluster(), measured.dtype, attention="flashinfer")
    assert which == f"profile: '{tiny_profile}'"  # which names none


def test_a_profile_is_matched_without_the_context(monkeypatch, tmp_path, tiny, tiny_profile):
    """By the layers' sizes; one from before, which doesn't have their fingerprint, by all sizes."""
    monkeypatch.setenv("EXEGPT_CACHE", str(tmp_path))
    spec = ModelSpec.from_directory(tiny)
    measured = replace(document.read(Profile, tiny_profile), layers=spec.layers_fingerprint)
    longer, wider = replace(spec, context=2 * spec.context), replace(spec, ffn=2 * spec.ffn)
    former = replace(measured, layers=None)
    assert former.fingerprint == measured.fingerprint
    assert [measured.is_for(model) for model in (spec, longer, wider)] == [True, True, False]
    assert [former.is_for(model) for model in (spec, longer, wider)] == [True, False, False]
    store.save(measured, spec, {"machine": "this"})
    assert store.find(longer, measured.dtype, {"machine": "this"}) == measured
    assert store.find(wider, measured.dtype, {"machine": "this"}) is None


def test_a_profile_that_was_stored_by_all_sizes_is_found(monkeypatch, tmp_path, tiny, tiny_profile):
    monkeypatch.setenv("EXEGPT_CACHE", str(tmp_path))
    spec, measured = ModelSpec.from_directory(tiny), document.read(Profile, tiny_profile)
    facts = {name: value for name, value in document.to_dict(replace(spec, name="")).items() if name != "sorts_logits"}
    key = document.fingerprint([facts, measured.dtype, [("machine", "this")]])
    (tmp_path / "profiles").mkdir()
    document.write(tmp_path / "profiles" / f"{spec.architecture}-{key}.json", measured)
    assert store.find(spec, measured.dtype, {"machine": "this"}) == measured
    assert store.find(replace(spec, context=9), measured.dtype, {"machine": "this"}) is None


@pytest.fixture
def imported(tmp_path):
    """A file of kernels without an engine's time."""
    spec = builtin_model("llama-3.1-8b")
    facts = {"origin": "a table", "engine": "vllm", "kv_dtype": "bf16", "not_in_source": "sampling"}
    profile = roofline_profile(spec, parse_cluster("2xH100-SXM"), "bf16")
    document.write(tmp_path / "kernels.json", replace(profile, source="operators", provenance=facts))
    return tmp_path / "kernels.json"


def test_an_engine_can_be_named_for_imported_kernels(imported):
    asked = ("llama-3.1-8b", "2xH100-SXM", "2048/256", str(imported))
    alone, served = find_setting(*asked), find_setting(*asked, engine="vllm")
    assert alone.own is None, "kernels without an engine's time are the same for all policies"
    assert (served.profile.in_flight, served.profile.front_end_s) == (2, 7e-3)
    assert any("with the time of engine vllm" in text for text in served.assumptions)
    assert served.own.engine == "exegpt" and served.own.cluster.memory_fraction == 0.9
    assert served.on("chunked").profile is served.profile and served.on("rra").profile is served.own.profile
    assert served.own.profile.overhead(64) == pytest.approx(0.29e-3, rel=0.02)
    assert find_setting(*asked, engine="none").own is None


def test_an_engine_is_refused_beside_times_of_another(tiny, tiny_profile):
    asked = (str(tiny), "local", "20/10", str(tiny_profile))
    with pytest.raises(InputError, match=r"measured with engine exegpt: leave one of them out"):
        find_setting(*asked, engine="vllm")
    assert find_setting(*asked, engine="exegpt").own is None


@pytest.mark.parametrize("engine", [None, "vllm", "vllm-0.11", "sglang", "tensorrt-llm"])
def test_policies_that_a_server_lacks_are_predicted_with_our_engine(engine):
    setting = find_setting("llama-3.1-8b", "1xH100-SXM", "2048/256", engine=engine, front_end="13ms")
    assert engine_of(setting.on("chunked").profile).name == (engine or "vllm")
    assert setting.own.engine == "exegpt" and setting.own.profile.front_end_s == pytest.approx(13e-3)
    text = f"engines: {engine or 'vllm'} does not run static, hybrid, orca, rra, waa-c, waa-m; the predictions"
    assert any(said.startswith(text) for said in setting.assumptions)


@pytest.mark.parametrize("engine", ["exegpt", "paper", "none"])
def test_one_engine_is_enough_where_it_runs_all(engine):
    setting = find_setting("llama-3.1-8b", "1xH100-SXM", "2048/256", engine=engine)
    assert setting.own is None and setting.on("rra") == setting
