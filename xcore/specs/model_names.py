"""The many names of one model: the built-in sizes that a name stands for, or the reason why it can't be planned."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from xcore.errors import InputError

# Words of models that were trained further, with tensors of the same sizes.
_TUNED = {"instruct", "chat", "base", "it", "hf", "pt", "thinking", "preview", "meta"}
_QUANTISED = re.compile(
    r"awq|gptq|gguf|[if]p?\d+|int[48]|(quantized\.)?w\d+a\d+|nvfp4|mxfp4|bnb|[48]bit|q[2-8](_k.*|_0)?"
)
_FORMATS = {
    "fp8": "fp8",
    "awq": "int4",
    "gptq int4": "int4",
    "gptq": "int4",
    "awq int4": "int4",
    "int4": "int4",
    "w4a16": "int4",
    "w8a8": "int8",
    "fp4": "nvfp4",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
}
"""Words of a name that say how its weights are quantised → our dtype; others can't be planned."""
_DATE = re.compile(r"(0[1-9]|1[0-2]|2[3-9])\d\d")
"""As `2507` (July 2025) or `0528` (May 28th)."""
_NEAR = 0.8
"""Least similarity of two names that may be misspellings of each other."""

_DERIVED: tuple[tuple[str, str, dict[str, object]], ...] = (
    # Distilled from DeepSeek-R1: the contexts of their own config.json; the smallest has a head of its own.
    (r"deepseek-r1-distill-llama-8b", "llama-3.1-8b", {}),
    (r"deepseek-r1-distill-llama-70b", "llama-3.3-70b", {}),
    (
        r"deepseek-r1-distill-qwen-1\.5b",
        "qwen2.5-1.5b",
        {"max_position_embeddings": 131072, "tie_word_embeddings": False},
    ),
    (r"deepseek-r1-distill-qwen-(7|14|32)b", r"qwen2.5-\1b", {"max_position_embeddings": 131072}),
    (r"deepseek-r1(-0528)?-qwen3-8b", "qwen3-8b", {"max_position_embeddings": 131072}),
    (r"llama-3\.1-nemotron-70b(-reward)?", "llama-3.1-70b", {}),
    (r"llama-3\.1-nemotron-nano-8b-v1", "llama-3.1-8b", {}),
    (r"hermes-3-llama-3\.1-(8|70|405)b", r"llama-3.1-\1b", {}),
    (r"llama-guard-3-8b", "llama-3.1-8b", {}),
    (r"vicuna-(7|13)b-v1\.5", r"llama-2-\1b", {}),
    (r"qwq-32b", "qwen2.5-32b", {"max_position_embeddings": 40960}),
    (r"qwen2\.5-coder-(0\.5|1\.5|3|7|14|32)b", r"qwen2.5-\1b", {"max_position_embeddings": 32768}),
    (r"qwen2\.5-math-(1\.5|7|72)b", r"qwen2.5-\1b", {"max_position_embeddings": 4096}),
    # Contexts that differ from the base model's (Qwen's model cards).
    (r"qwen2(?:\.5)?-(0\.5|1\.5|7|14|32|72)b-instruct", r"qwen2.5-\1b", {"max_position_embeddings": 32768}),
    (r"qwen2-(0\.5|1\.5|7|72)b", r"qwen2.5-\1b", {"max_position_embeddings": 131072}),
    (r"qwen3-4b-(instruct|thinking)-2507", "qwen3-4b", {"max_position_embeddings": 262144}),
    (r"qwen3-(0\.6|1\.7|4|8|14)b-base", r"qwen3-\1b", {"max_position_embeddings": 32768}),
    # Mixtures of experts that were trained further or have another context (their model cards).
    (r"mixtral-8x(7|22)b(-instruct)?-v0\.1", r"mixtral-8x\1b", {}),
    (r"qwen3-30b-a3b-(instruct|thinking)-2507", "qwen3-30b-a3b", {"max_position_embeddings": 262144}),
    (r"qwen3-235b-a22b-(instruct|thinking)-2507", "qwen3-235b-a22b", {"max_position_embeddings": 262144}),
    (r"qwen3-coder-30b-a3b-instruct", "qwen3-30b-a3b", {"max_position_embeddings": 262144}),
    (r"deepseek-v3(-0324|\.1|\.1-base|\.1-terminus|-base)?", "deepseek-v3", {}),
    (r"deepseek-r1(-0528|-zero)?", "deepseek-v3", {}),
    (r"kimi-k2-instruct-0905", "kimi-k2", {"max_position_embeddings": 262144}),
    (r"glm-4\.6", "glm-4.5", {"max_position_embeddings": 202752}),
    (r"glm-5\.[1-3]", "glm-5", {}),
    (r"llama-4-scout-17b-16e", "llama-4-scout", {}),
    (r"llama-4-maverick-17b-128e", "llama-4-maverick", {}),
    (r"minimax-m2(\.[17])?", "minimax-m2.5", {}),
    (r"mistral-small-24b-(base|instruct)-2501", "mistral-small-3", {}),
    # Mistral 7B: a window in the first version alone, a larger vocabulary in the third.
    (r"mistral-7b(-instruct)?-v0\.1", "mistral-7b", {}),
    (r"mistral-7b(-instruct)?-v0\.2", "mistral-7b", {"sliding_window": None}),
    (r"mistral-7b(-instruct)?-v0\.3", "mistral-7b-v0.3", {}),
)
"""Pattern of a name, the built-in model of its sizes, and the changes in its config."""

