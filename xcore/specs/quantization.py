"""How checkpoints declare that their weights are quantised: the dtypes that can be planned, and that can be loaded."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcore.errors import InputError

STORED_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes of safetensors files that are plain floats. A tensor of another dtype needs an implemented method."""
METHODS = ("gptq", "awq", "compressed-tensors")
"""Quantisation methods whose weights can be loaded, by their `quant_method`."""

_CONFIG_KEYS = ("quantization_config", "compression_config", "quantization", "quant_config", "sparsity_config")
"""Keys of a `config.json`: transformers', the former ones of compressed-tensors and AutoAWQ, MLX's."""
_SETTINGS = ("kv_cache_quant_algo", "format", "bits", "w_bit")
"""Keys that describe a method without a name."""
_STORED = {"F8_E4M3": "fp8", "F8_E5M2": "fp8"}
"""Dtype of safetensors files → our dtype, of checkpoints that declare nothing."""
_MAX_HEADER = 100_000_000
"""Largest header of a safetensors file in bytes, as its library has it."""
_FILES = {"hf_quant_config.json": None, "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files next to a `config.json`, ModelOpt's, AutoGPTQ's and AutoAWQ's → the method of a file that names none."""


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


def checkpoint_format(config: Mapping[str, Any], name: str) -> str | None:
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


def has_head(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` declares that the output head is quantised too, by GPTQ's `lm_head`."""
    declared = config.get("quantization_config")
    return isinstance(declared, dict) and declared.get("lm_head") is True


def directory_format(directory: Path, name: str) -> str | None:
    """Return the dtype of the quantised weights that a file beside a `config.json` declares; None for plain floats.

    Raises:
        InputError: The format can't be planned; the message names it.
    """
    for file, value in _declared_in_files(directory):
        if found := _planned(value, name, f"its directory has {file} with"):
            return found
    return None


def stored_format(directory: Path, name: str) -> str | None:
    """Return the dtype of quantised weights that only the headers of a directory's files show; None for plain floats.

    Files that are not there, or have no such header, say nothing: plans need no weights.

    Raises:
        InputError: The dtype can't be planned; the message names it and a tensor.
    """
    for file in sorted(path for path in directory.glob("*.safetensors") if path.is_file()):  # a pipe would block
        for tensor, entry in _header(file).items():
            dtype = entry.get("dtype") if isinstance(entry, dict) else None
            if not tensor.endswith("weight") or not isinstance(dtype, str) or dtype in STORED_DTYPES:
                continue
            if dtype not in _STORED:
                raise _unplanned(name, f"tensor '{tensor}' in '{file}' has dtype {dtype}")
            return _STORED[dtype]
    return None


def _header(file: Path) -> dict[str, Any]:
    """Return the entries of a safetensors file by the tensors' names; empty for another file, as Git LFS leaves."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size)) if size <= _MAX_HEADER else None
    except (OSError, ValueError, RecursionError):
        header = None
    return header if isinstance(header, dict) else {}


def _planned(value: Any, name: str, where: str) -> str | None:
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
    if method.lower() in ("gptq", "gptq_marlin") and bits == 8:
        return "w8a16"
    if known is None and settings.get("quant_algo") is None and settings.get("kv_cache_quant_algo"):
        return None  # keys and values alone
    if known is None or (known == "int4" and bits != 4):
        raise _unplanned(name, f"{where} {_described(value)}{f' of {bits!r} bits' if known else ''}")
    return known


def _group_format(group: Any) -> str | None:
    """Return the dtype of the weights of a group of compressed-tensors or ModelOpt; None if it is unknown."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
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
            return "int8" if group.get("input_activations") else "w8a16"
    return None


def _unplanned(name: str, evidence: str) -> InputError:
    known = "fp8, int8 (with or without activations), int4 (AWQ, GPTQ, compressed-tensors), mxfp4 and nvfp4"
    return InputError(
        f"Model '{name}' is a quantised checkpoint whose cost is not known: {evidence}; known formats are {known}. "
        "Plan the original model with --dtype instead."
    )


@dataclass(frozen=True)
class PackedFormat:
    """How the files of a checkpoint hold weights of few bits."""

    method: str
    """One of `METHODS`."""
    bits: int
    """8 or 4."""
    group_size: int | None
    """Inputs that share a scale; None: all inputs of an output."""
    zero_offset: int = 0
    """Number to add to each stored zero point."""

    @property
    def dtype(self) -> str:
        """Our dtype of the weights, with activations of 16 bits."""
        return {4: "int4", 8: "w8a16"}[self.bits]


def packed_format(config: Mapping[str, Any], directory: Path, name: str) -> PackedFormat | None:
    """Return how a directory's weights are packed, from its `config.json` or a file beside it; None for plain floats.

    Raises:
        InputError: The loader doesn't implement the method or one of its settings; the message names it.
    """
    declared = [(f"its config.json has {key} with", config[key]) for key in _CONFIG_KEYS if config.get(key)]
    beside = [(f"its directory has {file} with", value) for file, value in _declared_in_files(directory)]
    for where, value in (*declared, *beside):
        if _method(value) not in METHODS:
            raise _refusal(name, f"{where} {_described(value)}")
    if not declared and not beside:
        return None
    where, value = (declared or beside)[0]
    read = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}[_method(value)]
    packing, wrong = read(value)
    if wrong:
        raise _refusal(name, f"{where} {_described(value)} and {wrong}")
    return packing


def _group(size: Any) -> int | None:
    """Return a group's size; None for all inputs."""
    return None if size in (-1, None) else size


def _checked(packing: PackedFormat, **refused: Any) -> tuple[PackedFormat, str]:
    """Return the format, and the first of its settings that can't be loaded, as text; empty if all can."""
    bits, size = packing.bits, packing.group_size
    wrong = [(key, value) for key, value in refused.items() if value]
    if type(bits) is not int or bits not in (4, 8):
        wrong.append(("bits", bits))
    if size is not None and (type(size) is not int or size <= 0 or size % 2):
        wrong.append(("group_size", size))
    return packing, next((f"{key} = {value!r}" for key, value in wrong), "")


def _gptq(value: Mapping[str, Any]) -> tuple[PackedFormat, str]:
    stored = value.get("checkpoint_format", value.get("format"))
    offset = 0 if stored == "gptq_v2" else 1  # the first version stores zero points less one
    return _checked(
        PackedFormat("gptq", value.get("bits", 4), _group(value.get("group_size", 128)), offset),
        checkpoint_format=None if stored in (None, "gptq", "gptq_v2") else stored,
        dynamic=value.get("dynamic"),
        is_marlin_format=value.get("is_marlin_format"),
    )


def _awq(value: Mapping[str, Any]) -> tuple[PackedFormat, str]:
    version = str(value.get("version", "gemm"))
    bits = value.get("bits", value.get("w_bit", 4))
    packing, wrong = _checked(
        PackedFormat("awq", bits, _group(value.get("group_size", value.get("q_group_size", 128)))),
        version=None if version.lower() == "gemm" else version,
    )
    return packing, wrong or (f"bits = {bits!r}" if bits != 4 else "")


def _compressed(value: Mapping[str, Any]) -> tuple[PackedFormat, str]:
    groups = value.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else {}
    weights = group.get("weights") if isinstance(group, dict) else None
    weights = weights if isinstance(weights, dict) else {}
    kind, strategy = weights.get("type", "int"), weights.get("strategy", "group")
    return _checked(
        PackedFormat("compressed-tensors", weights.get("num_bits", 0), _group(weights.get("group_size"))),
        format=None if value.get("format") == "pack-quantized" else value.get("format") or "none",
        config_groups=None if weights else groups or "none",
        type=None if kind == "int" else kind,
        strategy=None if strategy in ("group", "channel") else strategy,
        input_activations=group.get("input_activations") if weights else None,
        kv_cache_scheme=value.get("kv_cache_scheme"),
    )


def _declared_in_files(directory: Path) -> Iterator[tuple[str, Any]]:
    """Yield the files beside a `config.json` that say how weights are quantised, and their settings."""
    from xcore.document import read_json

    for file, method in _FILES.items():
        path = directory / file
        if path.is_file():
            value = read_json(path)
            value = value.get("quantization", value) if isinstance(value, dict) else value
            if method and isinstance(value, dict) and _method(value) is None:
                value = value | {"quant_method": method}
            if not _is_unquantised(value):
                yield file, value


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
    return InputError(
        f"Model '{name}' is a quantised checkpoint, which is not supported: {evidence}; use one with weights of 4 or 8 "
        f"bits by {', '.join(METHODS)}."
    )


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
