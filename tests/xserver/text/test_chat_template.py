"""Chat templates render what transformers' `apply_chat_template` renders, and refuse what a client may not do."""

import json

import pytest
from tokenizers import Tokenizer, models

from xcore.errors import InputError
from xserver.http.api_error import ApiError
from xserver.text import chat_template
from xserver.text.chat_template import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
CHAT = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": " What is 木?\n"},
    {"role": "assistant", "content": "A tree. "},
    {"role": "user", "content": "Thanks"},
]
PAIRS = CHAT[1:]
NAMED = [{"role": "user", "content": "Run it", "name": "Ada"}, {"role": "tool", "content": "4", "tool_call_id": "c1"}]

TEMPLATES = {
    "turns between marks, as in ChatML": """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' -}}
{% endif %}""",
    "a system message inside the first turn, as in Llama 2": """
{%- if messages[0]['role'] == 'system' -%}
{%- set talk = messages[1:] %}{% set system = '<<SYS>>\\n' ~ messages[0]['content'] ~ '\\n<</SYS>>\\n\\n' %}
{%- else %}{% set talk = messages %}{% set system = '' %}
{%- endif %}
{%- for m in talk %}
{%- if m['role'] == 'user' %}
{{- bos_token + '[INST] ' + (system if loop.first else '') + m['content'].strip() + ' [/INST]' }}
{%- elif m['role'] == 'assistant' %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}""",
    "headers and the day, as in Llama 3": """
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%Y") %}{% endif %}
{%- set ns = namespace(system='', rest=messages) %}
{%- if messages[0].role == 'system' %}
{%- set ns.system = messages[0]['content'] | trim %}{% set ns.rest = messages[1:] %}
{%- endif %}
{{- "<|head|>system<|/head|>\\n\\nYear: " + date_string + "\\n" + ns.system + "<|eot|>" }}
{%- if tools is not none %}{{ raise_exception('no tools') }}{% endif %}
{%- for message in ns.rest %}
    {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}""",
    "roles that must alternate, as in Mistral": """
{{- bos_token -}}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate: ' + message.role + ' at ' ~ loop.index0) }}
{% endif %}
{% if message['role'] == 'user' %}
{{- '[INST] ' + message['content'] + ' [/INST]' -}}
{% elif message['role'] == 'assistant' %}
{{- message['content'] + eos_token -}}
{% endif %}
{% endfor %}""",
    "another name for the assistant, as in Gemma": """
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<turn>' + role + '\\n' + message['content'] | trim + '</turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}""",
    "one branch per role, as in Phi": """
{% for message in messages %}
{% if message['role'] == 'system' and message['content'] %}
{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}
{% elif message['role'] in ['user', 'tool'] %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}
{% elif message['role'] == 'assistant' %}
{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "line breaks and the last turn, as in Zephyr": """
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "a default system message and options, as in Qwen": """
{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{%- for message in messages[::-1] %}{% if loop.last %}{{- message.role | upper }}{% endif %}{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}""",
    "state and cut thoughts, as in DeepSeek": """
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_first=true, prompt='', turns=0) %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{% set ns.prompt = ns.prompt + message['content'] %}{%- endif %}
{%- endfor %}
{{- bos_token }}{{ ns.prompt }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{% set ns.turns = ns.turns + 1 %}{{ '<|User|>' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<|Assistant|>' + content + eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' ~ ns.turns }}{% endif %}""",
    "macros, loops that break and JSON, as in Command R": """
{%- macro turn(role, text) -%}<|START|>{{ role | upper }}|{{ text }}<|END|>{%- endmacro -%}
{{ bos_token }}
{%- for message in messages -%}
{%- if message.role == 'tool' %}{% continue %}{% endif %}
{%- if loop.index > 3 %}{% break %}{% endif %}
{{- turn({'user': 'USER_TOKEN', 'assistant': 'CHATBOT_TOKEN'}.get(message.role, 'SYSTEM_TOKEN'), message.content) -}}
{%- endfor -%}
{{ messages | map(attribute='role') | list | tojson }}{{ messages[0] | tojson(indent=2) }}
{%- if add_generation_prompt %}<|START|>CHATBOT_TOKEN|{% endif -%}""",
    "text that is trained on": """
{% for message in messages %}
{% if message['role'] == 'assistant' %}
<|assistant|>{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}

{% else %}
<|{{ message['role'] }}|>{{ message['content'] }}{{ ' by ' + message.name if message.name }}
{% endif %}
{% endfor %}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}""",
    "parts or texts, and a joined list": """
{% set parts = [] %}
{% for message in messages %}
  {% if message.content is string %}{% set text = message.content %}
  {% else %}{% set text = message.content[0].text %}{% endif %}
  {% if parts.append is defined %}{% set text = text | replace('<', '&lt;') %}{% endif %}
  {{ "%s: %s" | format(message.role, text) }}
{% endfor %}
{{- ['a', 'b', pad_token] | join(' ') | length }}{{ range(3) | list }}{{ 'x' * 3 }}""",
}


def oracle(source: str, messages, **options) -> str:
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **TOKENS)
    return theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **options)


def outcome(call) -> str | None:
    """What is rendered; None where the template refuses."""
    try:
        return call()
    except Exception as error:
        assert isinstance(error, ApiError) or "TemplateError" in type(error).__name__, error
        return None


