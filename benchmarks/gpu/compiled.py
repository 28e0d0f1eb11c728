"""Compiling every kernel for a GPU that isn't there: registers, spills, shared memory, and matrix instructions.

Triton compiles without a device for a given target. Kernels then are compiled where they would be
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
from exegpt.kernels.gpu_device import Architecture


@dataclass(frozen=True)
class Limits:
    """What a multiprocessor of a compute capability has for its programs (CUDA C++ Programming Guide, technical
    specifications per compute capability)."""

    multiprocessors: int
    """Of the GPU that stands for it."""
    shared_kib: int
    """Of which every program takes 1 KiB more than it uses."""
    warps: int
    programs: int


LIMITS = {
    80: Limits(108, 164, 64, 32),  # A100
    86: Limits(84, 100, 48, 16),  # A40
    89: Limits(142, 100, 48, 24),  # L40S
    90: Limits(132, 228, 64, 32),  # H100
    100: Limits(148, 228, 64, 32),  # B200
    120: Limits(188, 100, 48, 32),  # RTX PRO 6000
}
_REGISTERS = 65536
"""Of a multiprocessor; a warp gets a multiple of 256, and they go to four warps at a time."""


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
    resident: int
    """Programs that a multiprocessor runs at a time, as far as registers, shared memory and warps go."""
    matrix_instructions: int
    async_copies: int
    buffers: int | None
    """Tiles that loops keep of what they read ahead, the fewest of any; None: no loop reads ahead."""
    wait_group: int | None
    """Groups of copies that loops leave under way where they wait for one, the fewest of any; None: no loop waits."""


class _Absent:
    """A driver for a device that isn't there."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)  # Triton keeps a target with its number

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_only(capability: int) -> Iterator[list[Any]]:
    """Within it, launches compile for a compute capability of LIMITS and append the compiled kernels."""
    compiled: list[Any] = []
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(launch(kernel, *args, grid=grid, warmup=True, **kwargs))

    limits = LIMITS[capability]
    gpu = Architecture(capability, limits.multiprocessors, (limits.shared_kib - 1) * 1024)
    driver.set_active(_Absent(capability))
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(attention_gpu, "architecture", lambda device: gpu),
    ):
        yield compiled


def examine(kernel: Any, capability: int) -> Compiled:
    """The assembler's figures for a compiled kernel."""
    ptx = kernel.asm["ptx"]
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    assembler = folder / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(ptx)
        architecture = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
        command = [str(assembler), "-v", f"-arch={architecture}", str(source), "-o", "/dev/null"]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.search(r"Used (\d+) registers", listing)
    spilled = re.search(r"(\d+) bytes spill stores", listing)
    assert used and spilled, listing
    registers, warps, shared = int(used[1]), kernel.metadata.num_warps, kernel.metadata.shared
    return Compiled(
        kernel=kernel.metadata.name,
        warps=warps,
        registers=registers,
        spilled_bytes=int(spilled[1]),
        shared_bytes=shared,
        resident=resident(capability, warps, registers, shared),
        matrix_instructions=len(re.findall(r"\bwgmma\.mma_async|\bmma\.sync|\btcgen05\.mma", ptx)),
        async_copies=len(re.findall(r"\bcp\.async\.c[ag]\.", ptx)),
        buffers=min(buffers(kernel.asm["ttgir"]), default=None),
        wait_group=min(waits(ptx), default=None),
    )


def resident(capability: int, warps: int, registers: int, shared_bytes: int) -> int:
    """Programs of so many warps, registers per thread and bytes that a multiprocessor runs at a time."""
    limits = LIMITS[capability]
    of_warp = -(-registers * 32 // 256) * 256
    by_registers = _REGISTERS // of_warp // 4 * 4 // warps
    by_shared = limits.shared_kib * 1024 // (shared_bytes + 1024)
    return min(limits.programs, limits.warps // warps, by_registers, by_shared)


def buffers(ttgir: str) -> list[int]:
    """How many tiles each array in shared memory has that a loop reads ahead into: [buffers, rows, columns]."""
    return [int(count) for count in re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x[a-z]", ttgir)]


def waits(ptx: str) -> list[int]:
    """For each wait for asynchronous copies in an innermost loop, how many groups of them it leaves under way."""
    labels: dict[str, int] = {}
    loops, groups_left = [], []
    for number, line in enumerate(ptx.splitlines()):
        if label := re.match(r"(\$\w+):", line):
            labels[label[1]] = number
        elif (branch := re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)) and branch[1] in labels:
            loops.append((labels[branch[1]], number))
        elif wait := re.search(r"cp\.async\.wait_group\s+(\d+)", line):
            groups_left.append((number, int(wait[1])))
    innermost = [loop for loop in loops if not any(other != loop and _within(other, loop) for other in loops)]
    return [count for number, count in groups_left if any(begin < number < end for begin, end in innermost)]


def _within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
