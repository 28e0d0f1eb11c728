"""Every architecture under every policy: the engine's tokens are those of transformers' greedy `generate`."""

import pytest
import torch

from xcore.document import fingerprint
from xcore.errors import InputError
from xcore.policies import TRAITS
from xcore.requests.request import Request
from xcore.specs.cluster import local_cluster
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule, Stage
from xcore.specs.workload import Workload
from xrunner.core.engine import Engine
from xrunner.models import load_model

HEADS = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 96}
LLAMA = {"intermediate_size": 72, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3}
T5 = {"num_layers": 2, "d_model": 64, "num_heads": 4, "d_kv": 16, "d_ff": 72, "relative_attention_max_distance": 40}
T5 |= {"decoder_start_token_id": 0, "n_positions": 32}  # shorter than most requests: positions are relative
CONFIGS = {
    "llama": HEADS | LLAMA,
    "mistral": HEADS | LLAMA | {"sliding_window": 11},
    "qwen2": HEADS | LLAMA | {"tie_word_embeddings": True},
    "qwen3": HEADS | LLAMA | {"layer_types": ["full_attention", "sliding_attention"]},
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 96, "initializer_range": 0.3},
    "opt": HEADS | {"ffn_dim": 72, "word_embed_proj_dim": 64, "init_std": 0.3},
    "t5": T5 | {"feed_forward_proj": "relu"},
    "t5-v1.1": T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "initializer_factor": 3.0},
}
CONFIGS["qwen3"] |= {"use_sliding_window": True, "sliding_window": 9}
POLICIES = {
    "static": {"encode_batch": 3},
    "orca": {"max_num_seqs": 4, "prefills_per_step": 1},
    "chunked": {"max_num_seqs": 5, "max_num_batched_tokens": 13},
    "rra": {"encode_batch": 2, "decode_batch": 4, "decode_iterations": 3},
}
LENGTHS = [(1, 5), (40, 12), (5, 14), (17, 1), (33, 2), (64, 8)]


def make(root, name):
    """The directory of a model of an architecture, requests, and transformers' tokens for them."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    g = torch.Generator().manual_seed(0)
    pairs = [(torch.randint(2, 300, (lengths[0],), generator=g), lengths) for lengths in LENGTHS]
    torch.manual_seed(1)
    kind = name.split("-")[0]
    config = AutoConfig.for_model(kind, vocab_size=300, pad_token_id=0, eos_token_id=1, **CONFIGS[name])
    of = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    theirs = of.from_config(config, dtype=torch.float32).eval()
    if name == "t5":
        with torch.no_grad():  # else a tied head's best token is the one that went in
            theirs.shared.weight *= 0.05
    theirs.save_pretrained(root / name)
    theirs.generation_config.eos_token_id = None
    tokens = [generate(theirs, p, most) for p, (_, most) in pairs]
    return (
        root / name,
        [Request(str(i), tuple(p.tolist()), most, True) for i, (p, (_, most)) in enumerate(pairs)],
        tokens,
    )


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Of each architecture a model, the requests, and transformers' tokens for them."""
    root = tmp_path_factory.mktemp("models")
    models = {name: make(root, name) for name in CONFIGS}
    return {name: (load_model(path), todo, tokens) for name, (path, todo, tokens) in models.items()}


def generate(model, prompt, most):
    """Tokens, and how far the two largest logits lie apart, in deviations."""
    out = model.generate(
        prompt[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=most,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    gaps = [float(row.topk(2).values.diff().abs() / row.std()) for (row,) in out.logits]
    return out.sequences[0, -most:].tolist(), gaps


def schedule(model, policy, kv_blocks=22):
    return Schedule(
        version=Schedule.VERSION,
        policy=policy,
        control=TRAITS[policy].control(**POLICIES[policy]),
        model=ModelReference(model.spec, fingerprint(model.spec)),
        cluster=local_cluster(),
        workload=Workload.fixed(16, 8),
        profile=ProfileReference("roofline", "0"),
        stages=(Stage((0,), 1, "both", (0, model.spec.encoder_layers) if model.start else None, (0, 2)),),
        kv_blocks=kv_blocks,
        block_size=16,
        dtype="fp32",
        kv_dtype="fp32",
    )


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_transformers(cases, name, policy):
    model, todo, expected = cases[name]
    if model.start and policy == "chunked":
        with pytest.raises(InputError, match="its encoder reads a whole prompt"):
            Engine(model, schedule(model, policy))
        return
    report = Engine(model, schedule(model, policy)).run(todo)
    assert sorted(result.id for result in report.results) == sorted(request.id for request in todo)
    differing = set()
    for result in report.results:
        tokens, gaps = expected[int(result.id)]
        pairs = zip(result.output_ids, tokens, strict=True)
        place = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
        if place is not None:
            assert gaps[place] < 1e-4, (result.id, place, gaps[place])
            differing.add(result.id)
    assert len(differing) <= 1  # a tie within rounding may go either way


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_differ(cases, name):
    """Models whose every token were the same would prove nothing."""
    _, _, expected = cases[name]
    assert len({token for tokens, _ in expected for token in tokens}) > 5


def test_an_encoder_decoders_blocks_are_enough_to_the_last(cases):
    """One block for each sixteen tokens of input and output together: 64 + 16 of them fill five blocks."""
    model, _, _ = cases["t5"]
    full = Request("full", (7,) * 64, 16, True)
    (result,) = Engine(model, schedule(model, "rra", kv_blocks=5)).run([full]).results
    assert len(result.output_ids) == 16
    with pytest.raises(InputError, match="'full' needs 5 KV blocks"):
        Engine(model, schedule(model, "rra", kv_blocks=4)).run([full])


def test_an_end_of_text_ends_an_encoder_decoders_output(cases):
    from dataclasses import replace

    model, todo, expected = cases["t5"]
    common = torch.tensor([token for tokens, _ in expected for token in tokens]).bincount().argmax()
    ending = replace(model, eos=frozenset([int(common)]))
    results = Engine(ending, schedule(ending, "orca")).run([replace(r, ignore_eos=False) for r in todo]).results
    for result in results:
        tokens, _ = expected[int(result.id)]
        cut = tokens.index(common) + 1 if common in tokens else len(tokens)
        assert list(result.output_ids) == tokens[:cut]
