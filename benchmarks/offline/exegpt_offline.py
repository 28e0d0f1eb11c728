"""Our engine on requests of token ids. The setting is a schedule's file."""

from pathlib import Path

from lines import answer, read_work


def main() -> None:
    """Load and run."""
    import torch

    from xcore import document
    from xcore.requests.request import Request
    from xcore.specs.schedule import Schedule
    from xrunner.core.engine import Engine
    from xrunner.models import load_model

    work = read_work()
    torch.set_num_threads(work.threads)
    model = load_model(work.model, work.dtype, kv_dtype=work.kv_dtype)
    schedule = document.read(Schedule, Path(work.setting))

    def run(prompts: list[list[int]], outputs: list[int]) -> tuple[float, list[tuple[int, ...]]]:
        pairs = enumerate(zip(prompts, outputs, strict=True))
        requests = [Request(str(number), tuple(ids), tokens, ignore_eos=True) for number, (ids, tokens) in pairs]
        report = Engine(model, schedule).run(requests)  # whose seconds begin when the engine has warmed up
        by_id = {result.id: result.output_ids for result in report.results}
        return report.seconds, [by_id[request.id] for request in requests]

    answer(work, run)


if __name__ == "__main__":
    main()
