"""The flags of speculative decoding: those of vLLM (`--speculative-config`) and of SGLang, written and read."""

import json
from collections.abc import Mapping
from typing import Any

from xcore.errors import InputError
from xcore.specs.schedule import Schedule
from xscheduler.exports.launch_parts import hub_name

_DRAFT_MODEL, _STANDALONE = "draft_model", "STANDALONE"
"""The names of a separate draft model in vLLM and in SGLang."""
_HEADS = ("mtp", "eagle", "eagle3")
"""vLLM's methods with drafting layers (vllm/config/speculative.py); those of one model end with `_mtp`."""
_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", _STANDALONE)
"""SGLang's algorithms that are modelled (sglang/srt/speculative/spec_info.py)."""


def vllm_flags(schedule: Schedule) -> dict[str, object]:
    """Return vLLM's flag; none without speculation."""
    speculation = schedule.speculation
    if speculation is None:
        return {}
    config: dict[str, object] = {"method": "mtp"}
    if speculation.draft:
        config = {"method": _DRAFT_MODEL, "model": hub_name(speculation.draft.name)}
    return {"speculative-config": json.dumps(config | {"num_speculative_tokens": speculation.drafted})}


def sglang_flags(schedule: Schedule) -> dict[str, object]:
    """Return SGLang's flags; none without speculation."""
    speculation = schedule.speculation
    if speculation is None:
        return {}
    draft = {"speculative-draft-model-path": hub_name(speculation.draft.name)} if speculation.draft else {}
    return {
        "speculative-algorithm": _STANDALONE if speculation.draft else "NEXTN",
        **draft,
        "speculative-num-steps": speculation.drafted,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": speculation.rows,
    }


def speculative_notes(schedule: Schedule) -> tuple[str, ...]:
    """Return a sentence on the checkpoint that drafting layers need; none without them."""
    if schedule.speculation is None or schedule.speculation.draft:
        return ()
    return (
        "speculative decoding: the flags are for a checkpoint with layers for multi-token prediction (MTP); for an "
        "EAGLE head, name its method and its model instead",
    )


def vllm_settings(text: str) -> dict[str, str]:
    """Read the value of `--speculative-config` as options; ValueError for what isn't modelled."""
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    count = config.get("num_speculative_tokens") if isinstance(config, Mapping) else None
    if type(count) is not int or count < 1:
        raise ValueError('JSON with "num_speculative_tokens"')
    method = config.get("method", _DRAFT_MODEL if "model" in config else "mtp")
    if method in _HEADS or str(method).endswith("_mtp"):
        return {"num_speculative_tokens": str(count)}
    if method != _DRAFT_MODEL or not isinstance(config.get("model"), str):
        raise ValueError(f"a modelled method: {', '.join((_DRAFT_MODEL, *_HEADS))}")
    return {"num_speculative_tokens": str(count), "draft_model": config["model"]}


def one_branch(text: str) -> None:
    """Read the branches of SGLang's draft trees; ValueError for more than one."""
    if text != "1":
        raise ValueError("1: trees of drafts are not modelled")


def sglang_settings(found: dict[str, Any]) -> dict[str, str]:
    """Take SGLang's flags out of the settings of a command; return them as options."""
    algorithm, steps = found.pop("speculative_algorithm", None), found.pop("speculative_steps", None)
    path, verified = found.pop("speculative_path", None), found.pop("speculative_verified", None)
    if algorithm is None:
        return {}
    if algorithm not in _ALGORITHMS:
        raise InputError(
            f"--command has --speculative-algorithm {algorithm}, which is not modelled: use one of "
            f"{', '.join(_ALGORITHMS)}."
        )
    steps = steps or (verified or 1) - 1
    if not steps or (verified and verified != steps + 1):
        raise InputError(
            f"--command verifies {verified or 'an unknown number of'} draft tokens with {steps} draft steps: pass "
            "--speculative-num-steps N and --speculative-num-draft-tokens N + 1."
        )
    draft = {"draft_model": path} if algorithm == _STANDALONE and path else {}
    return {"num_speculative_tokens": str(steps), **draft}
