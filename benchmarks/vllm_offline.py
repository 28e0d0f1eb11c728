"""vLLM's offline engine on requests of token ids, once for each line of its input: a program of vLLM's environment that
`benchmarks.offline_peers` starts. Prints a line of JSON for each run.

    …/env/bin/python benchmarks/vllm_offline.py MODEL REQUESTS.json MAX_NUM_SEQS
"""

import json
import sys
import time


def main() -> None:
    """Load, say so, and run."""
    model, path, seqs = sys.argv[1:]
    from vllm import LLM, SamplingParams

    with open(path, encoding="utf-8") as file:
        requests = json.load(file)
    engine = LLM(model=model, dtype="float32", max_num_seqs=int(seqs), enable_prefix_caching=False, seed=0)
    prompts = [{"prompt_token_ids": request["prompt_ids"]} for request in requests]
    limits = [
        SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
        for request in requests
    ]

    def run(count: int) -> dict[str, object]:
        began = time.perf_counter()
        done = engine.generate(prompts[:count], limits[:count], use_tqdm=False)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "outputs": [list(one.outputs[0].token_ids) for one in done]}

    run(8)  # what compiles at a first run
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        print(json.dumps(run(len(prompts))), flush=True)


if __name__ == "__main__":
    main()
