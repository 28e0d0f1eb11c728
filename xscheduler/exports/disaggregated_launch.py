"""The launch commands of prefill and decode replicas: one engine each, and a router before them."""

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from xcore.errors import InputError
from xcore.specs.prefill_decode import PrefillDecode
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule

if TYPE_CHECKING:
    from xscheduler.export import Target

_NIXL = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
_FLAGS = {
    "vllm": dict.fromkeys(("prefill", "decode"), ("--kv-transfer-config", _NIXL)),
    "sglang": {side: ("--disaggregation-mode", side) for side in ("prefill", "decode")},
}
"""Flags of each side, by engine."""
ROUTERS = {
    "vllm": "vLLM needs a router that sends each request to a prefill replica first, like llm-d's; replicas on one "
    "node each need devices (CUDA_VISIBLE_DEVICES), a --port and a VLLM_NIXL_SIDE_CHANNEL_PORT of their own",
    "sglang": "SGLang's router sends each request to a replica of both sides: python -m sglang_router.launch_router "
    "--pd-disaggregation --prefill URL --decode URL; replicas on one node each need devices (--base-gpu-id), a --port "
    "and a --disaggregation-bootstrap-port of their own",
}
"""The router and the settings that an engine needs besides the replicas."""


@dataclass(frozen=True)
class SideCommand:
    """The command that starts one replica of a side."""

    side: str
    replicas: int
    text: str


def check_engine(engine: str, form: str | None) -> None:
    """Raise InputError for an engine or a form of export whose flags for prefill and decode replicas aren't known."""
    if engine not in _FLAGS:
        raise InputError(
            f"The export of prefill and decode replicas knows {' and '.join(_FLAGS)}, but not {engine}: pass one of "
            "these, or leave --disaggregated out."
        )
    if form not in (None, "command"):
        raise InputError(f"--export-as {form} has no prefill and decode replicas: leave it or --disaggregated out.")


def side_commands(target: "Target", plan: PrefillDecode, profile: Profile) -> tuple[SideCommand, ...]:
    """Return the commands that start a replica of each side with the target's engine."""
    sides = (("prefill", plan.prefill), ("decode", plan.decode))
    return tuple(
        SideCommand(side, schedule.replicas, _command(target, side, schedule, profile)) for side, schedule in sides
    )


def _command(target: "Target", side: str, schedule: Schedule, profile: Profile) -> str:
    followed = target.follows(replace(schedule, replicas=1), profile)
    start = target.start(followed, 1)
    flags = _FLAGS[target.engine][side]
    return "\n".join(replace(command, words=(*command.words, *flags)).text for command in start.commands)
