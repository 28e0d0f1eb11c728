"""Models that are built in by name: the papers' and today's common ones, each by its published config.

They are kept as the contents of config.json. A built-in model and a model directory thus go through the same reader,
and parameter counts can be compared with what transformers builds from the same config.
"""

import functools
from dataclasses import replace

from xcore.specs.model import ModelSpec
from xcore.specs.model_names import resolve

Config = dict[str, object]


def _t5(layers: int, hidden: int, heads: int, head_size: int, ffn: int, gated: bool = False) -> Config:
    return {
        "model_type": "t5",
        "num_layers": layers,
        "num_decoder_layers": layers,
        "d_model": hidden,
        "num_heads": heads,
        "d_kv": head_size,
        "d_ff": ffn,
        "vocab_size": 32128,
        "n_positions": 512,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": not gated,
    }


def _opt(layers: int, hidden: int, heads: int) -> Config:
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": hidden,
        "dtype": "float16",
    }


def _gpt2(layers: int, hidden: int, heads: int, vocab: int = 50257, context: int = 1024) -> Config:
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "vocab_size": vocab,
        "n_positions": context,
    }


def _gpt3(layers: int, hidden: int, heads: int) -> Config:
    """Return the config of a GPT-3 size from Table 1 of the paper, with GPT-3's padded vocabulary and context."""
    return _gpt2(layers, hidden, heads, vocab=51200, context=2048) | {"dtype": "float16"}


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    context: int,
    *,
    kind: str = "llama",
    tied: bool = False,
    head_size: int | None = None,
    dtype: str = "bfloat16",
) -> Config:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size or hidden // heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "dtype": dtype,
    }


_llama2 = functools.partial(_llama, vocab=32000, context=4096, dtype="float16")
_mistral = functools.partial(_llama, kind="mistral")
_qwen2 = functools.partial(_llama, kind="qwen2")
_qwen3 = functools.partial(_llama, kind="qwen3", context=40960, head_size=128)

_phi3 = functools.partial(_llama, kind="phi3")


def _mixtral(base: Config, experts: int, per_token: int) -> Config:
    """Add the keys of `experts` experts in all layers, by Mixtral's names."""
    return base | {"num_local_experts": experts, "num_experts_per_tok": per_token}


def _qwen3_moe(layers: int, hidden: int, heads: int, ffn: int, expert_ffn: int, context: int, experts: int) -> Config:
    base = _llama(layers, hidden, heads, 4, ffn, 151936, context, kind="qwen3_moe", head_size=128)
    return base | {"num_experts": experts, "num_experts_per_tok": 8, "moe_intermediate_size": expert_ffn}


def _gpt_oss(layers: int, experts: int) -> Config:
    types = ["sliding_attention", "full_attention"] * (layers // 2)
    base = _mixtral(_llama(layers, 2880, 64, 8, 2880, 201088, 131072, kind="gpt_oss", head_size=64), experts, 4)
    added = {"layer_types": types, "sliding_window": 128, "attention_bias": True}
    return base | added | {"quantization_config": {"quant_method": "mxfp4"}}


def _leading_dense(base: Config, experts: int, expert_ffn: int, dense: int) -> Config:
    """Add the keys of experts after `dense` dense layers, with one shared expert."""
    return base | {
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert_ffn,
        "n_shared_experts": 1,
        "first_k_dense_replace": dense,
    }


_FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def _deepseek(
    kind: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int, context: int, experts: int, dense: int
) -> Config:
    base = _llama(layers, hidden, heads, heads, ffn, vocab, context, kind=kind, head_size=64)
    latent = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    return _leading_dense(base, experts, 2048, dense) | latent


_GLM5 = _deepseek("glm_moe_dsa", 78, 6144, 64, 12288, 154880, 202752, 256, 3) | {
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
}
_KIMI_INT4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}


def _glm4(layers: int, hidden: int, ffn: int, expert_ffn: int, experts: int, dense: int, context: int) -> Config:
    base = _llama(layers, hidden, 96, 8, ffn, 151552, context, kind="glm4_moe", head_size=128)
    return _leading_dense(base, experts, expert_ffn, dense) | {"attention_bias": True}


