"""Each kernel against its plain reference."""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.kernels.cases import Case

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_NEAR_TIES = 0.01
"""Share of rows in which another token may be chosen: sums are rounded in another order."""


@dataclass(frozen=True)
class Verdict:
    """What came of one comparison."""

    error: float
    """Greatest |got - wanted| / max(1, |wanted|), infinite where something is no number; of tokens the share that
    differ."""
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the error is allowed."""
        return self.error <= self.allowed


def check(case: Case) -> Verdict:
    """Run a case both ways on the same tensors."""
    case.prepare()
    got = [tensor.clone() for tensor in _tensors(case.run())]
    case.prepare()
    wanted = _tensors(case.reference())
    error = max(_error(mine, plain) for mine, plain in zip(got, wanted, strict=True))
    if not wanted[0].is_floating_point():
        return Verdict(error, _NEAR_TIES)
    return Verdict(error, 0.0 if case.exact else _TOLERANCE[wanted[0].dtype])


def _tensors(result: Any) -> list[torch.Tensor]:
    some = [result] if isinstance(result, torch.Tensor) else list(result)
    return [tensor for tensor in some if tensor is not None]


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf")
    if not wanted.is_floating_point():
        return (got != wanted).float().mean().item()
    error = ((got.float() - wanted.float()).abs() / wanted.float().abs().clamp(min=1)).max().item()
    return error if error == error else float("inf")
