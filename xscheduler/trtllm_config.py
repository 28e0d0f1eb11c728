"""Read the configuration file of `trtllm-serve` as the words of its command line."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from xcore.document import read_yaml
from xcore.errors import InputError


def config_words(path: str) -> list[str]:
    """Return a file's keys as flags: `--kv_cache_config.dtype=fp8`, and `--no-enable_chunked_prefill` for false.

    Raises InputError for a file that is missing or doesn't have keys.
    """
    content = read_yaml(Path(path), "TensorRT-LLM configuration")
    if not isinstance(content, Mapping):
        raise InputError(f"'{path}' has no keys: write one on each line, like max_batch_size: 256.")
    return list(_words(content, ""))


def _words(content: Mapping[str, object], inside: str) -> Iterator[str]:
    """Yield the flags of a group of keys."""
    for key, value in content.items():
        name = f"{inside}{key}"
        if isinstance(value, Mapping):
            yield from _words(value, f"{name}.")
        elif isinstance(value, bool):
            yield f"--{'' if value else 'no-'}{name}"
        elif isinstance(value, list):
            yield f"--{name}={','.join(map(str, value))}"
        elif value is not None:
            yield f"--{name}={value}"
