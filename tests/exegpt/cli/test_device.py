"""Where commands run: on a GPU where there is one, else on the CPU; and in which dtype."""

import json

import pytest
import torch

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def requests(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt_ids": [5, 9, 7], "max_tokens": 4}) + "\n" for i in "ab"))
    return path


@no_gpu
@pytest.mark.parametrize("command", ["run", "bench", "demo", "profile", "tune"])
def test_a_missing_gpu_is_refused_in_one_sentence(exegpt, tiny, tiny_schedule, requests, tmp_path, command):
    facts = {
        "run": ("--model", tiny, "--requests", requests),
        "bench": ("--model", tiny, "--schedule", tiny_schedule),
        "demo": ("--dir", tmp_path / "demo"),
        "profile": ("--model", tiny),
        "tune": ("-l", "5s", "--model", tiny),
    }
    done = exegpt(command, *facts[command], "--device", "cuda")
    assert done.code == 2 and not done.out and "Traceback" not in done.err
    assert "--device cuda needs a GPU" in done.err and "--device cpu" in done.err


def test_a_device_of_no_kind(exegpt, tiny, requests):
    done = exegpt("run", "--model", tiny, "--requests", requests, "--device", "tpu")
    assert done.code == 2 and "'tpu'" in done.err


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.slow  # measures for as long as the kernels of other types are references
def test_a_run_in_another_dtype(exegpt, tiny, requests, dtype):
    done = exegpt("run", "--model", tiny, "--requests", requests, "--device", "cpu", "--dtype", dtype, "--json")
    assert done.code == 0, done.err
    assert done.json["schedule"]["dtype"] == dtype and done.json["requests"] == 2


def test_another_dtype_than_the_schedules(exegpt, tiny, tiny_schedule, requests):
    options = ("--model", tiny, "--requests", requests, "--schedule", tiny_schedule)
    done = exegpt("run", *options, "--device", "cpu", "--dtype", "bf16")
    assert done.code == 2 and "fp32" in done.err and "--dtype bf16" in done.err


def test_a_device_beside_another_cluster(exegpt):
    done = exegpt("tune", "-l", "5s", "--cluster", "4xA40", "--device", "cpu")
    assert done.code == 2 and "--device cpu" in done.err and "'4xA40'" in done.err
