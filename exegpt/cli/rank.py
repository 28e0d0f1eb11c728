"""`exegpt rank`: train and evaluate the learned order's ranker."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exegpt.options.option_record import argument, command, option, required
from exegpt.options.shared_options import SEED, THREADS, JsonOption

if TYPE_CHECKING:
    from exegpt.api.ranking.evaluation import RankingEvaluation


@dataclass(frozen=True, kw_only=True)
class RankOptions(JsonOption):
    """The prompts with their output lengths."""

    data: Path = argument("A JSONL file with prompt, output_tokens and optionally kind on each line.")
    seed: int = SEED
    threads: int | None = THREADS


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RankOptions):
    """How a ranker is trained, and where it is written."""

    out: Path = required("Write the ranker to this file (NumPy's format).", "-o")
    epochs: int | None = option(None, "Number of passes over the prompts. Default: 16.", min=1, max=1000)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(RankOptions):
    """The ranker, and what it is compared with."""

    ranker: Path = required("A ranker file, written by `exegpt rank train`.", "-r")
    part: str = option(
        "test",
        "The part of the prompts: test (15%, never used in training), validation, or all (for prompts that "
        "the ranker was not trained on).",
    )
    classifier: bool = option(
        True,
        "For comparison, train a classifier of ten length buckets on the same features.",
        "--classifier/--no-classifier",
    )


@command
def train(options: TrainOptions) -> None:
    """Train a ranker by ListMLE on 70 % of the prompts, and evaluate it on the validation part of 15 %.

    Example: exegpt rank train prompts.jsonl --out ranker.npz
    """
    import time
    from dataclasses import asdict, replace

    import numpy as np

    from exegpt.api.ranking.evaluation import evaluate
    from exegpt.api.ranking.examples import arrays, of_part, read_examples
    from exegpt.api.ranking.training import Recipe, train_ranker
    from xcore.console import output
    from xcore.duration import duration_text
    from xcore.files import check_distinct, check_output
    from xrunner.threads import set_threads

    check_output(options.out)
    check_distinct((options.out,), (options.data,))
    set_threads(options.threads)
    examples, recipe = read_examples(options.data), Recipe(seed=options.seed % 2**63)
    recipe = replace(recipe, epochs=options.epochs) if options.epochs else recipe
    train_part, validation = of_part(examples, "train"), of_part(examples, "validation")
    start = time.perf_counter()
    ranker = train_ranker(*arrays(train_part), recipe)
    seconds = time.perf_counter() - start
    # Scores of trained prompts are spread wider than those of prompts that will come.
    reference = ranker.scores([example.prompt for example in validation]).astype(np.float32)
    ranker = replace(ranker, reference=reference)
    ranker.save(options.out)
    evaluation = evaluate({"ranker": ranker}, train_part, validation)
    if options.json:
        facts = {"seconds": seconds, "trained_on": len(train_part), "recipe": asdict(recipe)}
        return output.emit(
            {**facts, "validation": asdict(evaluation), "provenance": output.provenance(seed=options.seed)}
        )
    _print(evaluation, "validation part")
    print(f"Trained on {len(train_part):,} prompts in {duration_text(seconds)}; written to {options.out}.")


@command
def evaluate(options: EvaluateOptions) -> None:
    """Print Kendall's tau between a ranker's scores and the output lengths.

    For comparison, also print the tau of a classifier, of the prompt's length and kind, and of the true length.

    Example: exegpt rank evaluate prompts.jsonl --ranker ranker.npz
    """
    from dataclasses import asdict

    from exegpt.api.ranking.evaluation import evaluate as evaluated
    from exegpt.api.ranking.examples import arrays, of_part, read_examples
    from exegpt.api.ranking.training import Recipe, train_classifier
    from xcore.choices import check_choice
    from xcore.console import output
    from xcore.orders.ranker import Ranker
    from xrunner.threads import set_threads

    part = options.part
    check_choice(part, ("test", "validation", "all"), "--part")
    set_threads(options.threads)
    rankers, examples = {"ranker": Ranker.load(options.ranker)}, read_examples(options.data)
    train_part = of_part(examples, "train")
    if options.classifier:
        rankers["classifier"] = train_classifier(*arrays(train_part), Recipe(seed=options.seed))
    chosen = examples if part == "all" else [example for example in examples if example.part == part]
    evaluation = evaluated(rankers, train_part, chosen)
    if options.json:
        return output.emit({"part": part, **asdict(evaluation), "provenance": output.provenance(seed=options.seed)})
    _print(evaluation, f"{part} part" if part != "all" else "all prompts")


def _print(evaluation: "RankingEvaluation", title: str) -> None:
    from xcore.console import output

    kinds = list(evaluation.kinds)
    columns = ("Kendall's tau", "all", *(f"{kind} ({evaluation.kinds[kind]:,})" for kind in kinds))
    columns = (*columns, "between kinds") if kinds else columns
    rows = []
    for row in evaluation.rows:
        cells = [row.name, f"{row.tau:.3f}", *(f"{row.within[kind]:.3f}" for kind in kinds)]
        rows.append((*cells, f"{row.across:.3f}") if row.across is not None else tuple(cells))
    output.table(columns, rows, f"{evaluation.prompts:,} prompts, {title}")
