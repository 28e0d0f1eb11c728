"""How long thirty questions take that users ask today: CPU and wall seconds of each command, process start included.

Each command runs in a process of its own, on two cores at most. The goal is 10 s of wall time on two cores with nothing
else running, and 20 s for questions of 64 GPUs; on a shared machine CPU seconds count.

    python -m benchmarks.question_times
    python -m benchmarks.question_times --only 3,17
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

GOAL_S, GOAL_OF_64_S = 10.0, 20.0
CORES = 2
FILES = {
    "prices.yaml": "H100-SXM: 2.9\nH200-SXM: 3.7\nA100-80GB: 1.6\nL40S: 0.9\nMI300X: 3.2\n",
    "day.csv": "hour,rate\n" + "".join(f"{hour},{2 + 3 * (8 <= hour < 20)}\n" for hour in range(24)),
}
"""Files that the questions name."""
SMALL, MIDDLE, LARGE = "-m llama-3.1-8b", "-m qwen3-32b --dtype fp8", "-m llama-3.1-70b --dtype fp8"
MIXTURE, SPARSE = "-m gpt-oss-120b", "-m qwen3-30b-a3b"
QUESTIONS = (
    f"{SMALL} -c 1xH100-SXM -w 4096/256 --ttft 1s --prefix-hit 0.6",
    f"{LARGE} -c 4xH100-SXM -w 4096/256 --ttft 2s --tpot 50ms --prefix-hit 0.5",
    f"{SPARSE} -c 2xH100-SXM -w 2048/256 -l 10s --prefix-hit 0.3",
    f"{SMALL} -c 1xH100-SXM -w 2048/256 --ttft 1s --rate 5/s --prefix-hit 0.6",
    f"{SMALL} -c 1xH100-SXM -w 200/100 --agents 200 --turns 8 --tool-time 2s --ttft 10s",
    f"{MIDDLE} -c 2xH100-SXM -w 500/200 --agents 64 --turns 5 --tool-time 1s --tpot 30ms",
    f"{LARGE} -c 8xH100-SXM -w 500/100 --agents 100 --turns 6 --tool-time 3s --ttft 3s",
    f"{SMALL} -c 1xH100-SXM -w 1024/256 --tpot 10ms --draft-acceptance 0.7",
    f"{LARGE} -c 4xH100-SXM -w 1024/512 -l 20s --draft-acceptance 0.8,0.6,0.5",
    f"{LARGE} -c 8xH100-SXM -w 1024/512 --tpot 20ms --draft-acceptance 0.7 --num-speculative-tokens 3",
    f"{SMALL} -c 4xH100-SXM -w 4096/256 --ttft 1s --tpot 20ms --rate 10/s --disaggregated",
    f"{LARGE} -c 8xH100-SXM -w 4096/512 --ttft 2s --tpot 40ms --rate 3/s --disaggregated",
    f"{SPARSE} -c 4xH100-SXM -w 2048/256 --ttft 1s --tpot 20ms --rate 10/s --disaggregated",
    f"{SMALL} -w 1024/256 --devices any --ttft 1s --tpot 50ms --rate 50/s",
    f"{LARGE} -w 2048/256 --devices any --ttft 2s --tpot 80ms --rate 10/s --top 5",
    f"{SMALL} -w 1024/512 --devices any -l 10s --rate 20/s --price prices.yaml",
    f"{SPARSE} -w 1024/256 --devices H100-SXM,H200-SXM -l 10s --rate 20/s --top 3",
    f"{MIDDLE} -w 1024/256 --devices any -l 10s --load-curve day.csv --price prices.yaml",
    f"{SMALL} -c 2xL40S,1xH100-SXM,1xA100-80GB -w 1024/256 -l 8s --rate 4/s --price prices.yaml",
    f"{SMALL} -c 1xH100-SXM -w 1024/256 -l 4s,8s,16s",
    f"{SMALL} -c 2xH100-SXM -w 2048/256 -l 4s,8s --rate 5/s,10/s",
    f"{LARGE} -c 4xH100-SXM -w C1 --ttft 2s --percentile 95",
    f"{SMALL} -c 4xA100-80GB -w S -l 5s --admission auto",
    f"{MIXTURE} -c 8xH100-SXM -w 1024/256 --ttft 2s --tpot 30ms",
    f"{MIXTURE} -c 8xH100-SXM -w 1024/256 --ttft 2s --tpot 30ms --rate 20/s --policy rra",
    "-m mixtral-8x7b -c 8xA100-80GB -w 1024/256 -l 10s --rate 10/s --policy rra",
    f"{MIXTURE} -c 8xH100-SXM -w 1024/256 --ttft 1s --export sglang --export-as kubernetes",
    f"{LARGE} -c 8x8xH100-SXM -w 2048/256 -l 30s",
    "-m qwen3-235b-a22b -c 8x8xH200-SXM -w 2048/512 -l 60s --tpot 60ms",
    "-m glm-4.5 -c 8x8xH100-SXM -w 4096/512 -l 5s",
)
"""Options of `exegpt tune`; the last three are of 64 GPUs."""
FIRST_OF_64 = 28


def seconds_of(arguments: Sequence[str], where: str) -> tuple[float, float, int]:
    """Run `exegpt tune` in a folder; return its wall seconds, its CPU seconds and its exit code."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "exegpt", "tune", *arguments]
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, timeout=600)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.returncode


def main() -> None:
    """Print the seconds of every question, and the questions beyond the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="numbers of questions")
    only = parser.parse_args().only
    numbers = [int(n) for n in only.split(",")] if only else range(1, len(QUESTIONS) + 1)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    beyond = []
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILES.items():
            (Path(folder) / name).write_text(text)
        for number in numbers:
            arguments = QUESTIONS[number - 1].split()
            wall, cpu, code = seconds_of(arguments, folder)
            beyond += [number] if cpu > (GOAL_S if number < FIRST_OF_64 else GOAL_OF_64_S) else []
            print(f"{number:2} {wall:6.1f} s, {cpu:6.1f} CPU s, exit {code}  {' '.join(arguments)}", flush=True)
    print(f"{len(beyond)} of {len(numbers)} exceed their goal: {', '.join(map(str, beyond)) or 'none'}")


if __name__ == "__main__":
    main()
