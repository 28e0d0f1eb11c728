"""`exegpt model`: a directory with random weights, and a quantised copy of one."""

from dataclasses import dataclass
from pathlib import Path

from exegpt.options.option_record import argument, command, option, required
from exegpt.options.shared_options import SEED, JsonOption
from xcore.frozen_heap import imports

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""From transformers' names to exegpt's."""


@dataclass(frozen=True, kw_only=True)
class CreateOptions(JsonOption):
    """The sizes of the new model, and where it is written."""

    directory: Path = argument("The new model directory; it must not exist yet.")
    arch: str = option("llama", "The architecture by transformers' name, like llama, qwen3, gpt2 or t5.")
    layers: int = option(8, "Number of layers.", min=1)
    hidden: int = option(512, "Width of the hidden states.", min=1)
    heads: int = option(8, "Number of attention heads.", min=1)
    kv_heads: int | None = option(None, "Number of heads of keys and values. Default: that of --heads.", min=1)
    ffn: int | None = option(None, "Width of the feed-forward layers. Default: 4 × --hidden.", min=1)
    vocab: int = option(32000, "Size of the vocabulary.", min=1)
    context: int = option(1024, "Maximum number of tokens of prompt and output together.", min=1)
    dtype: str = option("float32", "The weights' dtype: float32, bfloat16 or float16.")
    seed: int = SEED
    shards: int = option(1, "Number of weight files.", min=1)


@command
def create(options: CreateOptions) -> None:
    """Create a model directory with random weights and a tokenizer with generated merges, readable by transformers.

    Example: exegpt model create tiny --layers 2 --hidden 64 --heads 4 --kv-heads 2 --ffn 128
    """
    from xcore.choices import check_choice
    from xcore.console import output
    from xcore.document import to_dict

    with imports():
        from xrunner.models.create import create_model
        from xrunner.models.families import FAMILIES

    check_choice(options.dtype, tuple(DTYPES), "--dtype")
    spec = create_model(
        options.directory,
        check_choice(options.arch, tuple(FAMILIES), "--arch"),
        *(options.layers, options.hidden, options.heads, options.kv_heads, options.ffn, options.vocab),
        *(options.context, DTYPES[options.dtype], options.seed, options.shards),
        merges=True,
    )
    if options.json:
        provenance = output.provenance(seed=options.seed)
        return output.emit({"directory": str(options.directory), "model": to_dict(spec), "provenance": provenance})
    sizes = f"{options.layers} layers, {spec.parameters:,} parameters, {options.dtype}"
    print(f"{options.directory}: {options.arch}, {sizes}")


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(JsonOption):
    """The model to quantise, and how."""

    directory: Path = argument("A model directory in the Hugging Face layout, with plain weights.")
    out: Path = required("The new model directory; it must not exist yet.")
    bits: int = required("Bits of a weight: 8 or 4.")
    group_size: int = option(128, "Number of inputs that share a scale: a multiple of 32, or -1 for all.")
    head: bool = option(False, "Quantise the output head too (GPTQ's lm_head).", "--head")


@command
def quantize(options: QuantizeOptions) -> None:
    """Write a copy of a model with weights of 8 or 4 bits, in GPTQ's layout, rounded to the nearest code.

    Rounding needs no data, and loses more accuracy than GPTQ's calibration does. The embedding stays as it is.

    Example: exegpt model quantize my-model --bits 4 --out my-model-int4
    """
    from xcore.console import output

    with imports():
        from xrunner.models.quantize import quantize_model
    with output.progress("quantising") as progress:
        how = options.bits, options.group_size, options.head
        written = quantize_model(options.directory, options.out, *how, progress)
    if options.json:
        facts = {"directory": str(options.out), "bits": options.bits, "group_size": options.group_size}
        facts["head"] = options.head
        counts = {"matrices": written.matrices, "original_bytes": written.original_bytes, "bytes": written.bytes}
        return output.emit({**facts, **counts, "rounding": "to nearest", "provenance": output.provenance()})
    share = written.bytes / written.original_bytes
    print(
        f"{options.out}: {written.matrices} matrices rounded to the nearest code of {options.bits} bits; "
        f"{written.bytes:,} bytes, {share:.0%} of the original's"
    )
