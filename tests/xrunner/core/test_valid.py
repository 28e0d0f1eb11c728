"""Every reason for which a schedule can't be run, named."""

import dataclasses

import pytest

from tests.xrunner.cells import LAYOUTS, POLICIES, WAA, schedule
from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Stage
from xcore.specs.speculation import Speculation
from xrunner.core.job_setup import check_runnable

SPEC = ModelSpec("m", "llama", 5, 64, 4, 2, 16, 96, True, 300, 96)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_whole_matrix_can_be_run(policy):
    for layouts in LAYOUTS.values():
        for degrees, replicas in layouts:
            check_runnable(schedule(SPEC, policy, degrees, replicas=replicas), SPEC)


def stage(devices, layers, tp=None, phase="both"):
    return Stage(tuple(devices), len(devices) if tp is None else tp, phase, None, layers)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "fp8", "kv_dtype": "fp8"}, "dtype fp8 and kv_dtype fp8"),
        ({"kv_dtype": "bf16"}, "dtype fp32 and kv_dtype bf16"),
        ({"speculation": Speculation((0.8, 0.5))}, "drafts 2 tokens per iteration, and this engine doesn't"),
        ({"stages": (stage([0], (0, 3)), stage([2], (3, 5)))}, r"devices \[0, 2\]"),
        ({"stages": (stage([0], (0, 3)), stage([0], (3, 5)))}, r"devices \[0, 0\]"),
        ({"stages": (stage([0, 1], (0, 5), 1),)}, r"degree 1 has the devices \[0, 1\]"),
        ({"stages": (stage([0, 1, 2], (0, 5)),)}, "degree 3, but model 'm' can only be split into 1, 2"),
        ({"stages": (stage([0], (0, 3)), stage([1], (3, 4)))}, "layers 0:3, 3:4 of the 5"),
        ({"stages": (stage([0], (0, 3)), stage([1], (2, 5)))}, "layers 0:3, 2:5 of the 5"),
        ({"stages": (stage([0], (3, 5)), stage([1], (0, 3)))}, "layers 3:5, 0:3 of the 5"),
        ({"stages": (stage([0], (0, 5)), stage([1], None))}, "layers 0:5, none of the 5"),
        ({"stages": (stage([0], (0, 5)), stage([1], (5, 5)))}, "layers 0:5, 5:5 of the 5"),
    ],
)
def test_a_schedule_that_cannot_be_run_is_refused_with_the_reason(changes, words):
    with pytest.raises(InputError, match=words):
        check_runnable(schedule(SPEC, "rra", **changes), SPEC)


def test_a_schedule_for_another_model():
    with pytest.raises(InputError, match="not for 'm'"):
        check_runnable(schedule(dataclasses.replace(SPEC, layers=4)), SPEC)


T5 = builtin_model("t5-small")


def t5_stages(*held):
    """One device each, with (phase, encoder layers, decoder layers)."""
    return tuple(Stage((i,), 1, *stage) for i, stage in enumerate(held))


@pytest.mark.parametrize(
    "stages",
    [
        t5_stages(("both", (0, 6), (0, 6))),
        t5_stages(("both", (0, 3), (0, 2)), ("both", (3, 6), (2, 6))),
        t5_stages(("encode", (0, 6), None), ("decode", None, (0, 1)), ("decode", None, (1, 6))),
    ],
)
def test_an_encoder_decoder_runs_on_stages(stages):
    check_runnable(schedule(T5, "waa-c" if len(stages) == 3 else "rra", stages=stages, **WAA), T5)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ((("both", (0, 3), (0, 3)), ("both", (3, 5), (3, 6))), "phase both hold the encoder layers 0:3, 3:5 of the 6"),
        ((("both", (0, 6), (0, 3)), ("both", None, (3, 6))), "phase both hold the encoder layers 0:6, none of the 6"),
        ((("both", (0, 3), (0, 6)), ("both", (3, 6), None)), "phase both hold the layers 0:6, none of the 6"),
        ((("encode", (0, 6), (0, 6)), ("decode", None, (0, 6))), "phase encode hold the layers 0:6 of the 0"),
        ((("encode", (0, 6), None), ("decode", (0, 6), (0, 6))), "phase decode hold the encoder layers 0:6 of the 0"),
        ((("encode", None, None), ("decode", None, (0, 6))), "phase encode hold the encoder layers none of the 6"),
    ],
)
def test_an_encoder_decoders_layers_are_where_their_phase_is(stages, words):
    plan = schedule(T5, "waa-c" if stages[0][0] == "encode" else "rra", stages=t5_stages(*stages), **WAA)
    with pytest.raises(InputError, match=words):
        check_runnable(plan, T5)


def test_an_encoder_reads_prompts_whole():
    plan = schedule(T5, "chunked", stages=t5_stages(("both", (0, 6), (0, 6))))
    with pytest.raises(InputError, match="reads a whole prompt"):
        check_runnable(plan, T5)
