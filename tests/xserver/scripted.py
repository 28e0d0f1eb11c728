"""A model whose weights follow a script: it calls a tool, and answers with a text once it has the tool's result."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.stored_profile import store_profile
from tests.xserver.conftest import schedule_for
from xcore import document
from xrunner.models.create import create_model

ARGUMENTS = {"city": "Rome"}
TEXT = "It is sunny in Rome."
_EOS = 256
_ADDED = {
    257: ("<|ask|>", True),
    258: ("<|told|>", True),
    259: ("<tool_call>", False),
    260: (ARGUMENTS["city"], False),
    261: ("</tool_call>", False),
    262: (TEXT, False),
}
_QUOTE, _BRACE = 1, 92
_FOLLOWS = {257: (259,), 261: (_EOS,), 258: (262,), 262: (_EOS,), 260: (_QUOTE,), _QUOTE: (260, _BRACE)}
"""The likeliest tokens after each of these, the likeliest first. The rest of a call is what its grammar forces."""
TEMPLATE = """\
{%- if tools %}{{- 'tools <tool_call>: ' + (tools | tojson) + '\\n' }}{%- endif %}
{%- for message in messages %}
    {{- message['role'] + ': ' + message['content'] }}
    {%- for call in message.tool_calls or () %}
        {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant: ' + ('<|told|>' if messages[-1]['role'] == 'tool' else '<|ask|>') }}
{%- endif %}
"""


def scripted_model(directory: Path) -> Path:
    """Create the model: with attention and MLPs of zero, a token's successor depends on the token alone."""
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 32, "vocab": 300, "context": 16384}
    create_model(directory, "llama", **sizes, seed=0)
    weights = load_file(directory / "model.safetensors")
    for name, tensor in weights.items():
        weights[name] = torch.ones_like(tensor) if "norm" in name else torch.zeros_like(tensor)
    for place, (token, following) in enumerate(_FOLLOWS.items()):
        weights["model.embed_tokens.weight"][token, place] = 1.0
        for rank, likely in enumerate(following):
            weights["lm_head.weight"][likely, place] = 20.0 - 8 * rank
    save_file(weights, directory / "model.safetensors")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [
        {"id": token, "content": text, "special": special} | flags for token, (text, special) in _ADDED.items()
    ]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    store_profile(directory, 1)
    return directory


def schedule_file(model: Path, path: Path) -> Path:
    """Write a schedule whose cache holds long prompts: a byte is a token."""
    document.write(path, replace(schedule_for(model), kv_blocks=4096))
    return path
