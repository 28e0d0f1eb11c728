"""Compare the ways to share two GPUs between two models.

python examples/plan_from_python.py
"""

import tempfile
from pathlib import Path

import exegpt
from xcore.errors import InputError

MODELS = """
models:
  - {name: chat, model: llama-3.1-8b, workload: 1024/256, rate: 4/s, latency_bound: 10s}
  - {name: code, model: opt-13b, workload: S, rate: 1/s, latency_bound: 20s}
"""


def main() -> None:
    """Print each method's devices and schedules."""
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models.yaml"
        models.write_text(MODELS, encoding="utf-8")
        for method in ("muxserve", "seallm"):
            try:
                answer = exegpt.plan(models, "2xA100-80GB", method=method)
            except InputError as error:
                raise SystemExit(str(error)) from None
            print(f"{method}: {answer.why_not or 'sustains all rates'}")
            for model in answer.plan.models if answer.plan else ():
                schedule = model.schedule
                print(f"  {model.name}: devices {model.devices}, {schedule.policy}, {schedule.kv_blocks} KV blocks")


if __name__ == "__main__":
    main()
