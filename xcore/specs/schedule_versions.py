"""Schedules in files: version 2 has the policy's variables under `control`, version 1 has all policies' at once."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from xcore.document import validated
from xcore.errors import InputError
from xcore.policies import traits_of
from xcore.policies.control import Control, kinds

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

VERSIONS = (1, 2)
"""Versions that are read; the last is written."""

OF_VERSION_1 = (
    *("encode_batch", "decode_iterations", "decode_batch", "micro_batches", "encode_micro_batches"),
    *("max_num_seqs", "max_num_batched_tokens", "prefills_per_step"),
)
"""The control variables that a file of version 1 has, null where its policy has no such variable."""

DEGREES = ("tp_degree", "tp_gpus", "encode_tp_degree", "encode_tp_gpus")
"""The tensor parallelism of the stages, which files repeat."""


def read_control(data: Mapping[str, object]) -> dict[str, object]:
    """Return a schedule's plain data with `control` as its policy's record.

    Keys that follow from the stages are removed. Raises InputError for variables that the policy doesn't have, or that
    are missing or wrong.
    """
    rest = {name: value for name, value in data.items() if name not in DEGREES}
    policy, version = data.get("policy"), data.get("version")
    if not isinstance(policy, str) or type(version) is not int:
        return rest  # which is refused for its types, together with all else that is wrong
    check_version(version)
    record, variables = traits_of(policy).control, data.get("control")
    if version == 1:
        if "control" in data:
            raise InputError("control is a key of version 2, but the version is 1: run `exegpt tune` again")
        variables = {name: value for name in OF_VERSION_1 if (value := rest.pop(name, None)) is not None}
        rest["version"] = VERSIONS[-1]
        _refuse_others(policy, record, variables)
    elif beside := [name for name in kinds(record) if name in data]:
        raise InputError(f"{beside[0]} is a control variable: move it into control, or change this file's version to 1")
    elif "control" not in data:
        return rest
    if isinstance(variables, dict):
        rest["control"] = _record(policy, record, variables)
    return rest


def check_version(version: object, read: tuple[int, ...] = VERSIONS) -> None:
    """Raise InputError for a version that isn't read."""
    if version not in read:
        known = " and ".join(map(str, VERSIONS))
        raise InputError(
            f"This schedule has version {version}, but this version of exegpt reads versions {known}: run `exegpt "
            "tune` again."
        )


def _refuse_others(policy: str, record: type[Control], variables: Mapping[str, object]) -> None:
    for name, value in variables.items():
        if name not in kinds(record):
            own = ", ".join(declared(record))
            raise InputError(
                f"A schedule of policy {policy} can't have {name} (got {value}), because its variables are {own}; "
                "set it to null, or run `exegpt tune` again"
            )


def declared(record: type[Control]) -> tuple[str, ...]:
    """Return the names of the variables that the policy itself declares."""
    return tuple(name for name, kind in kinds(record).items() if kind is not None)


def _record(policy: str, record: type[Control], variables: dict[str, object]) -> Control:
    control, problems = validated(record, variables)
    if control is None:
        raise InputError(f"The control variables of policy {policy} are wrong: {'; '.join(problems)}")
    return control


def check_degrees(data: Mapping[str, object], stages: Mapping[str, int | None]) -> None:
    """Raise InputError if a file's tensor parallelism differs from that of its stages, which decide what runs."""
    for name in DEGREES:
        value, of_stages = data.get(name), stages[name]
        if value is not None and value != of_stages:
            has = "only stages of phase encode have it" if of_stages is None else f"its stages have {of_stages}"
            raise InputError(
                f"A schedule can't have {name} {value}: {has}; set it to null, or run `exegpt tune` again."
            )


class AnyRecord:
    """Marks a field for the record of any policy; a schedule is read with the record of its policy."""

    def __get_pydantic_core_schema__(self, source: type, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        from pydantic_core import core_schema  # only what reads or writes documents calls this

        plain = core_schema.plain_serializer_function_ser_schema(_plain)
        return core_schema.no_info_plain_validator_function(_checked, serialization=plain)

    def __get_pydantic_json_schema__(
        self, schema: "CoreSchema", handler: "GetJsonSchemaHandler"
    ) -> dict[str, str | dict[str, list[str]]]:
        """Describe the record in /openapi.json: which variables it has depends on the policy."""
        return {"type": "object", "additionalProperties": {"type": ["integer", "null"]}}


def _checked(value: object) -> object:
    """Raise ValueError for a value that is neither a record nor, if the policy couldn't be read, a group of keys."""
    from pydantic_core import PydanticCustomError

    if not isinstance(value, Control | dict):
        raise PydanticCustomError("dataclass_type", "Input should be a group of keys")
    return value


def _plain(control: Control) -> dict[str, int | None]:
    """Return the policy's own variables, and the pipeline's variables that are set."""
    own = declared(type(control))
    return {name: value for name, value in control.variables.items() if name in own or value is not None}
