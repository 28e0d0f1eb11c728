"""The module with the layers of each architecture that can be run; more can be planned for."""

from types import ModuleType

from xcore.errors import InputError
from xcore.specs.model import ModelSpec
from xrunner.models import gpt2, llama, opt, t5

FAMILIES: dict[str, ModuleType] = {
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


def family_of(spec: ModelSpec) -> ModuleType:
    """Return the module with a model's layers; InputError if the architecture can only be planned for."""
    if spec.architecture not in FAMILIES:
        raise InputError(
            f"Model '{spec.name}' has the architecture {spec.architecture}, which exegpt plans for but doesn't run: "
            f"those that run are {', '.join(FAMILIES)}."
        )
    return FAMILIES[spec.architecture]
