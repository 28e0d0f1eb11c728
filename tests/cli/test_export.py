"""Schedules as another engine's flags."""

import pytest

from exegpt.builtin_models import builtin_model
from exegpt.cli.export import export
from tests.exegpt.nouns import schedule


def flags(policy, **changes):
    command, lost = export(schedule(policy, builtin_model("llama-3.1-8b"), **changes), "vllm")
    assert command.startswith("vllm serve meta-llama/Llama-3.1-8B --") and lost
    words = command.split()[3:]
    assert len(words) % 2 == 0
    return dict(zip(words[::2], words[1::2], strict=True))


def test_what_the_engine_has_itself_is_passed_on():
    given = flags("chunked", tp_degree=2, replicas=3, kv_blocks=77, dtype="bf16")
    assert given["--max-num-seqs"] == "8" and given["--max-num-batched-tokens"] == "64"
    assert given["--tensor-parallel-size"] == "2" and given["--data-parallel-size"] == "3"
    assert given["--num-gpu-blocks-override"] == "77" and given["--dtype"] == "bfloat16"


@pytest.mark.parametrize("policy", ["static", "orca", "rra"])
def test_the_nearest_budget_holds_a_prompt_beside_all_residents(policy):
    given = flags(policy)
    residents, budget = int(given["--max-num-seqs"]), int(given["--max-num-batched-tokens"])
    assert residents == {"static": 4, "orca": 8, "rra": 9}[policy]
    assert budget > residents
