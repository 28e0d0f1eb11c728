"""The host's time is that of full batches, by graphs that are replayed and not made."""

import pytest

pytest.importorskip("triton")

from benchmarks import host_step
from benchmarks.launches import META, on_no_device
from xcore.policies.orca import OrcaControl
from xcore.policies.rra import RRAControl
from xcore.specs.model import ModelSpec
from xrunner.comm.ranks import Ranks
from xrunner.models import random_model


@pytest.mark.parametrize("policy", host_step.POLICIES)
@pytest.mark.parametrize("way", host_step.WAYS.values(), ids=host_step.WAYS)
@pytest.mark.parametrize("ranks", [Ranks, host_step.OwnTime])
def test_full_batches_are_timed(monkeypatch, policy, way, ranks):
    small = {
        "orca": OrcaControl(max_num_seqs=4, prefills_per_step=4),
        "rra": RRAControl(encode_batch=1, decode_batch=4, decode_iterations=2),
    }
    for name, value in {"BATCH": 4, "PROMPT": 5, "OUTPUT": 9, "POLICIES": small}.items():
        monkeypatch.setattr(host_step, name, value)
    replayed = []
    capture = host_step.Absent.capture
    monkeypatch.setattr(host_step.Absent, "capture", lambda *given: (capture(*given), lambda: replayed.append(1))[1])
    spec = ModelSpec("m", "llama", 2, 32, 2, 1, 16, 48, True, 1000, 2048)
    with on_no_device():
        model = random_model(spec, dtype="bf16", device=META)
        times = host_step.steps(model, policy, way, ranks())
    assert len(replayed) >= len(times) > 5 and (times > 0).all()
