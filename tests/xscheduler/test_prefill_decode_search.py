"""Prefill and decode replicas: the search against measuring every layout, and what the command says."""

import json
from dataclasses import replace

import pytest

from tests.exegpt.cli.conftest import run_command
from xcore.errors import InputError
from xcore.specs.bound import ALL_REQUESTS
from xcore.specs.prefill_decode import PrefillDecode
from xcore.specs.profile import Table
from xscheduler.goodput import RateBounds, missed_bounds
from xscheduler.prefill_decode_search import PrefillDecodeQuestion
from xscheduler.rate_sample import Arrivals, at
from xscheduler.settings import find_setting
from xsimulator.replay.compiled import Replicas
from xsimulator.replay.prefill_decode_replay import hand_over

SLOW = pytest.mark.slow

ASKED = "tune -m opt-6.7b -c 2xA40 -w 512/32 --rate 1/s --ttft 2s --tpot 100ms --policy chunked --disaggregated".split()


def question(model, cluster, workload, bounds):
    setting = find_setting(model, cluster, workload, "roofline", one_engine=True)
    arrivals = Arrivals.poisson(setting.workload, setting.model.longest_request, count=20_000)
    return PrefillDecodeQuestion(setting, arrivals, bounds, ALL_REQUESTS)


@pytest.mark.parametrize(
    ("model", "cluster", "workload", "bounds"),
    [
        ("opt-13b", "4xA40", "512/32", RateBounds(None, 2.0, 0.1)),
        ("opt-6.7b", "3xA40", "128/16", RateBounds(5.0)),
        pytest.param("llama-3.1-8b", "8xH100-SXM", "4000/200", RateBounds(None, 0.5, 0.02), marks=SLOW),
        pytest.param("llama-3.1-8b", "2x2xH100-SXM", "512/lognormal(200,1.5)", RateBounds(None, 5.0), marks=SLOW),
    ],
)
def test_the_answer_is_the_best_of_all_layouts_and_its_queue_does_not_grow(model, cluster, workload, bounds):
    asked = question(model, cluster, workload, bounds)
    answer, limits = asked.best(None), bounds.limits
    assert len(asked.layouts) >= 3

    def late(plan, rate):
        """The share of many requests that miss a bound; 0 without one."""
        requests = at(asked.arrivals.sample(asked.arrivals.count, 1, ALL_REQUESTS).replicas[0], rate)
        times = hand_over(plan, asked.setting.profile, Replicas(asked.setting.profile), requests)
        missed = missed_bounds(requests, times.first, times.finished, limits)
        return max(float(counts.mean()) for counts in missed)

    assert late(answer.plan, 0.98 * answer.goodput_seq_s) <= 0.0101
    for _, plan in asked.layouts:
        assert late(plan, 1.06 * answer.goodput_seq_s) > 0.0099, plan.name


def test_a_loose_bound_is_no_reason_to_exceed_what_the_replicas_serve():
    loose, tight = (question("opt-6.7b", "3xA40", "128/16", RateBounds(s)).best(None) for s in (600.0, 5.0))
    assert loose.goodput_seq_s < 1.04 * tight.goodput_seq_s


def test_each_replica_is_within_a_node():
    asked = question("opt-30b", "2x3xA40", "512/32", RateBounds(None, 4.0))
    plans = [plan for _, plan in asked.layouts if plan.decode.stages[0].tp == 2]
    assert {(plan.prefill.replicas, plan.decode.replicas) for plan in plans} == {(1, 1)}  # a node of three holds one
    one = plans[0].prefill
    sides = [replace(one, replicas=n, stages=(replace(one.stages[0], tp=tp),)) for n, tp in ((2, 4), (3, 2))]
    both = PrefillDecode(*sides)
    assert both.fits(2, 8) and both.fits(3, 6) and not both.fits(2, 6) and not both.fits(13, 1)


def test_a_slow_link_limits_the_rate(tmp_path):
    asked = question("opt-6.7b", "2x1xA40", "512/16", RateBounds(None, 5.0))
    seconds = Table(("bytes",), ((1.0, 1e9),), (1e-5, 0.8))
    slow = replace(asked.setting, profile=replace(asked.setting.profile, send_between_nodes=seconds))
    answer = replace(asked, setting=slow).best(None)
    sent_s = 512 * asked.setting.model.layers * asked.setting.model.kv_bytes(1, "fp16") * 0.8e-9
    assert 0.8 < answer.goodput_seq_s * sent_s <= 1.0


def test_the_figures_at_a_rate_keep_the_bounds_that_hold_there():
    asked = question("opt-13b", "4xA40", "512/32", RateBounds(None, 2.0, 0.1))
    most = asked.best(None)
    answer = asked.best(most.goodput_seq_s / 2)
    estimate = answer.estimate
    assert answer.plan == most.plan and estimate.ttft_bounded_s < 2.0 and estimate.tpot_bounded_s < 0.1
    assert estimate.throughput_seq_s == pytest.approx(most.goodput_seq_s / 2, rel=0.05)
    assert answer.rate_seq_s == most.goodput_seq_s / 2 and asked.best(1e3).rate_seq_s == most.goodput_seq_s
    assert len(estimate.utilisation) == answer.plan.devices and answer.transfer_s > 0
    assert estimate.latency_mean_s > estimate.ttft_s + 31 * estimate.tpot_s * 0.99


def test_bounds_that_none_keeps_have_no_answer():
    assert question("opt-13b", "4xA40", "512/32", RateBounds(None, 1e-3)).best(1.0) is None


@pytest.mark.slow
def test_the_command_prints_it_beside_the_best_schedule():
    run = run_command(*ASKED)
    assert run.code == 0 and "Prefill and decode replicas: " in run.out and "times that of the best schedule" in run.out


def test_the_document_has_both_sides_and_their_commands():
    document = json.loads(run_command(*ASKED, "--export", "vllm", "--json").out)["prefill_decode"]
    sides = [document[side]["replicas"] * document[side]["tp_degree"] for side in ("prefill", "decode")]
    assert sum(sides) == document["devices"] == 2 and document["sustains"] == (document["goodput_seq_s"] >= 1.0)
    assert all("NixlConnector" in text and "vllm serve" in text for text in document["commands"].values())
    assert f"--tensor-parallel-size {document['decode']['tp_degree']} " in document["commands"]["decode"]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--prefix-hit", "0.5"], "--disaggregated can't be combined with --prefix-hit"),
        (["--policy", "orca"], "follow policy chunked, which --policy orca leaves out"),
        (["--admission", "grow"], "--disaggregated can't be combined with --admission grow"),
        (["--rate", "1/s,2/s"], "--disaggregated can't be combined with several rates"),
        (["--export", "tensorrt-llm"], "knows vllm and sglang, but not tensorrt-llm"),
        (["--export", "vllm", "--export-as", "compose"], "--export-as compose has no prefill and decode replicas"),
        (["--tp-degree", "2"], "--disaggregated can't be combined with --tp-degree"),
        (["-c", "1xA40"], "need at least 2 devices, but 1xA40 has 1"),
    ],
)
def test_what_it_does_not_do_is_refused(more, sentence):
    run = run_command(*ASKED, *more)
    assert run.code == 2 and sentence in run.err


def test_a_steady_state_has_none():
    run = run_command(*"tune -m opt-13b -c 4xA40 -w 512/32 --ttft 2s --disaggregated".split())
    assert run.code == 2 and "add --rate" in run.err


def test_an_encoder_decoder_is_refused():
    with pytest.raises(InputError, match="is an encoder-decoder"):
        question("t5-11b", "4xA40", "512/32", RateBounds(5.0)).best(1.0)
