"""OpenVINO GenAI's continuous batching on requests of token ids. The setting is its `max_num_seqs`.

Its environment: `pip install openvino-genai optimum-intel`. The model is exported beside the requests by the first run.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from lines import Work, answer, read_work, timed

_PRECISIONS = {"fp32": "f32", "bf16": "bf16", "int8": "u8"}
_BATCHED_TOKENS = 256
"""Its own default."""
_CACHE_GIB = 3


def _exported(work: Work) -> Path:
    """Return the model in OpenVINO's format, with weights in the dtype; OpenVINO has no bf16 files, so fp16 then."""
    target = Path(sys.argv[2]).with_name(f"openvino-{work.dtype}")
    if not target.is_dir():
        command = Path(sys.executable).with_name("optimum-cli")
        weights = "fp32" if work.dtype == "fp32" else "fp16"
        options = ["--task", "text-generation-with-past", "--weight-format", weights, "--model", work.model]
        making = target.with_name(f"{target.name}.part")
        shutil.rmtree(making, ignore_errors=True)
        subprocess.run([command, "export", "openvino", *options, making], check=True, stdout=subprocess.DEVNULL)
        making.rename(target)
    return target


def main() -> None:
    """Export, load and run."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    work = read_work()
    limits = genai.SchedulerConfig()
    limits.max_num_seqs, limits.max_num_batched_tokens = int(work.setting), _BATCHED_TOKENS
    limits.cache_size, limits.enable_prefix_caching, limits.dynamic_split_fuse = _CACHE_GIB, False, True
    properties = {
        "INFERENCE_PRECISION_HINT": _PRECISIONS[work.dtype],
        "KV_CACHE_PRECISION": _PRECISIONS[work.kv_dtype],
        "INFERENCE_NUM_THREADS": work.threads,
    }
    pipeline = genai.ContinuousBatchingPipeline(str(_exported(work)), limits, "CPU", properties)

    def run(prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        handles = []
        for number, (ids, tokens) in enumerate(zip(prompts, outputs, strict=True)):
            config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
            handles.append(pipeline.add_request(number, ov.Tensor(np.array([ids], dtype=np.int64)), config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    answer(work, timed(run))


if __name__ == "__main__":
    main()
