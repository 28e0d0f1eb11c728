"""Model directories with random weights, in the Hugging Face layout: config, safetensors, a byte-level tokenizer."""

import os
import shutil
import tempfile
from pathlib import Path

from xcore.document import dumps
from xcore.errors import InputError
from xcore.specs.model import BYTES, ModelSpec
from xrunner.models.families import FAMILIES
from xrunner.models.generated_merges import generated_merges
from xrunner.models.weights import RandomWeights, torch_dtype, weight_bits

_BYTES = 256
_END = "<|endoftext|>"
"""The token that ends a text; its id follows the bytes'."""
_CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- message['role'] + ': ' + message['content'] + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'assistant: ' }}
{%- endif %}
"""
"""One line per message; random weights need no more."""


def create_model(
    directory: str | Path,
    arch: str = "llama",
    layers: int = 8,
    hidden: int = 512,
    heads: int = 8,
    kv_heads: int | None = None,
    ffn: int | None = None,
    vocab: int = 32000,
    context: int = 1024,
    dtype: str = "fp32",
    seed: int = 0,
    shards: int = 1,
    merges: bool = False,
) -> ModelSpec:
    """Write a model that transformers' AutoModelForCausalLM and AutoTokenizer read, and return its spec.

    `kv_heads` is `heads` and `ffn` four times `hidden` if None. The directory is written completely or not at all. With
    `merges`, every id of the vocabulary has a text; otherwise only the bytes and the end of a text have ids.

    Raises:
        InputError: The directory exists already, or sizes don't fit together.
    """
    target = Path(directory)
    if target.exists():
        raise InputError(f"'{target}' exists already: choose another directory or remove it.")
    if vocab <= _BYTES:
        raise InputError(f"A vocabulary of {vocab} is too small: 256 bytes and an end of text need at least 257.")
    if not 1 <= shards <= layers:
        raise InputError(f"{layers} layers can't be split into {shards} shards: choose 1 to {layers}.")
    config = _config(arch, layers, hidden, heads, kv_heads or heads, ffn or 4 * hidden, vocab, context)
    if weight_bits(dtype):
        raise InputError(
            f"A model can't be created in {dtype}: create it in float32, then run `exegpt model quantize`."
        )
    config["dtype"] = str(torch_dtype(dtype)).removeprefix("torch.")
    if hidden % (2 * heads):
        raise InputError(f"A hidden size of {hidden} can't be split evenly over {heads} heads of an even size.")
    spec = ModelSpec.from_config(config, target.resolve().name)
    weights = RandomWeights(torch_dtype(dtype), seed)
    target.parent.mkdir(parents=True, exist_ok=True)
    needed, free = spec.parameters * BYTES[dtype], shutil.disk_usage(target.parent).free
    if needed > free:
        raise InputError(
            f"The weights of '{target}' need {needed:,} bytes, and {free:,} are free there: choose smaller sizes or "
            "another folder."
        )
    making = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        os.chmod(making, 0o755)
        (making / "config.json").write_text(dumps(config) + "\n", encoding="utf-8")
        _write_weights(making, spec, weights, shards)
        _write_tokenizer(making, context, vocab - _BYTES - 1 if merges else 0)
        os.replace(making, target)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    return spec


def _config(
    arch: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, context: int
) -> dict[str, object]:
    if min(layers, hidden, heads, kv_heads, ffn, context) < 1:
        raise InputError("Layers, hidden, heads, KV heads, FFN and context must all be at least 1.")
    if arch not in FAMILIES:
        raise InputError(f"The architecture '{arch}' can't be created: choose one of {', '.join(FAMILIES)}.")
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_size": hidden // heads}
    sizes |= {"ffn": ffn, "vocab": vocab, "context": context}
    config = FAMILIES[arch].new_config(arch, sizes, _BYTES)
    if kv_heads != heads and "num_key_value_heads" not in config:
        raise InputError(f"{arch} has as many KV heads as heads: {kv_heads} KV heads don't fit {heads} heads.")
    return {"model_type": arch, "bos_token_id": _BYTES, "eos_token_id": _BYTES, **config}


def _write_weights(directory: Path, spec: ModelSpec, weights: RandomWeights, shards: int) -> None:
    """Write one file, or `shards` files of neighbouring layers with an index.

    The last file also has the tensors outside the layers.
    """
    from safetensors.torch import save_file

    family = FAMILIES[spec.architecture]
    where: dict[str, str] = {}
    for shard in range(shards):
        most = max(spec.layers, spec.encoder_layers)
        layers = range(shard * most // shards, (shard + 1) * most // shards)
        shapes = {name: shape for layer in layers for name, shape in family.layer_shapes(spec, layer).items()}
        if shard == shards - 1:
            shapes |= family.outer_shapes(spec)
        tensors = {name: weights.get(name, shape) for name, shape in shapes.items()}
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        shutil.copymode(directory / "config.json", directory / file)  # the library's files are their owner's alone
        where |= dict.fromkeys(tensors, file)
    if shards > 1:
        index = {"metadata": {"total_size": spec.parameters * weights.dtype.itemsize}, "weight_map": where}
        (directory / "model.safetensors.index.json").write_text(dumps(index) + "\n", encoding="utf-8")


def _write_tokenizer(directory: Path, context: int, merges: int) -> None:
    """Write a byte-level tokenizer with this many merges, and a chat template. The merges' ids begin at 257."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pairs = generated_merges(merges)
    texts = [*sorted(pre_tokenizers.ByteLevel.alphabet()), _END, *(left + right for left, right in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(merges))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END, special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _END,
        "eos_token": _END,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(dumps(settings) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")
