"""Every reason for which a schedule can't be run, named."""

import dataclasses

import pytest

from exegpt.builtin_models import builtin_model
from exegpt.document import fingerprint
from exegpt.model import ModelSpec
from exegpt.schedule import ModelReference, Stage
from xrunner.valid import why_not

from .cells import LAYOUTS, POLICIES, schedule, stages

SPEC = ModelSpec("m", "llama", 5, 64, 4, 2, 16, 96, True, 300, 96)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_whole_matrix_can_be_run(policy):
    for layouts in LAYOUTS.values():
        for degrees, replicas in layouts:
            assert why_not(schedule(SPEC, policy, degrees, replicas=replicas), SPEC) is None


def stage(devices, layers, tp=None, phase="both"):
    return Stage(tuple(devices), len(devices) if tp is None else tp, phase, None, layers)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "fp16", "kv_dtype": "fp16"}, "dtype fp16 and kv_dtype fp16"),
        ({"kv_dtype": "bf16"}, "dtype fp32 and kv_dtype bf16"),
        ({"stages": (stage([0], (0, 3)), stage([2], (3, 5)))}, r"devices \[0, 2\]"),
        ({"stages": (stage([0], (0, 3)), stage([0], (3, 5)))}, r"devices \[0, 0\]"),
        ({"stages": (stage([0, 1], (0, 5), 1),)}, r"degree 1 has the devices \[0, 1\]"),
        ({"stages": (stage([0, 1, 2], (0, 5)),)}, "degree 3, and model 'm' can be cut into 1, 2"),
        ({"stages": (stage([0], (0, 3)), stage([1], (3, 4)))}, "layers 0:3, 3:4 of the 5"),
        ({"stages": (stage([0], (0, 3)), stage([1], (2, 5)))}, "layers 0:3, 2:5 of the 5"),
        ({"stages": (stage([0], (3, 5)), stage([1], (0, 3)))}, "layers 3:5, 0:3 of the 5"),
        ({"stages": (stage([0], (0, 5)), stage([1], None))}, "layers 0:5, none of the 5"),
        ({"stages": (stage([0], (0, 5)), stage([1], (5, 5)))}, "layers 0:5, 5:5 of the 5"),
    ],
)
def test_a_schedule_that_cannot_be_run_is_told_why(changes, words):
    with pytest.raises(AssertionError, match=words):
        assert why_not(schedule(SPEC, "rra", **changes), SPEC) is None


def test_a_schedule_for_another_model():
    assert "not for 'm'" in (why_not(schedule(dataclasses.replace(SPEC, layers=4)), SPEC) or "")


def test_encoders_are_run_by_one_stage_alone():
    t5 = builtin_model("t5-small")
    reference = ModelReference(t5, fingerprint(t5))
    one = schedule(t5, "rra", model=reference, stages=(Stage((0,), 1, "both", (0, 6), (0, 6)),))
    assert why_not(one, t5) is None
    halves = tuple(Stage((i,), 1, "both", (3 * i, 3 * i + 3), (3 * i, 3 * i + 3)) for i in range(2))
    assert "has an encoder" in (why_not(dataclasses.replace(one, stages=halves), t5) or "")
    assert "reads them whole" in (why_not(schedule(t5, "chunked", stages=one.stages), t5) or "")
    assert stages((2, 1), 6)[1].decoder_layers == (3, 6)
