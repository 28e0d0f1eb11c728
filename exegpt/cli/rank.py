"""`exegpt rank`: train and evaluate the learned order's ranker."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exegpt.cli import options

if TYPE_CHECKING:
    from exegpt.api.ranking.evaluation import RankingEvaluation

_DATA = Annotated[
    Path, typer.Argument(help="A JSONL file with prompt, output_tokens and optionally kind on each line.")
]


def train(
    data: _DATA,
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the ranker to this file (NumPy's format).")],
    epochs: Annotated[int | None, typer.Option(min=1, max=1000, help="Passes over the prompts. Default: 16.")] = None,
    seed: options.SEED = 0,
    threads: options.THREADS = None,
    json: options.JSON = False,
) -> None:
    """Train a ranker by ListMLE on 70 % of the prompts, and evaluate it on the validation part of 15 %.

    Example: exegpt rank train prompts.jsonl --out ranker.npz
    """
    import time
    from dataclasses import asdict, replace

    from exegpt.api.ranking.evaluation import evaluate
    from exegpt.api.ranking.examples import arrays, of_part, read_examples
    from exegpt.api.ranking.training import Recipe, train_ranker
    from xcore.console import output
    from xcore.duration import duration_text
    from xcore.files import check_distinct, check_output
    from xrunner.threads import set_threads

    check_output(out)
    check_distinct((out,), (data,))
    set_threads(threads)
    examples, recipe = read_examples(data), Recipe(seed=seed % 2**63)
    recipe = replace(recipe, epochs=epochs) if epochs else recipe
    train_part, validation = of_part(examples, "train"), of_part(examples, "validation")
    start = time.perf_counter()
    ranker = train_ranker(*arrays(train_part), recipe)
    seconds = time.perf_counter() - start
    ranker.save(out)
    evaluation = evaluate({"ranker": ranker}, train_part, validation)
    if json:
        facts = {"seconds": seconds, "trained_on": len(train_part), "recipe": asdict(recipe)}
        return output.emit({**facts, "validation": asdict(evaluation), "provenance": output.provenance(seed=seed)})
    _print(evaluation, "validation part")
    print(f"Trained on {len(train_part):,} prompts in {duration_text(seconds)}; written to {out}.")


def evaluate(
    data: _DATA,
    ranker: Annotated[Path, typer.Option("--ranker", "-r", help="A ranker file, written by `exegpt rank train`.")],
    part: Annotated[
        str, typer.Option(help="test: the 15 % that training never uses; validation; or all, for prompts never used.")
    ] = "test",
    classifier: Annotated[
        bool, typer.Option(help="For comparison, train a classifier of ten length buckets on the same features.")
    ] = True,
    seed: options.SEED = 0,
    threads: options.THREADS = None,
    json: options.JSON = False,
) -> None:
    """Print Kendall's tau between scores and output lengths.

    For comparison, it also prints that of a classifier, of the prompt's length and kind, and of the true length.

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

    check_choice(part, ("test", "validation", "all"), "--part")
    set_threads(threads)
    rankers, examples = {"ranker": Ranker.load(ranker)}, read_examples(data)
    train_part = of_part(examples, "train")
    if classifier:
        rankers["classifier"] = train_classifier(*arrays(train_part), Recipe(seed=seed))
    chosen = examples if part == "all" else [example for example in examples if example.part == part]
    evaluation = evaluated(rankers, train_part, chosen)
    if json:
        return output.emit({"part": part, **asdict(evaluation), "provenance": output.provenance(seed=seed)})
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
