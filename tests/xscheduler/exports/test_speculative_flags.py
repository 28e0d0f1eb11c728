"""Flags of speculative decoding: what is written is read back."""

import pytest

from tests.xcore.small_specs import schedule
from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xcore.specs.speculation import Speculation
from xscheduler.export import Target
from xscheduler.exports.launch_parts import Command
from xscheduler.launch_command import read_launch
from xscheduler.settings import find_setting

LLAMA = builtin_model("llama-3.1-8b")
HEAD = Speculation((0.8, 0.6, 0.5))
MODEL = Speculation((0.7, 0.5), layers=0.0, draft=builtin_model("llama-3.2-1b"))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(("speculation", "options"), [(HEAD, {"num_speculative_tokens": "3"}), (MODEL, None)])
def test_an_exported_command_is_read_as_the_same_options(engine, speculation, options):
    plan = schedule("chunked", LLAMA, speculation=speculation, dtype="bf16", kv_dtype="bf16")
    launch = Target(engine).launch
    start = launch.start(launch.followed(plan), "m", 4096, 1)
    (command,) = start.commands
    settings = read_launch(command.text).settings
    options = options or {"num_speculative_tokens": "2", "draft_model": "meta-llama/Llama-3.2-1B"}
    assert {name: settings.get(name) for name in options} == options
    assert any("multi-token prediction" in note for note in start.notes) == (speculation is HEAD)


def test_only_words_with_braces_are_quoted():
    command = Command(("vllm", "serve", "--speculative-config", '{"a": 1}', "$NODE0"))
    assert command.text == """vllm serve --speculative-config '{"a": 1}' $NODE0"""


def test_tensorrt_llm_is_refused_by_name():
    setting = find_setting("llama-3.1-8b", "1xH100-SXM", engine="tensorrt-llm")
    Target("tensorrt-llm").check(setting, ("chunked",))
    with pytest.raises(InputError, match="tensorrt-llm has no keys for speculative decoding"):
        Target("tensorrt-llm").check(setting, ("chunked",), drafts=True)
