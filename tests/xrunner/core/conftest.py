"""transformers' tokens of the tiny models, which every schedule must give."""

import functools

import pytest
import torch

from tests.xrunner.cells import generate, requests

from . import test_architectures as architectures

SIZES = {"num_layers": 5, "num_decoder_layers": 4, "d_model": 64, "num_heads": 4, "d_kv": 10, "d_ff": 72}
SIZES |= {"vocab_size": 300, "n_positions": 128, "relative_attention_max_distance": 40, "initializer_factor": 3.0}
SPECIAL = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}


@functools.cache
def tokens_of_transformers(path):
    """transformers' tokens and gaps for every request, generated once in a process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return {request.id: generate(model, request) for request in requests()}


@pytest.fixture(scope="session")
def theirs(directories):
    """transformers' tokens and gaps for every request of every architecture."""
    return {arch: tokens_of_transformers(path) for arch, path in directories.items()}


@pytest.fixture(scope="session")
def encoder_decoder(tmp_path_factory):
    """A T5's directory, and transformers' tokens and gaps for every request."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(3)
    form = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    model = T5ForConditionalGeneration(T5Config(**SIZES, **SPECIAL, **form)).eval()
    path = tmp_path_factory.mktemp("t5") / "t5"
    model.save_pretrained(path)
    model.generation_config.eos_token_id = None
    prompts = ((r.id, torch.tensor(r.prompt_ids), r.max_tokens) for r in requests())
    tokens = {name: architectures.generate(model, prompt, most) for name, prompt, most in prompts}
    assert len({token for output, _ in tokens.values() for token in output}) > 20
    return {"t5": path}, tokens
