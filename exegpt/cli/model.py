"""`exegpt model create`: a model directory with random weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from exegpt.options.groups import SEED, JsonOption
from exegpt.options.record import command

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""From transformers' names to exegpt's."""


@dataclass(frozen=True, kw_only=True)
class CreateOptions(JsonOption):
    """The sizes of the new model, and where it is written."""

    directory: Annotated[Path, typer.Argument(help="The new model directory; it must not exist yet.")]
    arch: Annotated[str, typer.Option(help="llama, mistral, qwen2, qwen3, gpt2, opt or t5")] = "llama"
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 8
    hidden: Annotated[int, typer.Option(min=1, help="Width of the hidden states.")] = 512
    heads: Annotated[int, typer.Option(min=1, help="Number of attention heads.")] = 8
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Number of heads of keys and values. Default: that of --heads.")
    ] = None
    ffn: Annotated[int | None, typer.Option(min=1, help="Width of the feed-forward layers. Default: 4 × --hidden.")] = (
        None
    )
    vocab: Annotated[int, typer.Option(min=1, help="Size of the vocabulary.")] = 32000
    context: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of prompt and output together.")] = 1024
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32"
    seed: SEED = 0
    shards: Annotated[int, typer.Option(min=1, help="Number of weight files.")] = 1


@command
def create(options: CreateOptions) -> None:
    """Create a model directory with random weights and a byte-level tokenizer, readable by transformers.

    Example: exegpt model create tiny --layers 2 --hidden 64 --heads 4 --kv-heads 2 --ffn 128
    """
    from xcore.choices import check_choice
    from xcore.console import output
    from xcore.document import to_dict
    from xrunner.models.create import create_model
    from xrunner.models.families import FAMILIES

    check_choice(options.dtype, tuple(DTYPES), "--dtype")
    spec = create_model(
        options.directory,
        check_choice(options.arch, tuple(FAMILIES), "--arch"),
        *(options.layers, options.hidden, options.heads, options.kv_heads, options.ffn, options.vocab),
        *(options.context, DTYPES[options.dtype], options.seed, options.shards),
    )
    if options.json:
        provenance = output.provenance(seed=options.seed)
        return output.emit({"directory": str(options.directory), "model": to_dict(spec), "provenance": provenance})
    sizes = f"{options.layers} layers, {spec.parameters:,} parameters, {options.dtype}"
    print(f"{options.directory}: {options.arch}, {sizes}")
