"""What the attention kernel is compiled to for a GPU that isn't there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
COMPILE = """
import json, sys
import torch
from benchmarks.gpu.compiled import compiling_only, examine
from exegpt.kernels.attention_gpu import attention_gpu

spilled, there = {}, {"device": "meta", "dtype": torch.int32}
with compiling_only(90) as made:
    for size in (64, 128, 256):
        q = torch.zeros(256, 8, size, device="meta")
        keys = torch.zeros(9, 4, size, 16, device="meta")
        arrays = torch.zeros(2, 8, **there), torch.zeros(3, **there), torch.zeros(2, **there)
        attention_gpu(q, keys, keys.mT.contiguous(), *arrays, torch.empty_like(q))
        spilled[size] = [examine(kernel, 90).spilled_bytes for kernel in made]
        made.clear()
json.dump(spilled, sys.stdout)
"""


@pytest.mark.slow
def test_float32_spills_nothing():
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=env, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"64": [0], "128": [0], "256": [0]}
