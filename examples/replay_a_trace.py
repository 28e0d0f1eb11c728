"""Replay a trace under several limits of an engine, and print who waits how long.

python examples/replay_a_trace.py                 # ten minutes of bursts that it draws itself
python examples/replay_a_trace.py my-trace.jsonl  # lines with arrived_at, input_tokens, output_tokens
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import exegpt
from xcore.errors import InputError


def draw_bursts(path: Path, seconds: int = 600) -> None:
    """Write a trace of requests that arrive twice as often in every other minute."""
    rng, now = random.Random(0), 0.0
    with path.open("w", encoding="utf-8") as lines:
        while now < seconds:
            lengths = {"input_tokens": rng.randint(64, 2048), "output_tokens": rng.randint(16, 512)}
            lines.write(json.dumps({"arrived_at": now, **lengths}) + "\n")
            now += rng.expovariate(20.0 if int(now / 60) % 2 else 10.0)


def main() -> None:
    """Print the latencies of each limit."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "bursts.jsonl"
        if len(sys.argv) == 1:
            draw_bursts(trace)
        for most in (32, 64, 128):
            answer = exegpt.simulate("llama-3.1-8b", "1xH100-SXM", replay=str(trace), engine="vllm", max_num_seqs=most)
            ttft, latency = answer.facts["ttft"]["p99"], answer.facts["latency"]["p99"]
            print(f"{most} sequences: 99 % have the first token within {ttft:.2f} s, all within {latency:.1f} s")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        raise SystemExit(str(error)) from None
