"""Each kernel against its plain reference.

The error of a row (the last dimension: of attention one head's output for one token) is the norm of its difference
from what is wanted over the norm of that. It doesn't depend on how large the values are, and one wrong row among a
million is found. Where a row of zeros is wanted, only zeros will do. If each row's error is allowed, so is that of all
together.

The limits follow from a dtype's unit roundoff u, 2^-8 in bfloat16. What is wanted is computed in float32 at least and
not rounded. Rounding the result moves an element by at most u of itself, and many elements by 0.4 u on average (root
mean square). Kernels round once or twice before: attention its weights, which can move a whole row by u, norms the sum
with the residual and the normalised row. So rows are off by 0.4 to 1.5 u, up to 0.006 in bfloat16; Triton's interpreter
truncates where GPUs round, which is up to twice as much. The limit is 2.56 u: 0.01 in bfloat16, an eighth of that in
float16. In float32 roundings disappear among those of sums in another order and the CPU kernels' approximate
exponential (1e-5).

FlashAttention's rule, at most twice the error of PyTorch's result in the same dtype, needs that second result at every
size, and adds nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.kernels.case import Case

_ALLOWED = {torch.float32: 5e-5, torch.float16: 1.25e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Verdict:
    """What came of one comparison. Infinite where something is no number, or has another shape or dtype than wanted."""

    error: float
    """‖got - wanted‖ / ‖wanted‖; where results are to be met exactly, the share of elements that differ."""
    row_error: float
    """The same of the worst row."""
    allowed: float
    """The most that either may be."""

    @property
    def passed(self) -> bool:
        """Whether both errors are allowed."""
        return max(self.error, self.row_error) <= self.allowed


def check(case: Case) -> Verdict:
    """Run a case both ways on the same tensors: the worst of its results' verdicts."""
    case.prepare()
    got = [tensor.clone() for tensor in _tensors(case.run())]
    case.prepare()
    dtype = None if case.exact else getattr(torch, case.dtype.removeprefix("torch."))
    verdicts = [compare(mine, expected, dtype) for mine, expected in zip(got, _tensors(case.reference()), strict=True)]
    return max(verdicts, key=lambda verdict: verdict.row_error)


def compare(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None) -> Verdict:
    """A result, which must be of this dtype, beside what is wanted, which may be wider; None: both must be the same."""
    allowed = _ALLOWED[dtype] if dtype else 0.0
    if got.shape != expected.shape or got.dtype != (dtype or expected.dtype):
        return Verdict(float("inf"), float("inf"), allowed)
    if dtype is None:
        different = (got != expected).double()
        return Verdict(different.mean().item(), different.mean(-1).max().item(), allowed)
    wide = expected.double()
    difference = got.double() - wide
    error, rows = _relative(difference.norm(), wide.norm()), _relative(difference.norm(dim=-1), wide.norm(dim=-1))
    return Verdict(error.item(), rows.max().item(), allowed)


def _relative(difference: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Differences over what is wanted; 0 where both are, and infinite where that is no number."""
    return (difference / expected).where(difference != 0, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _tensors(result: Any) -> list[torch.Tensor]:
    some = [result] if isinstance(result, torch.Tensor) else list(result)
    return [tensor for tensor in some if tensor is not None]