_EXPERTS = "it is a mixture of experts whose sizes are not built in: pass a directory with its config.json"
_STATES = "it is a hybrid of attention and state-space or linear-attention layers, whose cost is not known"
_UNSUPPORTED: tuple[tuple[str, str], ...] = (
    (
        r"(^|-)vl(-|$)|vision|llava|pixtral|omni|internvl",
        ("it is multimodal, and exegpt has no costs for its vision tower"),
    ),
    (r"^deepseek-v3\.2", "its sparse attention is not built in; deepseek-v3 has its other sizes"),
    (r"^deepseek-v4", "it compresses keys and values, at a cost that is not known"),
    (r"^deepseek-(v2|chat|coder-v2)", _EXPERTS),
    (r"qwen3\.[5-9]|qwen3-next|kimi-(k3|linear)|minimax-(text|m1)", _STATES),
    (r"mamba|jamba|zamba|rwkv|nemotron-(h|3|nano-(9|12|30)b)|granite-4|lfm2|bamba", _STATES),
    (r"^minimax-m3", "the cost of its block-sparse attention is not known"),
    (r"^mimo-v2", "its window layers have other heads than the rest, and its keys another size than its values"),
    (r"^step-3", "its layers differ in their windows and in their experts, and its architecture is not implemented"),
    (r"^gemma-?4", "its full layers have other heads than its window layers"),
    (r"moe|dbrx|grok|arctic|ernie-4\.5|hunyuan|minimax|\d+b-a\d|glm-4\.[5-9]|\d+x\d+b|qwen3-max", _EXPERTS),
    (
        r"gemma-?[23]n|cohere2|command-r7b|command-a|exaone-4|olmo-?3",
        "its layers differ: some attend to a sliding window only, others to all tokens",
    ),
    (r"nemotron-(super|ultra|51b)|deci", "its layers have unequal sizes (the result of an architecture search)"),
    (r"^(gemma|codegemma)", "its architecture (gemma) is not implemented"),
    (r"^phi-?[1-9]", "its sizes are not built in: pass a directory with its config.json"),
    (
        r"^(falcon|bloom|mpt|starcoder|command-r|gpt-j|gpt-neo|pythia|glm-4|chatglm)",
        "its architecture is not implemented",
    ),
    (r"^(gpt-[345]|claude|gemini|o[134]-)", "it is a closed model, and its sizes are not published"),
)
"""Pattern of a name, and the reason why such a model isn't planned."""


