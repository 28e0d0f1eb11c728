"""Prefill and decode replicas: the search against measuring every layout, and what the command says."""

import json

import pytest

from tests.exegpt.cli.conftest import run_command
from xcore.errors import InputError
from xcore.specs.bound import ALL_REQUESTS
from xscheduler.goodput import PRECISION, RateBounds
from xscheduler.prefill_decode_search import PrefillDecodeQuestion
from xscheduler.rate_sample import Arrivals
from xscheduler.settings import find_setting

ASKED = "tune -m opt-6.7b -c 2xA40 -w 512/32 --rate 1/s --ttft 2s --tpot 100ms --policy chunked --disaggregated".split()


def question(model, cluster, workload, bounds):
    setting = find_setting(model, cluster, workload, "roofline", one_engine=True)
    arrivals = Arrivals.poisson(setting.workload, setting.model.longest_request, count=3000)
    return PrefillDecodeQuestion(setting, arrivals, bounds, ALL_REQUESTS)


@pytest.mark.parametrize(
    ("model", "cluster", "workload", "bounds"),
    [
        ("opt-13b", "4xA40", "512/32", RateBounds(None, 2.0, 0.1)),
        ("opt-13b", "4xA40", "256/64", RateBounds(10.0)),
        pytest.param("llama-3.1-8b", "8xH100-SXM", "4000/200", RateBounds(None, 0.5, 0.02), marks=pytest.mark.slow),
    ],
)
def test_the_answer_is_the_best_of_all_layouts(model, cluster, workload, bounds):
    asked = question(model, cluster, workload, bounds)
    answer = asked.best(None)
    layouts = list(asked._layouts(list(asked._engines(True)), list(asked._engines(False))))
    assert len(layouts) == answer.layouts >= 4
    assert all(plan.devices <= asked.setting.cluster.devices for _, plan in layouts)
    every = {}
    for most, plan in layouts:
        least = PRECISION * most
        every[plan.name, plan.prefill.control.limit] = (
            asked._goodput(plan, least, 2 * most) if asked._holds(plan, least) else 0.0
        )
    assert answer.goodput_seq_s >= max(every.values()) * (1 - 2.5 * PRECISION)
    assert answer.goodput_seq_s <= max(every.values()) * (1 + 2.5 * PRECISION)


def test_the_figures_at_a_rate_keep_the_bounds_that_hold_there():
    asked = question("opt-13b", "4xA40", "512/32", RateBounds(None, 2.0, 0.1))
    most = asked.best(None)
    answer = asked.best(most.goodput_seq_s / 2)
    estimate = answer.estimate
    assert answer.plan == most.plan and estimate.ttft_bounded_s < 2.0 and estimate.tpot_bounded_s < 0.1
    assert estimate.throughput_seq_s == pytest.approx(most.goodput_seq_s / 2, rel=0.05)
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
