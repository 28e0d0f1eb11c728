"""Load a model, a stage or a shard of it with a directory's weights or random ones, and check the weights."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from xcore.document import read_json
from xcore.errors import InputError
from xcore.specs.model import ModelSpec, read_config, usual_kv_dtype
from xcore.specs.quantization import PackedFormat, packed_format, refuse_quantised_tensor
from xrunner.models import llama, t5
from xrunner.models.cache import checked_kv_dtype
from xrunner.models.decoder import Model
from xrunner.models.device import CPU, keep_memory
from xrunner.models.encoder_decoder import EncoderDecoder
from xrunner.models.families import FAMILIES, family_of
from xrunner.models.packed_weights import PARTS
from xrunner.models.shard import WHOLE, Shard
from xrunner.models.weights import (
    RandomWeights,
    SafetensorsWeights,
    StoredTensor,
    Weights,
    stored_name,
    torch_dtype,
    weight_bits,
)


def load_model(
    directory: str | Path,
    dtype: str = "fp32",
    layers: range | int | None = None,
    shard: Shard = WHOLE,
    embedding: bool = True,
    head: bool = True,
    encoder_layers: range | None = None,
    device: torch.device = CPU,
    attention: str = "triton",
    kv_dtype: str | None = None,
) -> Model:
    """Load the model of a directory in the Hugging Face layout, or a stage of it.

    A stage has `layers`: a range, or the first ones by number. The stage has complete layers or a shard of each, with
    or without the embedding and the head. Only its own tensors are read, straight onto the device. For an
    encoder-decoder, `layers` are the decoder's; its encoder layers have the same numbers (all without `layers`) unless
    `encoder_layers` is given. `attention` and `kv_dtype` as in `Model`; without `kv_dtype`, that of activations.

    Raises:
        InputError: The model can't be run, split or read.
    """
    config = _with_generation_config(Path(directory), read_config(directory))
    spec = ModelSpec.from_directory(directory)
    format = packed_format(config, Path(directory), spec.name)
    _check_format(format, spec, dtype, device)
    for key, refused in family_of(spec).unsupported(config, spec.name).items():
        if refused:
            raise InputError(f"Model '{spec.name}' has {key} = {config[key]!r}, which is not supported.")
    kv_dtype = checked_kv_dtype(kv_dtype, spec, dtype, device)
    weights = SafetensorsWeights(directory, torch_dtype(dtype), device, format)
    check_tensors(spec, weights)
    model = _build(spec, config, weights, dtype, layers, shard, embedding, head, encoder_layers)
    return _loaded(model, attention, kv_dtype)


def random_model(
    spec: ModelSpec,
    layers: range | int | None = None,
    dtype: str = "fp32",
    seed: int = 0,
    shard: Shard = WHOLE,
    device: torch.device = CPU,
    attention: str = "triton",
    kv_dtype: str | None = None,
) -> Model:
    """Return a model of these sizes with random weights, with all layers or `layers` of them, for the profiler."""
    if weight_bits(dtype):
        _check_quantized(spec, device)
    weights = RandomWeights(torch_dtype(dtype), seed, device, weight_bits(dtype))
    kv_dtype = checked_kv_dtype(kv_dtype, spec, dtype, device)
    return _loaded(_build(spec, {}, weights, dtype, layers, shard), attention, kv_dtype)


def _loaded(model: Model, attention: str, kv_dtype: str) -> Model:
    """Return the model with its attention library and KV dtype, after its weights have been loaded."""
    if model.device == CPU:
        keep_memory()
    return replace(model, attention=attention, kv_dtype=kv_dtype)


def _check_format(format: PackedFormat | None, spec: ModelSpec, dtype: str, device: torch.device) -> None:
    """Raise InputError unless a checkpoint in this format can be run in a dtype on a device."""
    bits = weight_bits(dtype)
    if bits != (format and format.bits):
        held = f"weights of {format.bits} bits: use --dtype fp32 or bf16, for activations" if format else "plain floats"
        raise InputError(f"Model '{spec.name}' can't be run in {dtype}, because its checkpoint has {held}.")
    if format:
        _check_quantized(spec, device)


def _check_quantized(spec: ModelSpec, device: torch.device) -> None:
    """Raise InputError unless a model with quantised weights can be run on a device."""
    if family_of(spec) is not llama:
        able = ", ".join(name for name, family in FAMILIES.items() if family is llama)
        raise InputError(
            f"Model '{spec.name}' has quantised weights and the architecture {spec.architecture}, which can't run with "
            f"them: use its plain weights, or a model of the architecture {able}."
        )
    if device.type != "cpu":
        raise InputError(f"Model '{spec.name}' has quantised weights, which run on a CPU only: use --device cpu.")


@torch.inference_mode()
def _build(
    spec: ModelSpec,
    config: Mapping[str, object],
    weights: Weights,
    dtype: str,
    layers: range | int | None,
    shard: Shard,
    embedding: bool = True,
    head: bool = True,
    encoder_layers: range | None = None,
) -> Model:
    family = family_of(spec)
    held = layers if isinstance(layers, range) else range(spec.layers if layers is None else layers)
    if not (encoder_layers and not held) and not 0 <= held.start < held.stop <= spec.layers:
        raise InputError(
            f"Model '{spec.name}' has layers[0:{spec.layers}]: a stage can't hold layers[{held.start}:{held.stop}]."
        )
    if spec.encoder_layers:
        alike = range(spec.encoder_layers) if layers is None else range(spec.encoder_layers)[held.start : held.stop]
        encoding = alike if encoder_layers is None else encoder_layers
        if encoding and not 0 <= encoding.start < encoding.stop <= spec.encoder_layers:
            raise InputError(
                f"Model '{spec.name}' has encoder layers[0:{spec.encoder_layers}]: a stage can't hold "
                f"layers[{encoding.start}:{encoding.stop}]."
            )
        ends = embedding, encoder_layers is None or (bool(encoding) and encoding.stop == spec.encoder_layers), head
        return _encoder_decoder(spec, config, weights, dtype, encoding, held, shard, ends)
    made, ends = family.build(spec, config, weights, held, shard, embedding, head)
    kept = usual_kv_dtype(dtype)
    return Model(spec, dtype, kept, tuple(made), ends, _eos(config, spec.name), shard, head, device=weights.device)


def _encoder_decoder(
    spec: ModelSpec,
    config: Mapping[str, object],
    weights: Weights,
    dtype: str,
    encoding: range,
    decoding: range,
    shard: Shard,
    ends: tuple[bool, bool, bool],
) -> EncoderDecoder:
    """Return these layers of both stacks, with or without the embedding, the encoder's end and the head."""

    def stack(name: str, layers: range) -> tuple[t5.T5Layer, ...]:
        return tuple(t5.T5Layer(spec, config, weights, name, i, shard) for i in layers)

    given = (config.get(key) for key in ("decoder_start_token_id", "bos_token_id"))
    start = next((token for token in given if token is not None), None if config else 0)
    if not isinstance(start, int):
        raise InputError(f"Model '{spec.name}' has no decoder_start_token_id, without which its decoder can't begin.")
    return EncoderDecoder(
        spec=spec,
        dtype=dtype,
        kv_dtype=usual_kv_dtype(dtype),
        layers=stack("decoder", decoding),
        ends=t5.T5Ends(spec, config, weights, *ends),
        eos=_eos(config, spec.name),
        shard=shard,
        head=ends[-1],
        start=(start,),
        device=weights.device,
        encoder=stack("encoder", encoding),
        encoder_bias=t5.relative_bias(spec, config, weights, "encoder", shard),
        decoder_bias=t5.relative_bias(spec, config, weights, "decoder", shard),
    )


