"""Golden answers of 40 `tune`, `simulate` and `plan` commands, without provenance, wall times and sentences."""

import contextlib
import io
import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

from exegpt.cli import main

UNCOMPARED = ("provenance", "seconds", "wall_seconds", "search_s", "assumptions", "fingerprint")
"""Keys whose values say when, how long and in which words; fingerprints are of what is compared as a whole."""
DIGITS = 9

MODELS = {
    "models": [
        {"name": "chat", "model": "llama-3.1-8b", "workload": "1024/256", "rate": "2/s", "latency_bound": "10s"},
        {"name": "code", "model": "opt-6.7b", "workload": "512/64", "rate": "3/s", "latency_bound": "5s"},
    ]
}
OFFLINE = {
    "models": [
        {"name": "one", "model": "opt-6.7b", "workload": "128/64", "requests": 500},
        {"name": "two", "model": "opt-13b", "workload": "256/32", "requests": 300},
    ]
}
FILES = {"models.yaml": MODELS, "offline.yaml": OFFLINE}
"""What commands read."""

_POINT = "simulate -m llama-3.1-8b -c 2xH100-SXM -w 2048/256"
COMMANDS = tuple(
    f"{command} --json"
    for command in (
        "tune -l 5s -m llama-3.1-8b -c 1xH100-SXM -w 2048/256 --no-advice",
        "tune -l 12s --no-advice",
        "tune -l 1s,5s,inf -m llama-3.1-8b -c 1xH100-SXM -w 1024/128 --policy orca,chunked --no-advice",
        "tune --ttft 1s --tpot 40ms -m llama-3.1-70b --dtype fp8 -c 4xH100-SXM -w 2048/256 --no-advice",
        "tune --ttft 300ms -m llama-3.1-8b -c 5xL40S -w 512/512 --policy orca --no-advice",
        "tune -l 20s -m opt-13b -c 4xA40 -w S --policy rra --no-advice",
        "tune -l 20s -m opt-13b -c 4xA40 -w S --policy waa-c --no-advice",
        "tune -l 30s -m opt-13b -c 4xA40 -w T --policy waa-m --no-advice",
        "tune -l 30s -m opt-13b -c 4xA40 -w C1 --policy static,hybrid --no-advice",
        "tune -l 15s -m t5-11b -c 4xA40 -w S --policy orca,rra --no-advice",
        "tune -l 25s -m llama-3.1-70b -c 2x8xH100-SXM -w 2048/512 --policy rra --no-advice",
        "tune -l 5s -m opt-13b -c 4xA40 -w T --bound p99-length --policy rra --no-advice",
        "tune -l 8s -m llama-3.1-8b -c 1xH100-SXM -w C1 --percentile 90 --policy chunked --no-advice",
        "tune -l 8s -m llama-3.1-8b -c 1xH100-SXM -w C1 --max-num-seqs 64 --no-advice",
        "tune -l 8s -m llama-3.1-8b -c 1xH100-SXM -w 2048/256 --engine sglang --no-advice",
        "tune -l 8s -m llama-3.1-8b -c 2xH100-SXM -w 2048/256 --engine paper --policy rra,chunked --no-advice",
        "tune -l 60s -m gpt3-175b -c 2x8xA100-SXM-80GB -w T --policy rra --no-advice",
        "tune -l 10ms -m llama-3.1-8b -c 1xH100-SXM -w 2048/256 --no-advice",
        "tune -l 20s -m opt-13b -c 1xA40 -w T --admission auto --policy orca,chunked --no-advice",
        "tune --rate 2/s -l 10s -m llama-3.1-8b -c 1xH100-SXM -w 1024/128 --policy orca --no-advice",
        "tune -l 5s -m nothing -c 1xH100-SXM -w 2048/256",
        f"{_POINT} --max-num-seqs 64",
        f"{_POINT} --max-num-seqs 64 --tp-degree 2 --max-num-batched-tokens 4096",
        f"{_POINT} --max-num-seqs 16 --policy orca --prefills-per-step 2",
        f"{_POINT} --policy static --encode-batch 32",
        f"{_POINT} --policy rra --encode-batch 8 --decode-iterations 16",
        f"{_POINT} --policy waa-c --encode-batch 2 --encode-devices 1",
        f"{_POINT} --max-num-seqs 64 --replicas 2 --engine none",
        f"{_POINT} --max-num-seqs 64 --rate 3/s --seed 1",
        f"{_POINT} --max-num-seqs 64 --replicas 9",
        "simulate --command 'vllm serve llama-3.1-70b -tp 4 --max-num-seqs 128' -c 8xH100-SXM -w 1024/256",
        "simulate -m llama-3.1-8b -c 1xL40S -w C1 --max-num-seqs 32 --engine vllm-0.11",
        "simulate -m llama-3.1-70b --dtype fp8 -c 2xH200 -w 4096/512 --max-num-seqs 48",
        "simulate -m opt-13b -c 1xA40 -w T --max-num-seqs 40 --admission grow --policy orca",
        "simulate -m t5-11b -c 4xA40 -w S --max-num-seqs 16 --policy orca",
        "plan models.yaml -c 2xH100-SXM --method spatial",
        "plan models.yaml -c 2xH100-SXM --method temporal",
        "plan models.yaml -c 2xA100-80GB --method spatial",
        "plan offline.yaml -c 2xA100-80GB --method samullm",
        "plan offline.yaml -c 2xA100-80GB --method nonsense",
    )
)


def answers(commands: tuple[str, ...] = COMMANDS) -> dict[str, Any]:
    """Each command's exit code and what is compared of its answer."""
    return {command: _answer(command) for command in commands}


def _answer(command: str) -> list[Any]:
    out = io.StringIO()
    with tempfile.TemporaryDirectory() as directory:
        for name, models in FILES.items():
            (Path(directory) / name).write_text(json.dumps(models))
            command = command.replace(name, f"{directory}/{name}")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            code = main(shlex.split(command))
    printed = out.getvalue().replace(f"{directory}/", "")
    return [code, _compared(json.loads(printed)) if printed else None]


def _compared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: None if key in UNCOMPARED else _compared(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_compared(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return None if isinstance(value, str) and " " in value else value
