"""The cost of verification and of drafting, against sums over a profile's own tables."""

from dataclasses import replace

import pytest

from tests.xcore.small_specs import profile as small_profile
from tests.xcore.small_specs import schedule
from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.engine_spec import NO_ENGINE
from xcore.specs.experts import Experts
from xcore.specs.speculation import Speculation
from xprofiler.roofline import roofline_profile
from xprofiler.roofline_attention import AttentionRoofline
from xprofiler.roofline_device import roofline_device
from xsimulator.cost.cost_model import CostModel, ReplicaCost
from xsimulator.cost.memory import BLOCK_SIZE
from xsimulator.cost.speculative_tables import Verification

THREE = Speculation((0.8, 0.6, 0.5), layers=1.5)
GPU = parse_cluster("1xH100-SXM")
LLAMA, SMALL = builtin_model("llama-3.1-8b"), builtin_model("llama-3.2-1b")


def on_gpu(model):
    return schedule(model=model, cluster=GPU).stages


def test_an_iteration_verifies_all_tokens_and_drafts_one_after_the_other():
    """Layers over 4 rows a sequence; drafting: one pass over all of them, two over one row, three heads."""
    profile = roofline_profile(LLAMA, GPU, "bf16")
    plain = CostModel(LLAMA, GPU, profile, "bf16").group(1).tables
    cost = CostModel(LLAMA, GPU, profile, "bf16", speculation=THREE).drafting_group(1, 32)
    layer, batch, context = plain.decoder, 16.0, 512.0
    attention = float(layer.decode_attention(batch, context))
    verified = 32 * (layer.rest.at(4 * batch) + attention) + plain.embedding.at(4 * batch) + plain.head.at(4 * batch)
    first = 1.5 * (layer.rest.at(4 * batch) + attention)
    later = 2 * 1.5 * (layer.rest.at(batch) + attention)
    heads = 3 * (plain.head.at(batch) + plain.embedding.at(batch))
    parts = cost.decode(batch, context)
    seconds = 32 * float(parts.layer) + float(parts.embedding) + float(parts.head)
    assert seconds == pytest.approx(verified + first + later + heads, rel=1e-9)
    prompt = cost.encode_fixed(2.0, 512.0)
    assert float(prompt.layer) == pytest.approx(
        (1 + 1.5 / 32) * (layer.rest.at(1024.0) + float(layer.encode_attention(2.0, 512.0))), rel=1e-9
    )


def test_a_draft_model_takes_its_own_times():
    profile, small = roofline_profile(LLAMA, GPU, "bf16"), roofline_profile(SMALL, GPU, "bf16")
    speculation = Speculation((0.8, 0.6), layers=0.0, draft=SMALL)
    with pytest.raises(InputError, match="no times of the draft model"):
        CostModel(LLAMA, GPU, profile, "bf16", speculation=speculation).drafting_group(1, 32)
    both = replace(profile, draft=small.degrees)
    cost = CostModel(LLAMA, GPU, both, "bf16", speculation=speculation).drafting_group(1, 32)
    verifying = CostModel(LLAMA, GPU, both, "bf16", speculation=speculation).group(1)
    own, batch, context = small.degree(1), 8.0, 1024.0
    attention = float(own.decoder.decode_attention(batch, context))
    passes = 16 * (own.decoder.rest.at(3 * batch) + attention) + 16 * (own.decoder.rest.at(batch) + attention)
    heads = 2 * (own.head.at(batch) + own.embedding.at(batch))
    longer = float(cost.decode(batch, context).layer) - float(verifying.decode(batch, context).layer)
    assert 32 * longer == pytest.approx(passes + heads, rel=1e-9)
    assert both.fingerprint == profile.fingerprint


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3"])
def test_attention_over_several_tokens_is_the_rooflines(name):
    """It reads keys and values once, and computes the scores of every token: latent attention takes longer."""
    model = builtin_model(name)
    profile = roofline_profile(model, GPU, "bf16", degrees=(1,))
    device = roofline_device(GPU.device, GPU.intra, "bf16", "bf16", NO_ENGINE)
    attention, batch, context, rows = AttentionRoofline(model, device, 1), 16.0, 2048.0, 4
    past, pair = context - 1, model.latent.decode_pair if model.latent else 2 * model.head_size
    computed = 2 * rows * batch * model.seen(1.0, past) * model.heads * pair / device.attention_flops_s
    one = attention.decoding(batch, context)
    tables = profile.degree(1)
    seconds = float(Verification(GPU.device, rows).attention(model, tables)(batch, context))
    assert seconds == pytest.approx(max(one, computed), rel=0.02)
    assert (seconds > 1.5 * one) == (name == "deepseek-v3")


def test_verification_reads_the_experts_of_all_its_tokens():
    """16 sequences with 3 draft tokens read as many distinct experts as 64 sequences without."""
    model = builtin_model("qwen3-30b-a3b")
    profile = roofline_profile(model, GPU, "bf16", degrees=(1,))
    costs = [CostModel(model, GPU, profile, "bf16", speculation=s) for s in (None, Speculation((0.8, 0.6, 0.5)))]
    assert isinstance(model.experts, Experts)
    plain, drafting = (cost.group(1) for cost in costs)
    rest = float(drafting.decode(16.0, 512.0).layer) - float(plain.decode(16.0, 512.0).layer)
    assert rest == pytest.approx(profile.degree(1).decoder.rest.at(64.0) - profile.degree(1).decoder.rest.at(16.0))
    assert profile.degree(1).decoder.rest.at(64.0) > 1.5 * profile.degree(1).decoder.rest.at(16.0)


def test_memory_counts_what_drafts():
    tables = replace(roofline_profile(LLAMA, GPU, "bf16"), draft=roofline_profile(SMALL, GPU, "bf16").degrees)
    drafting = (None, Speculation((0.8,), layers=2.0), Speculation((0.8,), layers=0.0, draft=SMALL))
    costs = [CostModel(LLAMA, GPU, tables, "bf16", speculation=speculation) for speculation in drafting]
    plain, head, draft = (cost.replica(on_gpu(LLAMA)).memory((1.0, 1.0))[0] for cost in costs)
    assert head.weights - plain.weights == pytest.approx(2 * LLAMA.layer_bytes(1, "bf16"))
    assert head.block - plain.block == pytest.approx(2 * BLOCK_SIZE * LLAMA.kv_bytes(1, "bf16"))
    assert draft.weights - plain.weights == pytest.approx(SMALL.checkpoint_bytes("bf16"), rel=1e-3)
    assert draft.block - plain.block == pytest.approx(BLOCK_SIZE * SMALL.layers * SMALL.kv_bytes(1, "bf16"))


def test_a_schedule_without_speculation_costs_what_it_did():
    tables = small_profile()
    plain = ReplicaCost.of(schedule(), tables).decode
    assert plain.rows == 1 and plain.costs[0].group.tables is tables.degrees[0]
