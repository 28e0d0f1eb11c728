"""What exegpt's own engine holds on a CPU beside weights, cache and the activations of its steps.

Runs small models with random weights through `exegpt run`, and takes weights, cache and the widest moment of a layer
from the process's resident set as it ends. Interpreter, libraries and the sampler are left; the peak has the weights
twice for a moment, as they are loaded.

    python -m benchmarks.own_memory
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.model_sizes import ModelSizes
from xcore import document
from xscheduler.engine_settings import engine_schedule
from xscheduler.settings import find_setting
from xsimulator.cost.cost_model import CostModel

_MIB = 2.0**20
_REPORT = """
import atexit, runpy, sys
def report():
    with open("/proc/self/status") as lines:
        facts = dict(line.split(":") for line in lines)
    print("MEMORY", *(facts[name].split()[0] for name in ("VmHWM", "VmRSS")), file=sys.__stderr__)
atexit.register(report)
sys.argv[0] = "exegpt"
runpy.run_module("exegpt", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Case:
    """A model and the most that its steps compute."""

    layers: int
    hidden: int
    vocab: int
    sequences: int
    prompts: int = 1
    prompt: int = 64


CASES = (
    Case(2, 256, 1_000, 4),
    Case(8, 1024, 1_000, 4),
    Case(8, 1024, 1_000, 4, prompts=4, prompt=1024),
    Case(2, 256, 64_000, 4),
    Case(2, 256, 64_000, 256),
)


def measured(case: Case) -> tuple[float, float, float]:
    """The peak and the final resident set of a run, and what of it is predicted for weights, cache and activations."""
    with tempfile.TemporaryDirectory() as name:
        model, schedule, requests = (Path(name) / part for part in ("model", "schedule.json", "requests.jsonl"))
        heads, kv_heads = case.hidden // 64, case.hidden // 128
        sizes = ModelSizes(case.layers, case.hidden, heads, 4 * case.hidden, case.vocab, 4096, kv_heads=kv_heads)
        sizes.create(model, seed=0)
        setting = find_setting(str(model), "local", f"{case.prompt}/8", "roofline", dtype="fp32", device="cpu")
        blocks = case.sequences * -(-(case.prompt + 8) // 16)
        variables = {"max_num_seqs": case.sequences, "prefills_per_step": case.prompts}
        document.write(schedule, followed := engine_schedule(setting, "orca", 1, blocks, 16, **variables))
        rows = [
            {"id": str(i), "prompt_ids": [3 + (7 * i + j) % 200 for j in range(case.prompt)], "max_tokens": 8}
            for i in range(2 * case.sequences)
        ]
        requests.write_text("".join(json.dumps(row | {"ignore_eos": True}) + "\n" for row in rows))
        command = [sys.executable, "-c", _REPORT, "run", "--no-profile", "--threads", "1", "-m", str(model)]
        command += ["--schedule", str(schedule), "-r", str(requests), "--json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peak, final = next(line.split()[1:] for line in done.stderr.splitlines() if line.startswith("MEMORY"))
        replica = CostModel(setting.model, setting.cluster, setting.profile, "fp32").replica(followed.stages)
        (memory,) = replica.memory((case.prompts * case.prompt + case.sequences, 0))
        return 1024.0 * float(peak), 1024.0 * float(final), memory.weights + memory.workspace + blocks * memory.block


def main() -> None:
    """Measure and print."""
    for case in CASES:
        peak, final, predicted = measured(case)
        print(
            f"{case}: peak {peak / _MIB:,.0f} MiB, final {final / _MIB:,.0f} MiB, of which weights, cache and "
            f"activations {predicted / _MIB:,.0f}, the rest {(final - predicted) / _MIB:,.0f}"
        )


if __name__ == "__main__":
    main()
