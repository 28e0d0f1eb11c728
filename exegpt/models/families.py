"""Which file has the layers of which architecture."""

from types import ModuleType

from exegpt.errors import InputError
from exegpt.model import ModelSpec
from exegpt.models import gpt2, llama, opt, t5

FAMILIES: dict[str, ModuleType] = {
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
    "qwen3": llama,
    "gpt2": gpt2,
    "opt": opt,
    "t5": t5,
}
"""Architecture → the module with its `check_config`, `layer_shapes` and `outer_shapes`, and for a decoder-only model
`build`."""


def check_runnable(spec: ModelSpec) -> None:
    """InputError for a model that can only be planned for."""
    if spec.architecture not in FAMILIES:
        raise InputError(
            f"Model '{spec.name}' is of architecture '{spec.architecture}', which can't be run yet: "
            f"{', '.join(FAMILIES)} can."
        )
