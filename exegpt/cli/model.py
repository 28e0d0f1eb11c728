"""`exegpt model create`: a model directory with random weights."""

from pathlib import Path
from typing import Annotated

import typer

from exegpt.cli import options

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""From transformers' names to exegpt's."""


def create(
    directory: Annotated[Path, typer.Argument(help="The new model directory; it must not exist yet.")],
    arch: Annotated[str, typer.Option(help="llama, mistral, qwen2, qwen3, gpt2, opt or t5")] = "llama",
    layers: Annotated[int, typer.Option(min=1)] = 8,
    hidden: Annotated[int, typer.Option(min=1)] = 512,
    heads: Annotated[int, typer.Option(min=1)] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Fewer than heads: grouped queries.")] = None,
    ffn: Annotated[
        int | None, typer.Option(min=1, help="Width of the feed-forward layers. Default: 4 × hidden.")
    ] = None,
    vocab: Annotated[int, typer.Option(min=1)] = 32000,
    context: Annotated[int, typer.Option(min=1, help="Maximum tokens of prompt and output together.")] = 1024,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    seed: options.SEED = 0,
    shards: Annotated[int, typer.Option(min=1, help="Number of weight files.")] = 1,
    json: options.JSON = False,
) -> None:
    """Create a model directory with random weights and a byte-level tokenizer, readable by transformers.

    Example: exegpt model create tiny --layers 2 --hidden 64 --heads 4 --kv-heads 2 --ffn 128
    """
    from xcore.choices import check_choice
    from xcore.console import output
    from xcore.document import to_dict
    from xrunner.models.create import create_model
    from xrunner.models.families import FAMILIES

    check_choice(dtype, tuple(DTYPES), "--dtype")
    check_choice(arch, tuple(FAMILIES), "--arch")
    spec = create_model(
        directory,
        arch,  # type: ignore[arg-type]  # one of FAMILIES, checked above
        *(layers, hidden, heads, kv_heads, ffn, vocab, context, DTYPES[dtype], seed, shards),
    )
    if json:
        return output.emit(
            {"directory": str(directory), "model": to_dict(spec), "provenance": output.provenance(seed=seed)}
        )
    print(f"{directory}: {arch}, {layers} layers, {spec.parameters:,} parameters, {dtype}")
