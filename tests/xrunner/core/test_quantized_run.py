"""A quantised checkpoint under every policy: the tokens of the same model with dequantised float32 weights."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from exegpt.kernels.quantized_weight import rounded_to_nearest
from tests.xrunner.cells import POLICIES
from xcore.document import fingerprint
from xcore.errors import InputError
from xcore.policies import TRAITS
from xcore.requests.request import Request
from xcore.specs.cluster import local_cluster
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule, Stage
from xcore.specs.workload import Workload
from xrunner.core.engine import Engine
from xrunner.core.job_setup import check_runnable
from xrunner.models import load_model
from xrunner.models.create import create_model
from xrunner.models.quantize import quantize_model

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 300, "context": 96}
LENGTHS = [(1, 5), (40, 12), (5, 14), (17, 1), (33, 2), (64, 8)]


@pytest.fixture(scope="module", params=[8, 4])
def models(request, tmp_path_factory):
    """The quantised model and its twin in float32."""
    root, bits = tmp_path_factory.mktemp("quantised"), request.param
    create_model(root / "m", **SIZES)
    quantize_model(root / "m", root / "q", bits, 32)
    path = root / "m" / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith("_proj.weight"):
            tensors[name] = rounded_to_nearest(tensors[name], bits, 32).dequantized()
    save_file(tensors, path, metadata={"format": "pt"})
    return load_model(root / "q", {8: "w8a32", 4: "w4a32"}[bits]), load_model(root / "m")


def schedule(model, policy, **changes):
    made = Schedule(
        version=Schedule.VERSION,
        policy=policy,
        control=TRAITS[policy].control(**POLICIES[policy]),
        model=ModelReference(model.spec, fingerprint(model.spec)),
        cluster=local_cluster(),
        workload=Workload.fixed(16, 8),
        profile=ProfileReference("roofline", "0"),
        stages=(Stage((0,), 1, "both", None, (0, 2)),),
        kv_blocks=22,
        block_size=16,
        dtype=model.dtype,
        kv_dtype="fp32",
    )
    return replace(made, **changes)


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_the_dequantised_model(models, policy):
    g = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(2, 300, (n,), generator=g).tolist()) for n, _ in LENGTHS]
    todo = [Request(str(i), p, most, True) for i, (p, (_, most)) in enumerate(zip(prompts, LENGTHS, strict=True))]
    got, expected = (
        {r.id: r.output_ids for r in Engine(model, schedule(model, policy)).run(todo).results} for model in models
    )
    assert len(got) == len(LENGTHS) and len({token for ids in got.values() for token in ids}) > 5
    assert sum(got[id] != expected[id] for id in expected) <= 1  # a tie within rounding may go either way


def test_a_schedule_for_other_weights_is_refused(models):
    quantised, twin = models
    check_runnable(schedule(quantised, "orca"), quantised.spec)
    with pytest.raises(InputError, match="dtype fp32, but the model was loaded in w"):
        Engine(quantised, schedule(twin, "orca"))
    with pytest.raises(InputError, match="both must be the same"):
        check_runnable(schedule(quantised, "orca", kv_dtype="bf16"), quantised.spec)
