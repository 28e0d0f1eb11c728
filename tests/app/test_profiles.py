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