def _gemma(
    kind: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, head_size: int, window: int, period: int
) -> Config:
    vocab, context = (256000, 8192) if kind == "gemma2" else (262208, 131072)
    base = _llama(layers, hidden, heads, kv_heads, ffn, vocab, context, kind=kind, tied=True, head_size=head_size)
    types = ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)]
    return base | {"sliding_window": window, "layer_types": types}


_gemma2 = functools.partial(_gemma, "gemma2", window=4096, period=2)
_gemma3 = functools.partial(_gemma, "gemma3_text", window=1024, period=6)


def _llama4(experts: int, context: int, step: int) -> Config:
    base = _llama(48, 5120, 40, 8, 8192, 202048, context, kind="llama4_text", head_size=128)
    return base | {
        "num_local_experts": experts,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 16384,
        "interleave_moe_layer_step": step,
        "attention_chunk_size": 8192,
    }


_MINIMAX = _llama(62, 3072, 48, 8, 1536, 200064, 196608, kind="minimax_m2", head_size=128)

# name → (Hugging Face id or None, config)
_MODELS: dict[str, tuple[str | None, Config]] = {
    "t5-small": ("google-t5/t5-small", _t5(6, 512, 8, 64, 2048)),
    "t5-base": ("google-t5/t5-base", _t5(12, 768, 12, 64, 3072)),
    "t5-large": ("google-t5/t5-large", _t5(24, 1024, 16, 64, 4096)),
    "t5-3b": ("google-t5/t5-3b", _t5(24, 1024, 32, 128, 16384)),
    "t5-11b": ("google-t5/t5-11b", _t5(24, 1024, 128, 128, 65536)),
    "flan-t5-small": ("google/flan-t5-small", _t5(8, 512, 6, 64, 1024, gated=True)),
    "flan-t5-base": ("google/flan-t5-base", _t5(12, 768, 12, 64, 2048, gated=True)),
    "flan-t5-large": ("google/flan-t5-large", _t5(24, 1024, 16, 64, 2816, gated=True)),
    "flan-t5-xl": ("google/flan-t5-xl", _t5(24, 2048, 32, 64, 5120, gated=True)),
    "flan-t5-xxl": ("google/flan-t5-xxl", _t5(24, 4096, 64, 64, 10240, gated=True)),
    "opt-125m": ("facebook/opt-125m", _opt(12, 768, 12)),
    "opt-1.3b": ("facebook/opt-1.3b", _opt(24, 2048, 32)),
    "opt-2.7b": ("facebook/opt-2.7b", _opt(32, 2560, 32)),
    "opt-6.7b": ("facebook/opt-6.7b", _opt(32, 4096, 32)),
    "opt-13b": ("facebook/opt-13b", _opt(40, 5120, 40)),
    "opt-30b": ("facebook/opt-30b", _opt(48, 7168, 56)),
    "opt-66b": ("facebook/opt-66b", _opt(64, 9216, 72)),
    "opt-175b": (None, _opt(96, 12288, 96)),
    "gpt2": ("openai-community/gpt2", _gpt2(12, 768, 12)),
    "distilgpt2": ("distilbert/distilgpt2", _gpt2(6, 768, 12)),
    "gpt2-medium": ("openai-community/gpt2-medium", _gpt2(24, 1024, 16)),
    "gpt2-large": ("openai-community/gpt2-large", _gpt2(36, 1280, 20)),
    "gpt2-xl": ("openai-community/gpt2-xl", _gpt2(48, 1600, 25)),
    "gpt3-39b": (None, _gpt3(48, 8192, 64)),
    "gpt3-101b": (None, _gpt3(80, 10240, 80)),
    "gpt3-175b": (None, _gpt3(96, 12288, 96)),
    "gpt3-341b": (None, _gpt3(120, 15360, 120)),
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf", _llama2(32, 4096, 32, 32, 11008)),
    "llama-2-13b": ("meta-llama/Llama-2-13b-hf", _llama2(40, 5120, 40, 40, 13824)),
    "llama-2-70b": ("meta-llama/Llama-2-70b-hf", _llama2(80, 8192, 64, 8, 28672)),
    "llama-3-8b": ("meta-llama/Meta-Llama-3-8B", _llama(32, 4096, 32, 8, 14336, 128256, 8192)),
    "llama-3-70b": ("meta-llama/Meta-Llama-3-70B", _llama(80, 8192, 64, 8, 28672, 128256, 8192)),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", _llama(32, 4096, 32, 8, 14336, 128256, 131072)),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B", _llama(80, 8192, 64, 8, 28672, 128256, 131072)),
    "llama-3.1-405b": ("meta-llama/Llama-3.1-405B", _llama(126, 16384, 128, 8, 53248, 128256, 131072)),
    "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", _llama(16, 2048, 32, 8, 8192, 128256, 131072, tied=True)),
    "llama-3.2-3b": ("meta-llama/Llama-3.2-3B", _llama(28, 3072, 24, 8, 8192, 128256, 131072, tied=True)),
    "llama-3.3-70b": ("meta-llama/Llama-3.3-70B-Instruct", _llama(80, 8192, 64, 8, 28672, 128256, 131072)),
    "mistral-7b": ("mistralai/Mistral-7B-v0.1", _mistral(32, 4096, 32, 8, 14336, 32000, 32768)),
    "mistral-7b-v0.3": (
        "mistralai/Mistral-7B-v0.3",
        _mistral(32, 4096, 32, 8, 14336, 32768, 32768) | {"sliding_window": None},
    ),
    "qwen2.5-0.5b": ("Qwen/Qwen2.5-0.5B", _qwen2(24, 896, 14, 2, 4864, 151936, 32768, tied=True)),
    "qwen2.5-1.5b": ("Qwen/Qwen2.5-1.5B", _qwen2(28, 1536, 12, 2, 8960, 151936, 131072, tied=True)),
    "qwen2.5-3b": ("Qwen/Qwen2.5-3B", _qwen2(36, 2048, 16, 2, 11008, 151936, 32768, tied=True)),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B", _qwen2(28, 3584, 28, 4, 18944, 152064, 131072)),
    "qwen2.5-14b": ("Qwen/Qwen2.5-14B", _qwen2(48, 5120, 40, 8, 13824, 152064, 131072)),
    "qwen2.5-32b": ("Qwen/Qwen2.5-32B", _qwen2(64, 5120, 40, 8, 27648, 152064, 131072)),
    "qwen2.5-72b": ("Qwen/Qwen2.5-72B", _qwen2(80, 8192, 64, 8, 29568, 152064, 131072)),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", _qwen3(28, 1024, 16, 8, 3072, 151936, tied=True)),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", _qwen3(28, 2048, 16, 8, 6144, 151936, tied=True)),
    "qwen3-4b": ("Qwen/Qwen3-4B", _qwen3(36, 2560, 32, 8, 9728, 151936, tied=True)),
    "qwen3-8b": ("Qwen/Qwen3-8B", _qwen3(36, 4096, 32, 8, 12288, 151936)),
    "qwen3-14b": ("Qwen/Qwen3-14B", _qwen3(40, 5120, 40, 8, 17408, 151936)),
    "qwen3-32b": ("Qwen/Qwen3-32B", _qwen3(64, 5120, 64, 8, 25600, 151936)),
    "phi-4": ("microsoft/phi-4", _phi3(40, 5120, 40, 10, 17920, 100352, 16384)),
    "mistral-small-3": (
        "mistralai/Mistral-Small-24B-Base-2501",
        _mistral(40, 5120, 32, 8, 32768, 131072, 32768, head_size=128) | {"sliding_window": None},
    ),
    "gemma-2-9b": ("google/gemma-2-9b", _gemma2(42, 3584, 16, 8, 14336, 256)),
    "gemma-2-27b": ("google/gemma-2-27b", _gemma2(46, 4608, 32, 16, 36864, 128)),
    "gemma-3-4b": ("google/gemma-3-4b-it", _gemma3(34, 2560, 8, 4, 10240, 256)),
    "gemma-3-12b": ("google/gemma-3-12b-it", _gemma3(48, 3840, 16, 8, 15360, 256)),
    "gemma-3-27b": ("google/gemma-3-27b-it", _gemma3(62, 5376, 32, 16, 21504, 128)),
    "mixtral-8x7b": (
        "mistralai/Mixtral-8x7B-v0.1",
        _mixtral(_llama(32, 4096, 32, 8, 14336, 32000, 32768, kind="mixtral"), 8, 2),
    ),
    "mixtral-8x22b": (
        "mistralai/Mixtral-8x22B-v0.1",
        _mixtral(_llama(56, 6144, 48, 8, 16384, 32000, 65536, kind="mixtral"), 8, 2),
    ),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", _qwen3_moe(48, 2048, 32, 6144, 768, 40960, 128)),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B", _qwen3_moe(94, 4096, 64, 12288, 1536, 40960, 128)),
    "qwen3-coder-480b-a35b": (
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        _qwen3_moe(62, 6144, 96, 8192, 2560, 262144, 160) | {"num_key_value_heads": 8},
    ),
    "gpt-oss-20b": ("openai/gpt-oss-20b", _gpt_oss(24, 32)),
    "gpt-oss-120b": ("openai/gpt-oss-120b", _gpt_oss(36, 128)),
    "deepseek-v3": (
        "deepseek-ai/DeepSeek-V3",
        _deepseek("deepseek_v3", 61, 7168, 128, 18432, 129280, 163840, 256, 3) | _FP8,
    ),
    "kimi-k2": (
        "moonshotai/Kimi-K2-Instruct",
        _deepseek("kimi_k2", 61, 7168, 64, 18432, 163840, 131072, 384, 1) | _FP8,
    ),
    "kimi-k2.5": (
        "moonshotai/Kimi-K2.5",
        _deepseek("kimi_k2", 61, 7168, 64, 18432, 163840, 262144, 384, 1) | {"quantization_config": _KIMI_INT4},
    ),
    "glm-4.5": ("zai-org/GLM-4.5", _glm4(92, 5120, 12288, 1536, 160, 3, 131072)),
    "glm-4.5-air": ("zai-org/GLM-4.5-Air", _glm4(46, 4096, 10944, 1408, 128, 1, 131072)),
    "glm-5": ("zai-org/GLM-5", _GLM5),
    "llama-4-scout": ("meta-llama/Llama-4-Scout-17B-16E", _llama4(16, 10485760, 1)),
    "llama-4-maverick": ("meta-llama/Llama-4-Maverick-17B-128E", _llama4(128, 1048576, 2)),
    "minimax-m2.5": ("MiniMaxAI/MiniMax-M2.5", _mixtral(_MINIMAX, 256, 8) | _FP8),
}

