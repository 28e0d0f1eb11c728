"""transformers' continuous batching on requests of token ids. The setting is how many it runs at a time.

Its environment is ours.
"""

from pathlib import Path

from lines import answer, read_work, timed


def main() -> None:
    """Load and run."""
    import torch

    from exegpt.api import peers
    from xcore.requests.request import Request

    work = read_work()
    torch.set_num_threads(work.threads)
    model = peers.load(Path(work.model), work.dtype)

    def run(prompts: list[list[int]], outputs: list[int]) -> tuple[list[int], ...]:
        pairs = enumerate(zip(prompts, outputs, strict=True))
        requests = [Request(str(number), tuple(ids), tokens, ignore_eos=True) for number, (ids, tokens) in pairs]
        return peers.continuous(model, requests, int(work.setting)).outputs

    answer(work, timed(run))


if __name__ == "__main__":
    main()
