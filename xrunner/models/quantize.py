"""Write a quantised copy of a model directory: weights rounded to the nearest code, in GPTQ's layout."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from exegpt.kernels.quantized_weight import rounded_to_nearest
from xcore import __version__
from xcore.document import dumps
from xcore.errors import InputError
from xcore.specs.model import ModelSpec, read_config
from xcore.specs.quantization import packed_format
from xrunner.models import llama
from xrunner.models.families import FAMILIES, family_of
from xrunner.models.model_loading import check_tensors
from xrunner.models.packed_weights import packed
from xrunner.models.weights import SafetensorsWeights

_INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
"""Ends of the names of files with weights, which the copy has in another form."""


@dataclass(frozen=True)
class Quantized:
    """Counts of a copy that was written."""

    matrices: int
    """Matrices that were rounded."""
    original_bytes: int
    """Bytes of the original's tensors."""
    bytes: int
    """Bytes of the copy's tensors."""


def quantize_model(
    directory: Path,
    out: Path,
    bits: int,
    group_size: int,
    head: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Quantized:
    """Write a copy whose layers' matrices have codes of 8 or 4 bits, file by file; completely or not at all.

    The embedding, norms, biases and, without `head`, the output head stay as they are. `group_size` inputs share a
    scale, all if it is -1. `progress` is called with the rounded matrices and all.

    Raises:
        InputError: The model can't be quantised so, or the target exists.
    """
    spec = _checked(directory, out, bits, group_size)
    weights = SafetensorsWeights(directory, torch.float32)
    check_tensors(spec, weights)
    shapes = _matrices(spec, head)
    _check_groups(shapes, bits, group_size)
    out.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        os.chmod(making, 0o755)
        written = _write_files(weights, making, shapes, bits, group_size, progress)
        _write_rest(directory, making, bits, group_size, head)
        os.replace(making, out)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    return written


def _checked(directory: Path, out: Path, bits: int, group_size: int) -> ModelSpec:
    """Return the model's sizes; InputError if it can't be quantised, whatever its matrices."""
    if out.exists():
        raise InputError(f"'{out}' exists already: choose another directory or remove it.")
    if bits not in (4, 8):
        raise InputError(f"--bits {bits}: weights can be quantised to 4 or 8 bits.")
    if group_size != -1 and not (group_size > 0 and group_size % 32 == 0):
        raise InputError(f"--group-size {group_size}: use a multiple of 32, or -1 for one scale of all inputs.")
    config = read_config(directory)
    spec = ModelSpec.from_directory(directory)
    if packed_format(config, directory, spec.name):
        raise InputError(f"Model '{spec.name}' is quantised already: pass its original's directory.")
    if family_of(spec) is not llama:
        able = ", ".join(name for name, family in FAMILIES.items() if family is llama)
        raise InputError(f"Model '{spec.name}' is of the architecture {spec.architecture}: those quantised are {able}.")
    return spec


def _matrices(spec: ModelSpec, head: bool) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the layers' matrices, with `head` of the output head too."""
    if head and spec.tied_embeddings:
        raise InputError(f"Model '{spec.name}' has an embedding that is its output head: leave --head out.")
    outer: dict[str, tuple[int, ...]] = {"lm_head.weight": (spec.vocab, spec.hidden)} if head else {}
    shapes = (item for layer in range(spec.layers) for item in llama.layer_shapes(spec, layer).items())
    return {name: shape for name, shape in shapes if len(shape) == 2} | outer


def _check_groups(shapes: dict[str, tuple[int, ...]], bits: int, group_size: int) -> None:
    """Raise InputError unless the sizes of all matrices are whole numbers of groups and words."""
    word = 32 // bits
    for name, (outputs, inputs) in shapes.items():
        if group_size > 0 and inputs % group_size:
            raise InputError(
                f"--group-size {group_size} does not divide the {inputs} inputs of '{name}': use -1 or 32."
            )
        if outputs % word or inputs % word:
            raise InputError(f"'{name}' is {outputs} x {inputs}: both must be multiples of {word} for {bits} bits.")


def _write_files(
    weights: SafetensorsWeights,
    making: Path,
    shapes: dict[str, tuple[int, ...]],
    bits: int,
    group_size: int,
    progress: Callable[[int, int], None],
) -> Quantized:
    """Write a file for each of the original's, and an index if it has one."""
    from safetensors.torch import save_file

    names: dict[str, list[str]] = {}
    for stored in weights.stored():
        names.setdefault(stored.file.name, []).append(stored.name)
    where: dict[str, str] = {}
    done, before, after = 0, 0, 0
    for file, own in names.items():
        tensors: dict[str, torch.Tensor] = {}
        for name in own:
            original = weights.as_stored(name)
            before += original.nbytes
            if name not in shapes:
                tensors[name] = original
                continue
            tensors |= dict(_parts(name, weights.get(name, shapes[name]), bits, group_size))
            done += 1
            progress(done, len(shapes))
        save_file(tensors, making / file, metadata={"format": "pt"})
        shutil.copymode(weights.directory / "config.json", making / file)  # the library's files are their owner's alone
        where |= dict.fromkeys(tensors, file)
        after += sum(tensor.nbytes for tensor in tensors.values())
    if (weights.directory / _INDEX).is_file():
        index = {"metadata": {"total_size": after}, "weight_map": where}
        (making / _INDEX).write_text(dumps(index) + "\n", encoding="utf-8")
    return Quantized(done, before, after)


def _parts(name: str, matrix: torch.Tensor, bits: int, group_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a matrix in GPTQ's layout: codes, zero points less one, scales, and each input's group."""
    outputs, inputs = matrix.shape
    size, half, base = inputs if group_size == -1 else group_size, 2 ** (bits - 1), name.removesuffix("weight")
    if not matrix.isfinite().all():
        raise InputError(f"Tensor '{name}' has values that are not finite: it can't be quantised.")
    rounded = rounded_to_nearest(matrix, bits, size)
    if not rounded.scales.isfinite().all():
        raise InputError(
            f"Tensor '{name}' has values up to {matrix.abs().max():.3g}, whose scale float16 can't hold: it can't be "
            "quantised."
        )
    yield f"{base}qweight", packed((rounded.codes.int() + half).t(), bits, 0).contiguous()
    yield f"{base}qzeros", packed(torch.full((inputs // size, outputs), half - 1), bits, 1)
    yield f"{base}scales", rounded.scales.t().half().contiguous()
    yield f"{base}g_idx", (torch.arange(inputs) // size).int()


def _write_rest(directory: Path, making: Path, bits: int, group_size: int, head: bool) -> None:
    """Write the config, and copy the tokenizer's and all other files."""
    config = dict(read_config(directory))
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": True,
        "desc_act": False,
        "lm_head": head,
        "checkpoint_format": "gptq",
        "meta": {"quantizer": [f"exegpt:{__version__}"], "rounding": "to nearest, without calibration"},
    }
    (making / "config.json").write_text(dumps(config) + "\n", encoding="utf-8")
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHTS):
            shutil.copy(path, making / path.name)
