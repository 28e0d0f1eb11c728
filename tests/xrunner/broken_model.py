"""Models whose logits are NaN: after prompts with one token, or after all."""

import math
import shutil

from safetensors.torch import load_file, save_file

NAN = 299
"""The token."""


def spoil(directory, target, tensor, row=slice(None), factor=math.nan):
    """A copy of a model's directory in which a row of a tensor, or all of it, is multiplied by a factor."""
    shutil.copytree(directory, target)
    for path in target.glob("*.safetensors"):
        weights = load_file(path)
        for name in weights:
            if tensor in name:
                weights[name][row] *= factor
        save_file(weights, path, metadata={"format": "pt"})
    return target
