"""What the attention kernels are compiled to for GPUs that aren't there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
COMPILE = """
import json, re, sys
from dataclasses import asdict
import torch
from benchmarks.gpu.compiled import compiling_only, examine
from exegpt.kernels import attention_gpu
from exegpt.kernels.attention_tiles import choose_tile, shared_bytes
from exegpt.kernels.work_list import WorkList

rows, there = [], {"device": "meta", "dtype": torch.int32}
counted = r"bar.sync[^;]*;(?:(?!bar.sync|st.global).)*atom.global.gpu.acq_rel.*bar.sync.*ld.global.cg"
for capability, phase, size, kind, *heads in json.loads(sys.argv[1]):
    heads, kv_heads = heads or (8, 2)
    dtype = getattr(torch, kind)
    with compiling_only(capability) as made:
        sequences, tokens = (2, 2) if phase == "decode" else (2, 1024)
        q = torch.zeros(tokens, heads, size, device="meta", dtype=dtype)
        cache = torch.zeros(9, kv_heads, 16, size, device="meta", dtype=dtype)
        arrays = (torch.zeros(n, **there) for n in ((sequences, 4), sequences + 1, sequences))
        lists = (torch.zeros(n, **there) for n in (8, (9, 4), sequences + 1, (sequences, kv_heads)))
        work = WorkList(*lists) if phase == "decode" else None
        attention_gpu.attention_gpu(q, cache, cache.clone(), *arrays, torch.empty_like(q), work=work, splits=1)
        (kernel,) = made
        gpu = attention_gpu.architecture(q.device)
        tile = choose_tile(gpu, phase, tokens // sequences, heads // kv_heads, size, dtype.itemsize, False)
        modelled = shared_bytes(capability, tile, size, dtype.itemsize)
        more = {"modelled": modelled, "expected": asdict(tile)}
        more["merges"] = bool(re.search(counted, kernel.asm["ptx"], re.S))
        rows.append(asdict(examine(kernel, capability)) | more)
json.dump(rows, sys.stdout)
"""


def compiled(*shapes):
    """What is known of the kernel for each (capability, phase, head size, dtype), in a process without interpreter."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, json.dumps(shapes)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def fits(row):
    """Whether no fewer can run at a time than the table says, in the shared memory that the model predicts."""
    tile = row["expected"]
    assert row["warps"] == tile["num_warps"]
    return row["resident"] >= tile["resident"] and 0 <= row["modelled"] - row["shared_bytes"] <= 2048


@pytest.mark.slow
def test_decoding_reads_ahead():
    for row in compiled(*((capability, "decode", 128, "bfloat16") for capability in (80, 90, 100))):
        assert row["buffers"] > 1 and row["wait_group"] > 0, row
        assert row["spilled_bytes"] == 0 and row["matrix_instructions"], row
        assert fits(row), row
        # Partial results are stored by all threads, then counted, then read again from the second cache.
        assert row["merges"], row


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 90, 100])
@pytest.mark.timeout(600)
def test_every_row_of_the_table(capability):
    shapes = [(capability, phase, size, "bfloat16") for phase in ("prefill", "decode") for size in (64, 128, 256)]
    for row in compiled(*shapes):
        assert fits(row) and row["buffers"] > 1 and row["wait_group"] > 0, row
        assert row["spilled_bytes"] == 0, row


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.timeout(600)
def test_many_heads_of_one_kv_head(capability):
    """Multi-query attention: more rows than decoding's tiles have."""
    shapes = [(capability, "decode", size, "bfloat16", heads, 1) for size, heads in ((64, 71), (128, 48), (128, 20))]
    for row in compiled(*shapes):
        assert row["resident"] >= row["expected"]["resident"] and row["buffers"] > 1 and row["spilled_bytes"] == 0, row


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_float32_spills_nothing():
    shapes = [(90, phase, size, "float32") for phase in ("prefill", "decode") for size in (64, 128, 256)]
    assert [row["spilled_bytes"] for row in compiled(*shapes)] == [0] * 6