def render(template: ChatTemplate, messages, prompt=True, goes_on=False, longest=10_000, **options) -> str:
    return template.render(messages, prompt, goes_on, options, longest)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_transformers_do(name):
    source = TEMPLATES[name]
    template, rendered = ChatTemplate(source, TOKENS), 0
    for messages in (CHAT, PAIRS, PAIRS[:1], PAIRS[1:], NAMED):
        for prompt in (False, True):
            for options in ({}, {"enable_thinking": False, "date_string": "1999"}):
                ours = outcome(lambda: render(template, messages, prompt, **options))  # noqa: B023
                theirs = outcome(lambda: oracle(source, messages, add_generation_prompt=prompt, **options))  # noqa: B023
                assert ours == theirs
                rendered += ours is not None
    assert rendered >= 8


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_message_is_continued_as_transformers_do(name):
    source, goes_on = TEMPLATES[name], {"continue_final_message": True}
    for messages in (CHAT[:3], PAIRS[:2]):
        ours = outcome(lambda: render(ChatTemplate(source, TOKENS), messages, False, True))  # noqa: B023
        try:
            theirs = oracle(source, messages, **goes_on)
        except Exception:
            theirs = None
        assert ours == theirs


def test_sources_come_in_order(tmp_path):
    def rendered(given=None):
        template = ChatTemplate.read(tmp_path, given)
        return None if template is None else render(template, CHAT)

    config = tmp_path / "tokenizer_config.json"
    assert rendered() is None
    config.write_text(json.dumps({"chat_template": [{"name": "rag", "template": "no"}]}))
    assert rendered() is None
    several = [{"name": "rag", "template": "no"}, {"name": "default", "template": "named {{ bos_token }}"}]
    config.write_text(json.dumps({"chat_template": several, "bos_token": {"content": "<b>"}}))
    assert rendered() == "named <b>"
    config.write_text(json.dumps({"chat_template": "configured {{ bos_token }} {{ eos_token }}", "bos_token": "<b>"}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<x>", "eos_token": {"content": "<e>"}}))
    assert rendered() == "configured <b> <e>"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered() == "file"
    (tmp_path / "mine.jinja").write_text("mine")
    assert rendered(tmp_path / "mine.jinja") == "mine"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("chat_template.jinja", "{% for %}"),
        ("chat_template.jinja", b"\xff"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": 5}'),
    ],
)
def test_what_is_no_template_is_refused_by_file(tmp_path, file, text):
    (tmp_path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=file.replace(".", r"\.")):
        ChatTemplate.read(tmp_path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="none"):
        ChatTemplate.read(tmp_path, tmp_path / "none.jinja")


@pytest.mark.parametrize(
    "name", ["messages", "range", "raise_exception", "bos_token", "add_generation_prompt", "chat_template", "__class__"]
)
def test_options_may_not_have_reserved_names(name):
    with pytest.raises(ApiError, match="reserved") as refused:
        ChatTemplate("{{ messages[0].content }}", TOKENS).render(CHAT, True, False, {name: 1}, 1000)
    assert refused.value.status == 400 and refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (
            "{% for i in range(90000) %}{% for j in range(90000) %}word {% endfor %}{% endfor %}",
            "context_length_exceeded",
        ),
        ("{% for i in range(n) %}word {% endfor %}", "invalid_value"),
        ("{{ messages[0].content + 5 }}", "invalid_value"),
        ("{{ messages[9].content.upper() }}", "invalid_value"),
        ("{{ ().__class__.__mro__ }}", "invalid_value"),
        ("{% set x = messages.append(1) %}", "invalid_value"),
        ("{{ raise_exception(messages[1].content * 1000) }}", "invalid_value"),
    ],
)
def test_what_a_template_cant_do_is_the_clients_error(source, code):
    with pytest.raises(ApiError) as refused:
        render(ChatTemplate(source, TOKENS), CHAT, n=10**12)
    assert (refused.value.status, refused.value.code) == (400, code)
    assert len(refused.value.message) < 400


def test_messages_are_left_as_they_were():
    messages = [dict(message) for message in CHAT[:3]]
    render(ChatTemplate(TEMPLATES["turns between marks, as in ChatML"], TOKENS), messages, False, True)
    assert messages == CHAT[:3]


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
        "{% break %}",
        "{% macro f(a, a) %}{% endmacro %}",
        "{{ a|nothing }}",
    ],
)
def test_what_jinja_or_python_refuses_to_compile_is_named(source):
    with pytest.raises(InputError, match=r"^the chat template is not a Jinja template"):
        ChatTemplate(source, {})


def test_a_loop_without_output_ends_with_its_time(monkeypatch):
    monkeypatch.setattr(chat_template, "_MOST_S", 0.05)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ApiError, match="too long"):
        render(ChatTemplate(loops, {}), CHAT)
    counted = "{% for i in range(3) %}{{ loop.index }}{% else %}none{% endfor %}"
    assert render(ChatTemplate(counted, {}), CHAT) == "123"


@pytest.mark.parametrize(
    "source", ["{{ 'a' * 10**10 }}", "{{ 10**10 * 'a' }}", "{{ 10**(10**8) }}", "{{ [1] * 10**10 }}"]
)
def test_products_that_fill_the_memory_are_refused(source):
    with pytest.raises(ApiError, match="too large"):
        render(ChatTemplate(source, {}), CHAT)
    assert render(ChatTemplate("{{ '-' * 3 ~ 2 ** 10 ~ 1.5 * 2 ~ 2 ** -1 }}", {}), CHAT) == "---10243.00.5"


def test_a_template_that_fails_says_why():
    template = ChatTemplate("{{ messages[0].missing.deeper }}", {})
    with pytest.raises(ApiError, match=r"can't render this conversation \('dict object' has no attribute 'missing'\)"):
        template.render([{"role": "user", "content": "a"}], True, False, {}, 1000)
    with pytest.raises(ApiError, match="can only concatenate str"):
        ChatTemplate("{{ 'a' + 1 }}", {}).render([{"role": "user", "content": "a"}], True, False, {}, 1000)
