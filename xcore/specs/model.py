"""ModelSpec: the sizes of a transformer, and the parameters, FLOPs and bytes that follow from them, but no times."""

import functools
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xcore.errors import InputError
from xcore.spec import Spec
from xcore.specs.experts import Experts
from xcore.specs.latent_attention import LatentAttention
from xcore.specs.quantization import checkpoint_format, directory_format, has_head, stored_format
from xcore.specs.windows import Windows, seen_within

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

BYTES: dict[str, float] = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int8": 1.001,
    "int4": 0.5195,
    "mxfp4": 0.53125,
    "nvfp4": 0.5625,
    "w8a16": 1.03125,
    "w8a32": 1.03125,
    "w4a32": 0.53125,
}
"""Bytes of one weight of each dtype, with its scales.

A scale stands for a row of a matrix in int8, for 128 weights in int4 (AWQ, GPTQ) and after `w`, for 32 in mxfp4 and 16
in nvfp4. `w8a16` is weights of 8 bits and activations of 16, `int4` of 4 and 16; those with `a32` compute in float32.
"""
ARITHMETIC: dict[str, str] = {"int4": "", "mxfp4": "fp4", "nvfp4": "fp4", "w8a16": "", "w8a32": "fp32", "w4a32": "fp32"}
"""Dtype of weights → the rate of a device that computes with them; missing: the rate of the same name; "": none."""
WEIGHT_BITS = {"int4": 4, "w4a32": 4, "w8a16": 8, "w8a32": 8}
"""Bits of weights that a CPU multiplies as they are stored, by dtype; other dtypes are plain floats there."""
KV_DTYPES = ("fp32", "bf16", "fp16", "fp8", "int8")
"""Dtypes of keys and values. Those of 8 bits in int8 have scales, and run on CPUs only: see `head_kv_bytes`."""
KV_SCALE_BYTES = 4
"""Bytes of the scale that each head's key, and each head's value, of a token has in int8."""
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Dtypes by their names in a `config.json`."""


def activation_bytes(dtype: str) -> int:
    """Return the bytes of one value between layers, on links, in the embedding and in the output head.

    `dtype` is that of the layers. The other values stay in 16 bits if the layers' weights have 8.
    """
    return 4 if usual_kv_dtype(dtype) == "fp32" else 2


def usual_kv_dtype(dtype: str) -> str:
    """Return the default dtype of keys and values, that of activations: as in vLLM, never less than 16 bits."""
    if ARITHMETIC.get(dtype) == "fp32":
        return "fp32"
    return "bf16" if BYTES[dtype] < 2 else dtype


def weights_dtype(checkpoint: str | None, computed: str) -> str:
    """Return the dtype of a run in `computed` of a checkpoint whose own dtype is `checkpoint`.

    Quantised weights stay as they are: `w4a32` for 4 bits in fp32.
    """
    in_float32 = {"int4": "w4a32", "w8a16": "w8a32"}
    if checkpoint not in in_float32 or computed not in ("fp32", "bf16"):
        return computed
    return in_float32[checkpoint] if computed == "fp32" else checkpoint


MAX_SIZE = 2**31 - 1
_BLOCK = 128
MAX_LAYERS = 10_000
"""Most layers of a model; more are probably a mistake."""


@dataclass(frozen=True)
class ModelSpec(Spec):
    """Sizes of one transformer. A decoder-only model has `encoder_layers` 0.

    Layers of a model may differ. Figures of "one layer" are then the mean over the layers.
    """

    name: str
    architecture: str
    """The architecture's name, usually `model_type` of its config.json."""
    layers: int
    """Decoder layers."""
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    """Width of the feed-forward layer."""
    gated: bool
    """Whether the feed-forward layer has a gate (three matrices instead of two)."""
    vocab: int
    context: int
    """Positions of the checkpoint. `longest_request` limits requests."""
    encoder_layers: int = 0
    tied_embeddings: bool = False
    window: int | None = None
    """Number of tokens that a token sees, itself and earlier ones, if every layer has this window; None: all."""
    dtype: str | None = None
    """The checkpoint's own dtype; None: unknown. It is no size: models that differ only in it have one fingerprint."""
    sorts_logits: bool | None = None
    """Whether the checkpoint's `generation_config.json` has top-p or top-k; None: unknown. It is no size either.

    Engines then sort logits unless a request asks for other sampling.
    """
    head_dtype: str | None = None
    """The dtype of a quantised output head; None: it has that of activations. It is no size either."""
    experts: Experts | None = None
    """The experts of a mixture of experts; None: a dense model."""
    latent: LatentAttention | None = None
    """Latent attention; None: every head, or group of heads, has its own keys and values."""
    windows: Windows | None = None
    """The window of some layers; None: all layers see the same."""

    def __post_init__(self) -> None:
        for field in ("hidden", "heads", "kv_heads", "head_size", "ffn", "vocab", "context"):
            checked_size(getattr(self, field), f"Model '{self.name}' has {field}")
        checked_size(self.layers, f"Model '{self.name}' has layers", MAX_LAYERS)
        if self.encoder_layers != 0:
            checked_size(self.encoder_layers, f"Model '{self.name}' has encoder_layers", MAX_LAYERS)
        if self.window is not None:
            checked_size(self.window, f"Model '{self.name}' has window")
        if self.heads % self.kv_heads:
            raise InputError(
                f"Model '{self.name}' has {self.heads} heads, which {self.kv_heads} KV heads do not divide: correct "
                "one of them."
            )

    @property
    def beyond_dense(self) -> tuple[str, ...]:
        """Return what the model has beyond dense layers that are all alike, as text."""
        experts, latent, windows = self.experts, self.latent, self.windows
        texts = [f"{experts.count} experts, {experts.per_token} per token"] if experts else []
        texts += [f"attention data parallelism over {self.attention_dp}"] if self.attention_dp > 1 else []
        texts += ["latent attention" + (" over an index" if latent.index else "")] if latent else []
        texts += [f"a window of {windows.size:,} tokens in {windows.layers} of {self.layers} layers"] if windows else []
        return tuple(texts)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return sixteen hex digits of the sizes; two models that differ only in their names have the same."""
        from xcore.document import fingerprint, to_dict

        sizes = to_dict(self.sizes)
        return fingerprint(
            {name: size for name, size in sizes.items() if size is not None}
        )  # missing sizes don't count

    @functools.cached_property
    def layers_fingerprint(self) -> str:
        """Return sixteen hex digits of the sizes without the context, which times of iterations don't depend on."""
        from xcore.document import fingerprint, to_dict

        sizes = to_dict(self.sizes)
        return fingerprint({k: size for k, size in sizes.items() if size is not None and k != "context"})

    @property
    def sizes(self) -> "ModelSpec":
        """Return this spec with its sizes only: without its name, and its checkpoint's dtypes and sampling."""
        return replace(self, name="", dtype=None, sorts_logits=None, head_dtype=None)

    @property
    def longest_request(self) -> int | None:
        """Return the most tokens of input and output together; None: any number, since T5's positions are relative."""
        return None if self.architecture == "t5" else self.context

    def seen(self, new: float, past: float) -> float:
        """Return the sum of the tokens that each of `new` tokens after `past` sees, the mean over the layers."""
        whole = seen_within(new, past, self._most_seen)
        if self.windows is None:
            return whole
        part = self.windows.layers / self.layers
        return part * self.windows.seen(new, past) + (1 - part) * whole

    def read(self, past: float) -> float:
        """Return the cached tokens that a new token after `past` reads, the mean over the layers."""
        whole = min(past, self._most_seen - 1)
        if self.windows is None:
            return whole
        part = self.windows.layers / self.layers
        return part * self.windows.read(past) + (1 - part) * whole

    @property
    def _most_seen(self) -> float:
        """Return the most tokens that a token sees in a layer without a window of its own."""
        if self.latent and self.latent.index:
            return self.latent.index.top_k
        return self.window or float("inf")

    def kept_share(self, tokens: float) -> float:
        """Return the share of a sequence's `tokens` that stay in the cache, the mean over the layers.

        It is 1 if all layers have the same window: engines then keep all tokens.
        """
        if self.windows is None or tokens <= 0:
            return 1.0
        part = self.windows.layers / self.layers
        return part * self.windows.kept(tokens) / tokens + 1 - part

    @property
    def _biased(self) -> bool:
        return self.architecture in ("gpt2", "opt")

    def attention_matrices(self, tp: int = 1) -> tuple[tuple[int, int], ...]:
        """Return (outputs, inputs) of an attention block's products on one of `tp` devices: QKV, then the output.

        Latent attention has more products between them.
        """
        if self.latent:
            return self.latent.matrices(self.hidden, self.heads // tp)
        kv = -(-self.kv_heads // tp)  # fewer KV heads than devices: each keeps a copy of one
        q = self.heads // tp
        return ((q + 2 * kv) * self.head_size, self.hidden), (self.hidden, q * self.head_size)

    def ffn_matrices(self, tp: int = 1) -> tuple[tuple[int, int], ...]:
        """Return (outputs, inputs) of a feed-forward block's products on one of `tp` devices: up (and gate), down."""
        return self.gated_matrices(self.ffn // tp)

    def gated_matrices(self, width: int) -> tuple[tuple[int, int], ...]:
        """Return (outputs, inputs) of the products of a feed-forward network of this width."""
        return (width * (2 if self.gated else 1), self.hidden), (self.hidden, width)

    def layer_matrices(self, tp: int = 1, encoder: bool = False) -> tuple[tuple[int, int], ...]:
        """Return (outputs, inputs) of one layer's matrix products on one of `tp` devices.

        A decoder layer of an encoder-decoder has cross-attention too, with the shapes of self-attention.
        """
        attention = self.attention_matrices(tp)
        crosses = bool(self.encoder_layers) and not encoder
        return attention * (2 if crosses else 1) + self.ffn_matrices(tp)

    def token_matrices(self, tp: int = 1, encoder: bool = False) -> tuple[tuple[int, int], ...]:
        """Return (outputs, inputs) of the products that every token of a layer goes through on one of `tp` devices.

        These are all products of the layer except the keys and values of cross-attention, which are computed once from
        the encoded input (`cross_projection`).
        """
        if encoder or not self.encoder_layers:
            return self.layer_matrices(tp, encoder)
        qkv, out = self.attention_matrices(tp)
        query = (self.heads // tp * self.head_size, self.hidden)
        return (qkv, out, query, out, *self.ffn_matrices(tp))

    def cross_projection(self, tp: int = 1) -> tuple[int, int]:
        """Return (outputs, inputs) of the product for a decoder layer's keys and values of the encoded input."""
        return 2 * -(-self.kv_heads // tp) * self.head_size, self.hidden

    @functools.cached_property
    def layer_parameters(self) -> float:
        """Return the parameters of one decoder layer."""
        return self.dense_parameters + self.expert_parameters

    @functools.cached_property
    def dense_parameters(self) -> float:
        """Return the parameters of one decoder layer that every token uses."""
        experts = self.experts
        share = 1.0 - experts.layers / self.layers if experts else 1
        count = sum(n * k for n, k in self.layer_matrices()) - (1 - share) * sum(n * k for n, k in self.ffn_matrices())
        if experts:
            shared = sum(n * k for n, k in self.gated_matrices(experts.shared_ffn))
            count += (1 - share) * (shared + experts.count * (self.hidden + experts.biased))
        return count + self._vectors

    @functools.cached_property
    def expert_parameters(self) -> float:
        """Return the parameters of the experts that the router chooses from, per decoder layer."""
        experts = self.experts
        if not experts:
            return 0
        matrices = self.gated_matrices(experts.ffn)
        of_each = sum(n * k for n, k in matrices) + (sum(n for n, _ in matrices) if experts.biased else 0)
        return experts.layers / self.layers * experts.count * of_each

    @property
    def _vectors(self) -> int:
        """Return the parameters of one decoder layer's norms, biases and sinks."""
        norm = self.hidden * (2 if self._biased else 1)
        norms = {"gemma2": 4, "gemma3": 4}.get(self.architecture, 3 if self.encoder_layers else 2)
        count = norm * norms
        if self._biased:  # one bias for every matrix product's output
            count += sum(n for n, _ in self.layer_matrices())
        if self.architecture in ("qwen2", "glm4_moe", "gpt_oss"):
            count += self.attention_matrices()[0][0]
        if self.architecture == "gpt_oss":
            count += self.hidden + self.heads
        if self.architecture in ("qwen3", "qwen3_moe", "gemma3"):
            count += 2 * self.head_size
        if self.architecture == "minimax_m2":
            count += (self.heads + self.kv_heads) * self.head_size
        if self.latent:
            count += self.latent.kv_rank + (self.latent.q_rank or 0)
            if self.latent.index:
                count += self.latent.index.parameters(self.hidden, self.latent.q_rank or self.hidden)
        return count

    @functools.cached_property
    def encoder_layer_parameters(self) -> int:
        """Return the parameters of one encoder layer; 0 for a decoder-only model."""
        if not self.encoder_layers:
            return 0
        return sum(n * k for n, k in self.layer_matrices(encoder=True)) + 2 * self.hidden

    @functools.cached_property
    def embedding_parameters(self) -> int:
        """Return the parameters of token and position embeddings (relative ones too, for T5)."""
        positions = {"gpt2": self.context * self.hidden, "opt": (self.context + 2) * self.hidden, "t5": 64 * self.heads}
        return self.vocab * self.hidden + positions.get(self.architecture, 0)

    @functools.cached_property
    def head_parameters(self) -> int:
        """Return the parameters of the final norms, and of the output head unless it is tied to the embedding."""
        norm = self.hidden * (2 if self._biased or self.encoder_layers else 1)
        return norm + (0 if self.tied_embeddings else self.vocab * self.hidden)

    @functools.cached_property
    def parameters(self) -> int:
        """Return the number of all parameters; a tied head counts once."""
        layers = self.layers * self.layer_parameters + self.encoder_layers * self.encoder_layer_parameters
        return round(layers) + self.embedding_parameters + self.head_parameters

    @functools.cached_property
    def active_parameters(self) -> int:
        """Return the number of parameters that one token uses."""
        if not self.experts:
            return self.parameters
        idle = 1 - self.experts.per_token / self.experts.count
        return round(self.parameters - self.layers * self.expert_parameters * idle)

    def dense_dtype(self, dtype: str) -> str:
        """Return the dtype of all weights of layers but the experts' if a checkpoint has this dtype."""
        return "bf16" if self.experts and self.experts.alone and BYTES[dtype] < 2 else dtype

    def checkpoint_bytes(self, dtype: str) -> float:
        """Return the bytes of all weights."""
        outer = (self.embedding_parameters + self.head_parameters) * activation_bytes(dtype) - self.head_saving(dtype)
        encoder = self.encoder_layers * self.encoder_layer_parameters * BYTES[dtype]
        layer = self.dense_parameters * BYTES[self.dense_dtype(dtype)] + self.expert_parameters * BYTES[dtype]
        return self.layers * layer + encoder + outer

    def head_saving(self, dtype: str) -> float:
        """Return the bytes that a quantised output head takes less than one in the dtype of activations."""
        if self.head_dtype is None or self.tied_embeddings or BYTES[dtype] >= 2:
            return 0.0
        return self.vocab * self.hidden * (activation_bytes(dtype) - BYTES[self.head_dtype])

    def layer_bytes(self, tp: int = 1, dtype: str = "fp16", encoder: bool = False) -> float:
        """Return the bytes of one layer's weights on one of `tp` devices."""
        if encoder:
            return self.encoder_layer_parameters * BYTES[dtype] / tp
        copied = self.latent.matrices(self.hidden, 1)[0][0] * self.hidden if self.latent else 0  # on every device
        dense = copied + (self.dense_parameters - copied) / tp
        devices = tp * self.attention_dp
        return dense * BYTES[self.dense_dtype(dtype)] + self.expert_parameters * BYTES[dtype] / devices

    def kv_bytes(self, tp: int = 1, dtype: str = "fp16") -> int:
        """Return the bytes of the keys and values of one token in one layer on one of `tp` devices."""
        if self.latent:  # all heads share them: every device has a copy
            return int(self.latent.cached * BYTES[dtype]) + self.latent.index_bytes
        return -(-self.kv_heads // tp) * self.head_kv_bytes(dtype)

    def head_kv_bytes(self, dtype: str) -> int:
        """Return the bytes of one token's key and value of one KV head, with their scales in int8."""
        if dtype == "int8":
            return 2 * (self.head_size + KV_SCALE_BYTES)
        return int(2 * self.head_size * BYTES[dtype])

    def tp_degrees(self, most: int) -> tuple[int, ...]:
        """Return the tensor-parallel degrees up to `most` that a model allows.

        A degree divides the heads and the widths of feed-forward networks; of experts, it divides the width or the
        number. It divides the KV heads or is a multiple of them.
        """
        experts = self.experts
        widths = [self.ffn] if experts is None or experts.layers < self.layers else []
        widths += [experts.shared_ffn] if experts else []

        def fits(tp: int) -> bool:
            kv = bool(self.latent) or self.kv_heads % tp == 0 or tp % self.kv_heads == 0
            divided = experts is None or experts.ffn % tp == 0 or experts.count % tp == 0
            if self.attention_dp > 1 and tp > 1:
                return False  # each device has attention for its own sequences
            return self.heads % tp == 0 and all(width % tp == 0 for width in widths) and divided and kv

        return tuple(tp for tp in (2**i for i in range(most.bit_length())) if tp <= most and fits(tp))

    @property
    def attention_dp(self) -> int:
        """Return the replicas of one device that share the experts (attention data parallelism); 1: they share none."""
        return self.experts.attention_dp if self.experts else 1

    def expert_parallel(self, tp: int, dtype: str) -> bool:
        """Return whether each of `tp` devices has whole experts (expert parallelism), not a part of each.

        The model may ask for whole experts. They are also whole if a part would not be a multiple of the 128 weights
        that share a scale in 8 bits.
        """
        if self.experts is None or tp * self.attention_dp == 1:
            return False
        width, apart = self.experts.ffn, self.experts.expert_parallel or self.attention_dp > 1
        return apart or width % tp != 0 or (dtype == "fp8" and width // tp % _BLOCK != 0)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        """Leave the head's dtype out of files unless it is quantised, so that those of other models don't change."""
        from pydantic_core import core_schema  # only what reads or writes documents calls this

        def write(model: ModelSpec, serialize: Callable[[ModelSpec], dict[str, object]]) -> dict[str, object]:
            written = serialize(model)
            if written["head_dtype"] is None:
                del written["head_dtype"]
            return written

        plain = core_schema.wrap_serializer_function_ser_schema(write)
        return core_schema.no_info_wrap_validator_function(
            lambda data, validate: validate(data), handler(source), serialization=plain
        )

    @classmethod
    def from_config(cls, config: Mapping[str, object], name: str) -> "ModelSpec":
        """Build the spec that a Hugging Face `config.json` describes; InputError names what isn't supported."""
        from xcore.architectures import read_sizes

        spec = read_sizes(config, name)
        text = config.get("text_config")
        kept = [
            of.get(key) for of in (config, text if isinstance(text, dict) else {}) for key in ("dtype", "torch_dtype")
        ]
        plain = next((dtype for dtype in kept if isinstance(dtype, str)), "")
        quantised = checkpoint_format(config, name)
        return replace(spec, dtype=quantised or DTYPES.get(plain), head_dtype=quantised if has_head(config) else None)

    @classmethod
    def from_directory(cls, directory: str | Path) -> "ModelSpec":
        """Read the spec of a model directory in the Hugging Face layout."""
        path = Path(directory)
        name = path.resolve().name
        config = read_config(path)
        spec, quantised = cls.from_config(config, name), directory_format(path, name)
        if not quantised and not checkpoint_format(config, name):
            quantised = stored_format(path, name)
        return replace(spec, dtype=quantised or spec.dtype, sorts_logits=_sorts_logits(path))


def read_config(directory: str | Path) -> dict[str, object]:
    """Read the `config.json` of a model directory; InputError if it is missing or broken."""
    from xcore.document import read_json

    path = Path(directory) / "config.json"
    if not path.exists():
        raise InputError(f"'{directory}' is not a model directory: it has no config.json.")
    config = read_json(path)
    if not isinstance(config, dict):
        raise InputError(f"'{path}' does not hold a JSON object.")
    return config


def _sorts_logits(directory: Path) -> bool:
    """Return whether the sampling defaults of a model directory have top-p or top-k."""
    from xcore.document import read_json

    path = directory / "generation_config.json"
    defaults = read_json(path) if path.exists() else {}
    if not isinstance(defaults, dict):
        raise InputError(f"'{path}' does not hold a JSON object.")
    top_p, top_k = (defaults.get(name) for name in ("top_p", "top_k"))
    return (isinstance(top_p, int | float) and top_p < 1) or (isinstance(top_k, int) and top_k > 0)


def checked_size(value: object, what: str, most: int = MAX_SIZE) -> int:
    """Return the value, a whole number from 1 to `most`; otherwise raise InputError, which begins with `what`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InputError(f"{what} = {reprlib.repr(value)}: it must be a whole number from 1 to {most:,}.")
    return value
