"""CostTable: seconds per iteration of several models as lines by batch (SamuLLM's cost model), and loading seconds.

It also has the models' output lengths.
"""

from dataclasses import dataclass

from xcore import document
from xcore.errors import InputError
from xcore.spec import Spec
from xcore.specs.workload import LengthDistribution


@dataclass(frozen=True)
class PhaseLines(Spec):
    """One phase's iterations: `seconds = slope * x + intercept` for each batch of `batches`, three times.

    For `compute`, x is the FLOPs (multiply-adds) of one GPU. For `prepare`, it is the tokens padded to the longest
    sequence. For `sample`, it is the sum of all lengths.
    """

    batches: tuple[int, ...]
    compute: tuple[tuple[float, float], ...]
    prepare: tuple[tuple[float, float], ...]
    sample: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        lines = (self.compute, self.prepare, self.sample)
        if not self.batches or any(len(of_one) != len(self.batches) for of_one in lines):
            raise InputError("A phase of a cost table needs a line for each of its batches, and at least one batch.")
        if self.batches[0] < 1 or any(b <= a for a, b in zip(self.batches, self.batches[1:], strict=False)):
            raise InputError("The batches of a cost table must increase and start at 1.")
        if any(slope < 0 for of_one in lines for slope, _ in of_one):
            raise InputError("The lines of a cost table must not fall: more work can't take less time.")


@dataclass(frozen=True)
class DegreeCosts(Spec):
    """One model at one tensor-parallel degree."""

    tp: int
    macs_per_token: float
    """Multiply-adds of one GPU for each token, whatever the context: L c."""
    macs_per_position: float
    """Multiply-adds of one GPU for a token and each position that it attends to: 2 L h / tp."""
    kv_tokens: int
    """Tokens whose keys and values fit in the memory of one replica."""
    load_s: float | None
    """Seconds to load a replica; None: not measured, and the model can't be planned at this degree."""
    prefill: PhaseLines
    decode: PhaseLines

    def __post_init__(self) -> None:
        if self.tp < 1 or self.kv_tokens < 1 or self.macs_per_token <= 0 or self.macs_per_position < 0:
            raise InputError(
                f"A degree of a cost table (tp {self.tp}) needs a positive cache size and positive work per token."
            )
        if self.load_s is not None and self.load_s < 0:
            raise InputError(f"The loading time can't be {self.load_s:g} s.")


@dataclass(frozen=True)
class ModelCosts(Spec):
    """One model at each of its degrees, and its outputs."""

    name: str
    context: int
    """The longest sequence, prompt and output."""
    degrees: tuple[DegreeCosts, ...]
    outputs: LengthDistribution | None = None
    """Output lengths, censored by the context alone; None: not measured."""

    def __post_init__(self) -> None:
        degrees = [degree.tp for degree in self.degrees]
        if not degrees or len(set(degrees)) < len(degrees):
            raise InputError(
                f"Model '{self.name}' of a cost table must have each of its degrees exactly once (got {degrees})."
            )

    def degree(self, tp: int) -> DegreeCosts:
        """Return the costs at a degree; InputError if it wasn't measured."""
        for degree in self.degrees:
            if degree.tp == tp:
                return degree
        raise InputError(f"The cost table has no degree {tp} of model '{self.name}'.")


@dataclass(frozen=True)
class CostTable(Spec):
    """The costs of iterations of several models on one kind of machine."""

    version: int
    source: str
    machine: str
    models: tuple[ModelCosts, ...]

    VERSION = 1

    def __post_init__(self) -> None:
        if self.version != CostTable.VERSION:
            raise InputError(
                f"This cost table has version {self.version}, but this version of exegpt reads version "
                f"{CostTable.VERSION}: import it again."
            )
        names = [model.name for model in self.models]
        if len(set(names)) < len(names):
            raise InputError("A cost table must have each model exactly once.")

    def model(self, name: str) -> ModelCosts:
        """Return a model's costs; InputError names the known models."""
        for model in self.models:
            if model.name == name:
                return model
        raise InputError(
            f"The cost table has no model '{name}': it has {', '.join(model.name for model in self.models)}."
        )


def read_cost_table(path: str) -> CostTable | None:
    """Read a cost table; None if the file holds something else, such as a profile.

    Raises:
        InputError: The file can't be read, or the cost table is wrong.
    """
    data = document.read_json(path)
    if not isinstance(data, dict) or not {"machine", "models"} <= data.keys():
        return None
    return document.from_dict(CostTable, data, f"'{path}'")
