"""Ten thousand requests of random lengths, some of them cancelled, and minutes of them: nothing is lost or kept."""

import gc
import random
import resource
import time

import pytest
import torch

from tests.xrunner import cells
from xcore.policies.from_schedule import make_ledger
from xcore.requests.request import Request
from xrunner.core.engine import Engine
from xrunner.models import load_model

POLICIES = [policy for policy in cells.POLICIES if policy != "hybrid"]  # on one stage it is static
MOST = {"encode_batch": 24, "max_num_seqs": 48, "decode_batch": 48, "max_num_batched_tokens": 160}


@pytest.fixture(scope="module")
def model(directories):
    return load_model(directories["llama"])


def engine_of(model, policy):
    variables = {name: MOST.get(name, value) for name, value in cells.POLICIES[policy].items()}
    return Engine(model, cells.schedule(model.spec, policy, kv_blocks=200, **variables))


def requests_of(count, rng):
    return [
        Request(str(i), tuple(rng.choices(range(300), k=rng.randint(1, 20))), rng.randint(1, 8), True)
        for i in range(count)
    ]


def run(engine, todo, rng, monkeypatch):
    """Run requests, about a tenth of which are cancelled at some time; check that each has ended once and the ledger
    has every block back.
    """
    ledgers = []

    def remember(*arguments):
        ledgers.append(make_ledger(*arguments))
        return ledgers[-1]

    def on_finish(result):
        if rng.random() < 0.1:
            engine.abort(str(rng.randrange(len(todo))))

    monkeypatch.setattr("xrunner.core.driver.make_ledger", remember)
    report = engine.run(todo, on_finish)
    (ledger,) = ledgers
    ledger.check()
    assert ledger.idle and ledger.pool.available == ledger.pool.total
    assert sorted(int(result.id) for result in report.results) == list(range(len(todo)))
    for result in report.results:
        max_tokens = todo[int(result.id)].max_tokens
        assert len(result.output_ids) == max_tokens or result.finish_reason == "cancelled"
    return sum(result.finish_reason == "cancelled" for result in report.results)


def tensors():
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy", POLICIES)
def test_ten_thousand_requests_leave_nothing_behind(model, policy, monkeypatch):
    rng = random.Random(policy)
    engine = engine_of(model, policy)
    run(engine, requests_of(500, rng), rng, monkeypatch)
    before = tensors()
    cancelled = run(engine, requests_of(10_000, rng), rng, monkeypatch)
    assert cancelled > 100
    assert tensors() <= before


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_five_minutes_take_no_more_memory_than_one(model, monkeypatch):
    rng = random.Random(0)
    began, after_one, rounds = time.monotonic(), None, 0
    engines = [engine_of(model, policy) for policy in POLICIES]
    while (seconds := time.monotonic() - began) < 300:
        run(engines[rounds % len(engines)], requests_of(400, rng), rng, monkeypatch)
        rounds += 1
        if seconds > 60 and after_one is None:
            after_one = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert rounds > 2 * len(engines)
    assert after_one is not None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - after_one < 16 * 1024  # KiB
