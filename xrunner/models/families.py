"""The module with the layers of each architecture: every architecture that can be planned for can be run."""

from types import ModuleType

from xcore.specs.model import Architecture
from xrunner.models import gpt2, llama, opt, t5

FAMILIES: dict[Architecture, ModuleType] = {
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
    "qwen3": llama,
    "gpt2": gpt2,
    "opt": opt,
    "t5": t5,
}
"""Architecture → its module.

It defines `unsupported`, `new_config`, `layer_shapes`, `outer_shapes`, `PREFIX` and `EXTRAS` of tensors' names, and for
a decoder-only model `build`.
"""
