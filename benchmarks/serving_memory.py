"""Whether a server's memory stays flat: the resident set of each of its processes over many short requests.

Exit code 1 where one grows by over 2 % from the tenth part of the requests on.

    python -m benchmarks.serving_memory                      # 100,000 requests
    python -m benchmarks.serving_memory --requests 20000
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.model_sizes import ModelSizes
from benchmarks.servers import orca, running
from xcore import document

PARTS = 10
MOST = 0.02


def resident_mb(pid: int) -> dict[str, float]:
    """Of a server's processes."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = {}
    for name, process in (("frontend", str(pid)), *((f"engine {child}", child) for child in children)):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        found[name] = next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model, schedule = directory / "model", directory / "schedule.json"
        ModelSizes(1, 32, 2, 64, 300, 128, kv_heads=1).create(model, seed=0)
        document.write(schedule, orca(model, 32))
        with running(directory, model, schedule) as (url, pid):
            seen = []
            for part in range(PARTS):
                load = [sys.executable, "-m", "exegpt", "bench", "serve", "--url", url, "--rate", "inf", "--json"]
                load += ["--num", str(asked.requests // PARTS), "--max-concurrency", "64", "--workload", "8/4"]
                done = subprocess.run([*load, "--seed", str(part)], check=True, stdout=subprocess.PIPE)
                (run,) = json.loads(done.stdout)["runs"]
                if run["completed"] < run["requests"]:
                    raise SystemExit(f"{run['requests'] - run['completed']} requests failed: {run['errors']}.")
                seen.append(resident_mb(pid))
                shown = ", ".join(f"{process} {mb:.1f} MB" for process, mb in seen[-1].items())
                print(f"{(part + 1) * asked.requests // PARTS:7}: {shown}", flush=True)
    growth = {process: seen[-1][process] / mb - 1 for process, mb in seen[0].items()}
    print(", ".join(f"{process} {share:+.1%}" for process, share in growth.items()))
    sys.exit(any(share > MOST for share in growth.values()))


if __name__ == "__main__":
    main()
