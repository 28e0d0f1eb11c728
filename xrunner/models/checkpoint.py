"""Check the tensors of a checkpoint: a layer reads each one, or it is a known extra."""

import re

from xcore.errors import InputError
from xcore.specs.model import ModelSpec
from xcore.specs.quantization import refuse_quantised_tensor
from xrunner.models.families import FAMILIES
from xrunner.models.weights import SafetensorsWeights, StoredTensor, stored_name


def check_tensors(spec: ModelSpec, weights: SafetensorsWeights) -> None:
    """Refuse files with a tensor that no layer of the whole model reads as plain floats.

    Such a tensor changes the results of the model that it was written for: a scale, a bias, a further layer.

    Raises:
        InputError: Names the tensor and its file.
    """
    extras = [re.compile(pattern) for pattern in FAMILIES[spec.architecture].EXTRAS]
    stored = [t for t in weights.stored() if not any(extra.fullmatch(t.name) for extra in extras)]
    read = _names_read(spec, weights)
    for tensor in stored:
        refuse_quantised_tensor(tensor.name, tensor.dtype, tensor.file, spec.name)
    unread = [tensor for tensor in stored if tensor.name not in read]
    if unread:
        raise _refusal(spec, unread)


def _names_read(spec: ModelSpec, weights: SafetensorsWeights) -> set[str]:
    family = FAMILIES[spec.architecture]
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
