"""How checkpoints declare that their weights are quantised, and the formats that the loader implements."""

from pathlib import Path
from typing import Any

from xcore.errors import InputError

STORED_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes of safetensors files that are plain floats. A tensor of another dtype needs an implemented method."""
METHODS: frozenset[str] = frozenset()
"""Quantisation methods that the loader implements, by their `quant_method` or `quant_algo`: none yet."""

_CONFIG_KEYS = ("quantization_config", "compression_config", "quantization", "quant_config", "sparsity_config")
"""Keys of a `config.json`: transformers', the former ones of compressed-tensors and AutoAWQ, MLX's."""
_SETTINGS = ("kv_cache_quant_algo", "format", "bits", "w_bit")
"""Keys that describe a method without a name."""
_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files next to a `config.json`: ModelOpt's, AutoGPTQ's, AutoAWQ's."""


def refuse_quantised_config(config: dict[str, Any], name: str) -> None:
    """Refuse a `config.json` that names a quantisation method that the loader doesn't implement.

    Raises:
        InputError: Names the key and the method.
    """
    for key in _CONFIG_KEYS:
        value = config.get(key)
        if value and _method(value) not in METHODS:
            raise _refusal(name, f"its config.json has {key} with {_described(value)}")


def refuse_quantised_files(directory: Path, name: str) -> None:
    """Refuse a directory with a quantisation file whose method the loader doesn't implement.

    Raises:
        InputError: Names the file and the method.
    """
    from xcore.document import read_json

    for file in _FILES:
        path = directory / file
        if path.is_file():
            value = read_json(path)
            value = value.get("quantization", value) if isinstance(value, dict) else value
            if not _is_unquantised(value) and _method(value) not in METHODS:
                raise _refusal(name, f"its directory has {file} with {_described(value)}")


def refuse_quantised_tensor(tensor: str, dtype: str | None, file: Path, name: str) -> None:
    """Refuse a tensor that only a quantised checkpoint has: not of a plain float dtype, or a scale.

    Args:
        tensor: Its name in the file.
        dtype: Its dtype as safetensors names it; None: unknown.
        file: The file that has it.
        name: The model's name.

    Raises:
        InputError: Names the tensor, its dtype and the file.
    """
    if dtype is not None and dtype not in STORED_DTYPES:
        raise _refusal(name, f"tensor '{tensor}' in '{file}' has dtype {dtype}")
    if "scale" in tensor.lower():
        raise _refusal(name, f"'{file}' has the scale '{tensor}'")


def _refusal(name: str, evidence: str) -> InputError:
    known = f"implemented methods are {', '.join(sorted(METHODS))}" if METHODS else "use its original weights"
    return InputError(f"Model '{name}' is a quantised checkpoint, which is not supported: {evidence}; {known}.")


def _method(value: Any) -> Any:
    found = [value.get(key) for key in ("quant_method", "quant_algo")] if isinstance(value, dict) else []
    return next((method for method in found if isinstance(method, str)), None)


def _described(value: Any) -> str:
    method = _method(value)
    if method:
        return f"the method '{method}'"
    settings = value if isinstance(value, dict) else {}
    known = (f"{key} '{settings[key]}'" for key in _SETTINGS if isinstance(settings.get(key), (str, int)))
    return next(known, "an unnamed method")


def _is_unquantised(value: Any) -> bool:
    """Return whether ModelOpt's file says that neither the weights nor the KV cache are quantised."""
    algorithms = ("quant_algo", "kv_cache_quant_algo")
    return isinstance(value, dict) and "quant_algo" in value and not any(value.get(key) for key in algorithms)
