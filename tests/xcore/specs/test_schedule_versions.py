"""Schedules are written as version 2, and read from files of versions 1 and 2."""

import json

import pytest

from tests.xcore.small_specs import schedule
from xcore.document import from_dict, read, to_dict, write
from xcore.errors import InputError
from xcore.files import read_schedule
from xcore.policies import TRAITS
from xcore.policies.rra import RRAControl
from xcore.specs.change import Change
from xcore.specs.schedule import Schedule, Stage

EVERY = (
    *("encode_batch", "decode_batch", "decode_iterations", "micro_batches", "encode_micro_batches"),
    *("max_num_seqs", "max_num_batched_tokens", "prefills_per_step"),
)


def plan_of(policy, **changes):
    layers = (0, schedule().model.spec.layers)
    apart = (Stage((0,), 1, "encode", None, layers), Stage((1,), 1, "decode", None, layers))
    return schedule(policy, **({"stages": apart} if TRAITS[policy].disaggregated else {}), **changes)


def version_1(plan):
    """The plain data of a schedule as version 1 has them."""
    data = to_dict(plan)
    control = data.pop("control")
    return {**data, "version": 1, **dict.fromkeys(EVERY), **control}


@pytest.mark.parametrize("policy", TRAITS)
def test_a_file_has_the_policys_own_variables_and_both_versions_give_the_same_schedule(policy, tmp_path):
    plan = plan_of(policy)
    data = to_dict(plan)
    assert data["version"] == 2 and not set(EVERY) & set(data)
    own = {name for name, kind in plan.control.variables.items() if kind is not None}
    assert own <= set(data["control"]) <= set(plan.control.variables)
    assert from_dict(Schedule, json.loads(json.dumps(data)), "it") == plan
    assert from_dict(Schedule, version_1(plan), "it") == plan
    write(tmp_path / "schedule.json", plan)
    assert read(Schedule, tmp_path / "schedule.json") == plan


def test_control_variables_are_the_policys_and_none_else():
    assert to_dict(plan_of("orca"))["control"] == {"max_num_seqs": 8, "prefills_per_step": 1}
    rra = {"encode_batch": 4, "decode_iterations": 8, "decode_batch": 9, "encode_micro_batches": None}
    assert to_dict(plan_of("rra"))["control"] == rra
    assert to_dict(plan_of("orca", micro_batches=3))["control"]["micro_batches"] == 3


def test_a_schedule_within_another_document_is_read_in_both_versions():
    plan = plan_of("chunked")
    change = Change(1.0, 2.0, 3.0, 0.1, False, plan)
    data = to_dict(change)
    assert data["schedule"]["control"] == {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    assert from_dict(Change, data, "it") == change == from_dict(Change, data | {"schedule": version_1(plan)}, "it")


def refusal(data, tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError) as refused:
        read_schedule(path)
    return str(refused.value)


@pytest.mark.parametrize("policy", TRAITS)
def test_a_variable_of_another_policy_is_refused_by_name(policy, tmp_path):
    """A stray max_num_seqs of 4 made RRA run with a batch of 4."""
    plan = plan_of(policy)
    for name in set(EVERY) - set(plan.control.variables):
        text = refusal(version_1(plan) | {name: 4}, tmp_path)
        assert f"policy {policy} can't have {name} (got 4), because its variables are " in text
        data = to_dict(plan)
        text = refusal(data | {"control": data["control"] | {name: 4}}, tmp_path)
        assert f"The control variables of policy {policy} are wrong: {name} is not known" in text


@pytest.mark.parametrize(
    ("control", "words"),
    [
        ({"max_num_seqs": 8}, "policy orca are wrong: prefills_per_step is missing"),
        ({"max_num_seqs": "eight", "prefills_per_step": 1}, "max_num_seqs must be a whole number (got 'eight')"),
        ({"max_num_seqs": True, "prefills_per_step": 1}, "max_num_seqs must be a whole number (got True)"),
        ({"max_num_seqs": 8, "prefills_per_step": 0}, "prefills_per_step can't be 0: it must be from 1 to 10,000,000"),
        ({"max_num_seqs": 8, "prefills_per_steps": 1}, "instead of prefills_per_steps write prefills_per_step"),
        (["max_num_seqs"], "control must be a group of keys (got ['max_num_seqs'])"),
        (None, "control must be a group of keys (got None)"),
    ],
)
def test_wrong_variables_are_refused_in_a_sentence(control, words, tmp_path):
    assert words in refusal(to_dict(plan_of("orca")) | {"control": control}, tmp_path)


def test_other_wrong_files_are_refused_in_a_sentence(tmp_path):
    data = to_dict(plan_of("orca"))
    without = {name: value for name, value in data.items() if name != "control"}
    assert "control is missing" in refusal(without, tmp_path)
    assert "There is no policy 'orka': use one of static, " in refusal(data | {"policy": "orka"}, tmp_path)
    assert "policy must be text (got 3)" in refusal(data | {"policy": 3}, tmp_path)
    assert "has schedule version 3, but this version of exegpt reads version 1 or 2" in refusal(
        data | {"version": 3}, tmp_path
    )
    assert "encode_batch is not known" in refusal(data | {"encode_batch": 3}, tmp_path)
    assert "max_num_seqs is a control variable: move it into control" in refusal(data | {"max_num_seqs": 3}, tmp_path)
    both = version_1(plan_of("orca")) | {"control": {}}
    assert "control is a key of version 2, but the version is 1" in refusal(both, tmp_path)
    missing = version_1(plan_of("orca")) | {"max_num_seqs": None}
    assert "policy orca are wrong: max_num_seqs is missing" in refusal(missing, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp_degree": 2}, "tp_degree 2: its stages have 1"),
        ({"tp_gpus": 4}, "tp_gpus 4: its stages have 0"),
        ({"encode_tp_degree": 1}, "encode_tp_degree 1: only stages of phase encode have it"),
    ],
)
@pytest.mark.parametrize("written", [to_dict, version_1])
def test_tensor_parallelism_that_the_stages_lack_is_refused(written, changes, words, tmp_path):
    assert to_dict(plan_of("rra"))["tp_degree"] == 1 and to_dict(plan_of("waa-c"))["encode_tp_gpus"] == 0
    assert words in refusal(written(plan_of("rra")) | changes, tmp_path)
    assert from_dict(Schedule, written(plan_of("rra")) | dict.fromkeys(changes), "it") == plan_of("rra")


def test_variables_of_another_record_are_refused():
    control = RRAControl(encode_batch=1, decode_iterations=2, decode_batch=3)
    with pytest.raises(InputError, match="policy orca can't have a RRAControl as its control variables"):
        Schedule(**{**vars(plan_of("orca")), "control": control})


def test_an_interfaces_description_has_the_record_as_an_object():
    from pydantic import TypeAdapter

    described = TypeAdapter(Schedule).json_schema()
    assert described["properties"]["control"]["type"] == "object" and "control" in described["required"]