_SORTING = ("llama-", "qwen", "gemma-3")
"""Families whose chat checkpoints have top-p or top-k in `generation_config.json`.

Llama: 0.9; Qwen: 0.8 and 20; Gemma 3: 0.95 and 64.
"""

HUB_IDS: dict[str, str | None] = {name: hub for name, (hub, _) in _MODELS.items()}
"""Built-in name → Hugging Face id; None if the weights are not published there."""

_BY_LOWER = {key.lower(): name for name, (hub, _) in _MODELS.items() for key in (name, hub) if key}


def builtin_config(name: str) -> Config:
    """Return the config of a built-in model, by any of its names; InputError as `xcore.specs.model_names.resolve`."""
    named = resolve(hub_id(name), _BY_LOWER)
    return _MODELS[named.builtin][1] | named.changes


def builtin_model(name: str) -> ModelSpec:
    """Return the spec of a built-in model, by any of its names; a derived model keeps the given name.

    Raises InputError as `xcore.specs.model_names.resolve` does.
    """
    hub_name = hub_id(name)
    spec = ModelSpec.from_config(builtin_config(hub_name), _BY_LOWER.get(hub_name.lower(), hub_name))
    named = resolve(hub_name, _BY_LOWER)
    return replace(spec, dtype=named.dtype or spec.dtype, sorts_logits=named.builtin.startswith(_SORTING))


def stands_for(name: str) -> str | None:
    """Return the built-in model whose sizes a derived name has; None for a built-in model's own name."""
    hub_name = hub_id(name)
    return None if hub_name.lower() in _BY_LOWER else resolve(hub_name, _BY_LOWER).builtin


def hub_id(name: str) -> str:
    """Return a name without the address that a browser shows before it."""
    return name.strip().removeprefix("https://").removeprefix("huggingface.co/").rstrip("/")