@dataclass(frozen=True)
class Named:
    """The built-in model whose sizes a name stands for."""

    builtin: str
    changes: dict[str, object] = field(default_factory=dict)
    """Keys of its config.json that differ."""
    dtype: str | None = None
    """The dtype of quantised weights; None: that of the built-in model."""


def resolve(name: str, known: Mapping[str, str]) -> Named:
    """Return the built-in model that a name stands for.

    `known` maps names and Hugging Face ids in lower case to built-in names.

    Raises:
        InputError: The name is unknown. The message says why such a model isn't supported, or names very similar
            models, or says the way out.
    """
    text = name.strip().lower()
    if text in known:
        return Named(known[text])
    words = _plain(text).split("-")
    quantised = [word for word in words if _QUANTISED.fullmatch(word)]
    plain = "-".join(word for word in words if word not in quantised and word != "dynamic")
    resolved = _derived(plain) or _tuned(plain, known)
    if resolved and quantised:
        return replace(resolved, dtype=_quantised_dtype(name, quantised, resolved.builtin))
    if resolved:
        return resolved
    for pattern, what in _UNSUPPORTED:
        if re.search(pattern, plain):
            raise InputError(f"'{name}' is not supported: {what}; `exegpt list models` shows the supported models.")
    raise InputError(f"There is no built-in model or model directory '{name}': {_hint(plain, known)}")


def _quantised_dtype(name: str, words: list[str], builtin: str) -> str:
    """Return the dtype that the words of a name stand for; InputError names a format whose cost is not known."""
    dtype = _FORMATS.get(" ".join(words).removeprefix("quantized."))
    if dtype is None:
        raise InputError(
            f"'{name}' is a quantised checkpoint ({', '.join(words)}) whose cost is not known: plan the original model "
            f"with --model {builtin} and the closest dtype."
        )
    return dtype


def same_name(one: str, other: str) -> bool:
    """Return whether two names of a model differ only in spelling, as `llama3.1:8b` and `llama-3.1-8b` do."""
    return _plain(one.lower()) == _plain(other.lower())


def _plain(text: str) -> str:
    """Return the name without its owner, in the built-in names' spelling.

    `meta-llama-3.1-8b` and `llama3.1:8b` become `llama-3.1-8b`.
    """
    name = text.rstrip("/").rsplit("/", 1)[-1].replace(":", "-")
    name = re.sub(r"(?<=\d)_(?=\d)", ".", name).replace("_", "-")
    return re.sub(r"^(meta-)?llama-?(?=\d)", "llama-", name)


def _derived(plain: str) -> Named | None:
    for pattern, builtin, changes in _DERIVED:
        for text in (plain, _without_tuning(plain)):
            match = re.fullmatch(pattern, text)
            if match:
                return Named(match.expand(builtin), changes)
    return None


def _tuned(plain: str, known: Mapping[str, str]) -> Named | None:
    """Return the built-in model behind a suffix like `-Instruct`."""
    plain_names = {_plain(key): name for key, name in known.items()}
    bare = {_without_tuning(key): name for key, name in plain_names.items()}
    name = plain_names.get(plain) or bare.get(_without_tuning(plain))
    return Named(name) if name else None


def _without_tuning(plain: str) -> str:
    return "-".join(word for word in plain.split("-") if word not in _TUNED and not _DATE.fullmatch(word))


def _hint(plain: str, known: Mapping[str, str]) -> str:
    names: Iterable[str] = difflib.get_close_matches(plain, [*map(_plain, known)], n=5, cutoff=_NEAR)
    plain_names = {_plain(key): name for key, name in known.items()}
    near = list(dict.fromkeys(plain_names[name] for name in names))[:3]
    if near:
        return f"the nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}."
    return "`exegpt list models` shows the built-in models, and a directory with a config.json is accepted too."
