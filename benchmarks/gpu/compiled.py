"""Compiling every kernel for a GPU that isn't there: registers, spills, shared memory, and matrix instructions.

Triton compiles without a device once it is told which one to compile for. Kernels then are compiled where they would be
launched, and nothing runs.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from exegpt.kernels import attention_gpu

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that one program may use, by compute capability (A100, A40, L40S, H100, B200, RTX PRO 6000)."""


@dataclass(frozen=True)
class Compiled:
    """One kernel as it was compiled."""

    kernel: str
    warps: int
    registers: int
    """Per thread."""
    spilled_bytes: int
    """Per thread, stored to memory for lack of registers."""
    shared_bytes: int
    matrix_instructions: int
    async_copies: int


class _Absent:
    """A driver for a device that isn't there."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # Triton keeps a target with its number

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_only(capability: int) -> Iterator[list[Any]]:
    """Within it, launches compile for a compute capability of SHARED_KIB and append what they made."""
    made: list[Any] = []
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        made.append(launch(kernel, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(_Absent(capability))
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(attention_gpu, "shared_memory", lambda device: SHARED_KIB[capability] * 1024),
    ):
        yield made


def examine(kernel: Any, capability: int) -> Compiled:
    """What the assembler says of a compiled kernel."""
    ptx = kernel.asm["ptx"]
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    assembler = folder / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(ptx)
        architecture = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
        command = [assembler, "-v", f"-arch={architecture}", source, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert found and spilled, said
    return Compiled(
        kernel.metadata.name,
        kernel.metadata.num_warps,
        int(found[1]),
        int(spilled[1]),
        kernel.metadata.shared,
        len(re.findall(r"\bwgmma\.mma_async|\bmma\.sync|\btcgen05\.mma", ptx)),
        len(re.findall(r"\bcp\.async\.c[ag]\.", ptx)),
    )
