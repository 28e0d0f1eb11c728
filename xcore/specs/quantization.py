"""How checkpoints declare that their weights are quantised: the dtypes that can be planned, and that can be loaded."""

from collections.abc import Mapping
from pathlib import Path

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


_ALGORITHMS = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "fp8_pb_wo": "fp8",
    "fp8_per_channel_per_token": "fp8",
    "mxfp4": "mxfp4",
    "w4a16_mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    "awq": "int4",
    "w4a16_awq": "int4",
    "gptq": "int4",
    "gptq_marlin": "int4",
    "awq_marlin": "int4",
    "w8a8_sq_per_channel": "int8",
}
"""Method or algorithm, in lower case → our dtype of the weights."""


def checkpoint_format(config: Mapping[str, object], name: str) -> str | None:
    """Return the dtype of the quantised weights that a `config.json` declares; None for plain floats.

    Raises:
        InputError: The format can't be planned; the message names it.
    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in _CONFIG_KEYS:
            if part.get(key):
                return _planned(part[key], name, f"its config.json has {key} with")
    return None


def directory_format(directory: Path, name: str) -> str | None:
    """Return the dtype of the quantised weights that a file beside a `config.json` declares; None for plain floats.

    Raises:
        InputError: The format can't be planned; the message names it.
    """
    from xcore.document import read_json

    for file in _FILES:
        path = directory / file
        if path.is_file():
            value = read_json(path)
            value = value.get("quantization", value) if isinstance(value, dict) else value
            if not _is_unquantised(value) and (found := _planned(value, name, f"its directory has {file} with")):
                return found
    return None


def _planned(value: object, name: str, where: str) -> str | None:
    """Return the dtype of weights by their settings; None for plain floats. InputError, from `where` on, if unknown."""
    settings = value if isinstance(value, dict) else {}
    if groups := settings.get("config_groups"):
        formats = {_group_format(group) for group in groups.values()} if isinstance(groups, dict) else set()
        if len(formats) == 1 and (only := formats.pop()):
            return only
        raise _unplanned(name, f"{where} {_described(value)} and weights of several or unknown formats")
    method = next((m for m in (settings.get("quant_algo"), settings.get("quant_method")) if isinstance(m, str)), "")
    bits = settings.get("bits", settings.get("w_bit", 4))
    known = _ALGORITHMS.get(method.lower())
    if known is None and settings.get("quant_algo") is None and settings.get("kv_cache_quant_algo"):
        return None  # keys and values alone
    if known is None or (known == "int4" and bits != 4):
        raise _unplanned(name, f"{where} {_described(value)}{f' of {bits} bits' if known else ''}")
    return known


def _group_format(group: object) -> str | None:
    """Return the dtype of the weights of a group of compressed-tensors or ModelOpt; None if it is unknown."""
    if not isinstance(group, dict) or not isinstance(weights := group.get("weights"), dict):
        return None
    match weights.get("type"), weights.get("num_bits"), weights.get("group_size"):
        case "float", 8, _:
            return "fp8"
        case "float", 4, 16:
            return "nvfp4"
        case "float", 4, 32:
            return "mxfp4"
        case "int", 4, _:
            return "int4"
        case "int", 8, _:
            return "int8" if group.get("input_activations") else None
    return None


def _unplanned(name: str, evidence: str) -> InputError:
    known = "fp8, int8 (weights and activations), int4 (AWQ, GPTQ, compressed-tensors), mxfp4 and nvfp4"
    return InputError(
        f"Model '{name}' is a quantised checkpoint whose cost is not known: {evidence}; known formats are {known}. "
        "Plan the original model with --dtype instead."
    )


def refuse_quantised_config(config: Mapping[str, object], name: str) -> None:
    """Refuse to load the weights of a `config.json` that names a quantisation method that the loader doesn't implement.

    Raises:
        InputError: Names the key and the method.
    """
    for key in _CONFIG_KEYS:
        value = config.get(key)
        if value and _method(value) not in METHODS:
            raise _refusal(name, f"its config.json has {key} with {_described(value)}")


def refuse_quantised_files(directory: Path, name: str) -> None:
    """Refuse to load the weights of a directory with a quantisation file whose method the loader doesn't implement.

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


def _method(value: object) -> str | None:
    found = [value.get(key) for key in ("quant_method", "quant_algo")] if isinstance(value, dict) else []
    return next((method for method in found if isinstance(method, str)), None)


def _described(value: object) -> str:
    method = _method(value)
    if method:
        return f"the method '{method}'"
    settings = value if isinstance(value, dict) else {}
    known = (f"{key} '{settings[key]}'" for key in _SETTINGS if isinstance(settings.get(key), (str, int)))
    return next(known, "an unnamed method")


def _is_unquantised(value: object) -> bool:
    """Return whether ModelOpt's file says that neither the weights nor the KV cache are quantised."""
    algorithms = ("quant_algo", "kv_cache_quant_algo")
    return isinstance(value, dict) and "quant_algo" in value and not any(value.get(key) for key in algorithms)
