"""Config: a `config.json` whose sizes are checked on access."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass

from xcore.errors import InputError
from xcore.specs.model import MAX_LAYERS, MAX_SIZE, checked_size

LAYERS = "num_hidden_layers"

_GEMMA = {"num_key_value_heads": 4, "head_dim": 256}
_DEFAULTS: dict[str, dict[str, int]] = {
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
    "minimax_m2": {"num_key_value_heads": 8, "head_dim": 128},
    "glm4_moe": {"num_key_value_heads": 8},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64},
    "llama4_text": {"num_key_value_heads": 8, "head_dim": 128},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA | {"num_attention_heads": 8, "vocab_size": 262_208, "max_position_embeddings": 131_072},
}
"""Sizes that transformers takes for keys that a config of this `model_type` lacks.

Published configs leave those of Gemma 3 out. The others decide the KV cache, and a config without them looks complete.
"""


@dataclass(frozen=True)
class Config:
    """A `config.json` whose sizes are checked on access, by the file's own names."""

    values: Mapping[str, object]
    name: str

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """Return the size of this name, or the default if it is missing or null; InputError without a default.

        Transformers' own default for a missing key comes first.
        """
        value = self.values.get(key, _DEFAULTS.get(self.kind, {}).get(key))
        if value is None and default is not None:
            return default
        if value is None and key not in self.values:
            raise InputError(f"The config of model '{self.name}' lacks the key '{key}'.")
        return checked_size(value, f"The config of model '{self.name}' has {key}", most)

    def layers(self, key: str, default: int | None = None) -> int:
        """Return a number of layers."""
        return self.size(key, default, MAX_LAYERS)

    def head_size(self, hidden_key: str, heads_key: str, key: str | None = None) -> int:
        """Return the size of a head: the value of `key` if the config has it, else the hidden size over the heads.

        Raises:
            InputError: The heads don't divide the hidden size.
        """
        known = self.values.get(key, _DEFAULTS.get(self.kind, {}).get(key)) if key is not None else None
        if key is not None and known is not None:
            return self.size(key)
        hidden, heads = self.size(hidden_key), self.size(heads_key)
        if hidden % heads:
            way_out = f"correct one of them{f', or add {key}' if key else ''}"
            raise InputError(
                f"The config of model '{self.name}' has {hidden_key} = {hidden} and {heads_key} = {heads}, which does "
                f"not divide it: {way_out}."
            )
        return hidden // heads

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean; the default if it is missing or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            what = f"The config of model '{self.name}' has {key} = {reprlib.repr(value)}"
            raise InputError(f"{what}: it must be true or false.")
        return default if value is None else value

    @property
    def kind(self) -> str:
        """Return the model's type."""
        return str(self.values["model_type"])

    def has(self, key: str) -> bool:
        """Return whether a key is there and not null."""
        return self.values.get(key) is not None


def number(config: Mapping[str, object], key: str, default: float) -> float:
    """Return a number of a `config.json`, or the default if it is missing; InputError for another value."""
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"The config has {key} = {reprlib.repr(value)}: it must be a number.")
    return float(value)


def even(head_size: int, name: str) -> int:
    """Return the head size, whose halves rotary embeddings rotate; InputError for an odd one."""
    if head_size % 2:
        raise InputError(
            f"Model '{name}' has heads of size {head_size}: rotary embeddings need an even size; correct its config."
        )
    return head_size
