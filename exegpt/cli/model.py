"""`exegpt model create`: a model directory with random weights."""

from pathlib import Path
from typing import Annotated

import typer

from exegpt.cli import options


def create(
    directory: Annotated[Path, typer.Argument(help="Where to: a folder that doesn't exist yet.")],
    arch: Annotated[str, typer.Option(help="llama or gpt2")] = "llama",
    layers: Annotated[int, typer.Option(min=1)] = 8,
    hidden: Annotated[int, typer.Option(min=1)] = 512,
    heads: Annotated[int, typer.Option(min=1)] = 8,
    kv_heads: Annotated[int, typer.Option(min=1, help="Fewer than heads: grouped queries.")] = 4,
    ffn: Annotated[int, typer.Option(min=1, help="Width of the feed-forward layer.")] = 1408,
    vocab: Annotated[int, typer.Option(min=1)] = 32000,
    context: Annotated[int, typer.Option(min=1, help="Most tokens of prompt and output together.")] = 1024,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    seed: options.SEED = 0,
    shards: Annotated[int, typer.Option(min=1, help="Number of weight files.")] = 1,
    json: options.JSON = False,
) -> None:
    """Make a model directory with random weights and a byte-level tokenizer, readable by transformers.

    Example: exegpt model create tiny --layers 2 --hidden 64 --heads 4 --kv-heads 2 --ffn 128
    """
    from exegpt.cli import output
    from exegpt.document import to_dict
    from exegpt.model import ModelSpec
    from exegpt.models.create import create_model

    create_model(directory, arch, layers, hidden, heads, kv_heads, ffn, vocab, context, dtype, seed, shards)
    spec = ModelSpec.from_directory(directory)
    if json:
        return output.emit(
            {"directory": str(directory), "model": to_dict(spec), "provenance": output.provenance(seed=seed)}
        )
    print(f"{directory}: {arch}, {layers} layers, {spec.parameters:,} parameters, {dtype}")