def _with_generation_config(directory: Path, config: dict[str, object]) -> dict[str, object]:
    """Return the config with the special tokens of generation_config.json, if it has any, as `generate` takes them."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return config
    values = read_json(path)
    if not isinstance(values, dict):
        raise InputError(f"'{path}' does not hold a JSON object.")
    return config | {k: v for k, v in values.items() if k.endswith("_token_id") and v is not None}


def _eos(config: Mapping[str, object], name: str) -> frozenset[int]:
    """Return the end-of-text tokens."""
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(v, int) for v in values):
        raise InputError(f"eos_token_id of model '{name}' is {value!r}: it must be an integer or a list.")
    return frozenset(values)


def check_tensors(spec: ModelSpec, weights: SafetensorsWeights) -> None:
    """Refuse files with a tensor that no layer of the whole model reads as plain floats.

    Such a tensor changes the results of the model that it was written for: a scale, a bias, a further layer.

    Raises:
        InputError: Names the tensor and its file.
    """
    extras = [re.compile(pattern) for pattern in family_of(spec).EXTRAS]
    stored = [t for t in weights.stored() if not any(extra.fullmatch(t.name) for extra in extras)]
    read = _names_read(spec, weights)
    if weights.format:
        stored = [tensor for tensor in stored if not _is_part(tensor, read, weights)]
    for tensor in stored:
        refuse_quantised_tensor(tensor.name, tensor.dtype, tensor.file, spec.name)
    unread = [tensor for tensor in stored if tensor.name not in read]
    if unread:
        raise _refusal(spec, unread)


def _is_part(tensor: StoredTensor, read: set[str], weights: SafetensorsWeights) -> bool:
    """Return whether a tensor is a part of a quantised matrix, or a bias of zeros, which GPTQ adds to some."""
    base, _, end = tensor.name.rpartition(".")
    if weights.format is None or f"{base}.weight" not in read or f"{base}.weight" in weights:
        return False
    if end == "bias" and tensor.name not in read:
        return not weights.as_stored(tensor.name).any()
    return end in PARTS[weights.format.method]


def _names_read(spec: ModelSpec, weights: SafetensorsWeights) -> set[str]:
    family = family_of(spec)
    names = {*family.outer_shapes(spec), "lm_head.weight"}  # a tied model's head is read where it is stored
    for layer in range(max(spec.layers, spec.encoder_layers)):
        names.update(family.layer_shapes(spec, layer))
    return {stored_name(weights, family.PREFIX, name) for name in names}


def _refusal(spec: ModelSpec, unread: list[StoredTensor]) -> InputError:
    others = f" and {len(unread) - 1:,} others" if len(unread) > 1 else ""
    return InputError(
        f"Model '{spec.name}' does not use tensor '{unread[0].name}' in '{unread[0].file}'{others}: correct its "
        "config.json, or remove these tensors."
    )
