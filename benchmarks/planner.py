"""How long an answer takes, beside aiconfigurator's command line on the same question, process start included.

Llama-3.1-8B on eight H200, 2048 tokens in and 256 out, time to first token within 1 s and per token within 20 ms. The
peer is installed apart (`pip install aiconfigurator==0.12.0`), since it pins other packages:

    python -m benchmarks.planner --peer OTHER_ENVIRONMENT/bin/aiconfigurator
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

MODEL, CLUSTER, LENGTHS = "llama-3.1-8b", "8xH200-SXM", "2048/256"
OURS = [sys.executable, "-m", "exegpt", "tune", "--latency-bound", "inf", "--ttft", "1s", "--tpot", "20ms"]
OURS += ["--model", MODEL, "--cluster", CLUSTER, "--workload", LENGTHS, "--dtype", "bf16", "--json", "--no-advice"]
PEER = "cli default --model meta-llama/Meta-Llama-3.1-8B --total-gpus 8 --system h200_sxm --backend vllm".split()
PEER += "--isl 2048 --osl 256 --ttft 1000 --tpot 20 --top-n 3".split()


def timed(command: Sequence[str]) -> tuple[float, str]:
    """Wall seconds of a command, and what it printed; SystemExit where it fails."""
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"'{' '.join(command)}' failed with {done.returncode}: {done.stderr[-500:]}")
    return seconds, done.stdout


def main() -> None:
    """Run both in turn and print the ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", type=Path, help="the peer's command; default: the one on the path")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    peer = str(args.peer) if args.peer else shutil.which("aiconfigurator")
    if peer is None or not Path(peer).is_file():
        raise SystemExit("There is no aiconfigurator: install it apart and name its command with --peer.")
    timed(OURS)  # compiled code is kept from here on
    ours, theirs, answer = [], [], ""
    for _ in range(args.repeats):
        seconds, answer = timed(OURS)
        ours.append(seconds)
        with tempfile.TemporaryDirectory() as directory:
            theirs.append(timed([peer, *PEER, "--save-dir", directory])[0])
    answer_json = json.loads(answer)
    search = answer_json["search"]
    print(f"exegpt tune     {statistics.median(ours):6.2f} s  {search['evaluations']} of {search['space']} schedules")
    print(f"aiconfigurator  {statistics.median(theirs):6.2f} s")
    print(f"ratio           {statistics.median(theirs) / statistics.median(ours):6.2f}")
    print(
        f"ours: {answer_json['schedule']['policy']}, {answer_json['estimate']['throughput_tok_s']:.0f} output tokens/s"
    )


if __name__ == "__main__":
    main()
