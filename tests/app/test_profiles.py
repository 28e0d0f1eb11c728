"""Profiles that fit a model, a cluster and an attention."""

from dataclasses import replace

import torch

from exegpt import document
from exegpt.app.profiles import find_profile
from exegpt.cluster import local_cluster
from exegpt.model import ModelSpec
from exegpt.models import planning
from exegpt.profile import Profile
from xprofiler import store

GPU = torch.device("cuda", 0)


def test_a_profile_is_of_its_attention(monkeypatch, tmp_path, tiny, tiny_profile):
    """A stored one is used for the same alone; of a file's a note names it."""
    monkeypatch.setenv("EXEGPT_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU")
    monkeypatch.setattr(planning, "described", lambda attention, device: f"{attention} 0.7")
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
        ("triton", ", measured with attention by flashinfer 0.7 and not by triton"),
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
