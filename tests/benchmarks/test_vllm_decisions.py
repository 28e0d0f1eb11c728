"""What `chunked` decides under *grow*, beside vLLM's rules written down plainly; with vLLM itself where it is there."""

from collections import deque
from dataclasses import dataclass, field

import pytest

from benchmarks import vllm_decisions
from benchmarks.vllm_decisions import BLOCK, TOKEN, Decision, Load, Ours, decisions, random_load


@dataclass(eq=False)
class Block:
    """Its contents, from the sequence's beginning on, once it is full, and how many requests hold it."""

    tokens: tuple = ()
    holders: int = 0


@dataclass(eq=False)
class Request:
    """Tokens known, computed and still to make."""

    index: int
    tokens: list
    to_make: int
    computed: int = 0
    blocks: list = field(default_factory=list)

    @property
    def known(self):
        return len(self.tokens)

    def beginning(self, blocks):
        return tuple(self.tokens[: blocks * BLOCK])


class Rules:
    """The rules of v1/core/sched/scheduler.py and block_pool.py (0.32), without asynchronous scheduling."""

    def __init__(self, load):
        self.load = load
        self.running, self.waiting = [], deque()
        self.free = [Block() for _ in range(load.blocks)]
        """In order of eviction."""
        self.hashed = []
        """In the order in which they were hashed."""

    def arrive(self, index, prompt, output_tokens):
        self.waiting.append(Request(index, list(prompt), output_tokens))

    def hit(self, request):
        keys = []
        while (len(keys) + 1) * BLOCK < request.known:
            beginning = request.beginning(len(keys) + 1)
            same = [block for block in self.hashed if block.tokens == beginning]
            if not same:
                break
            keys.append(same[0])
        return keys

    def allocate(self, request, tokens):
        missing = -(-(request.computed + tokens) // BLOCK) - len(request.blocks)
        if missing > len(self.free):
            return False
        for block in self.free[: max(0, missing)]:
            if block.tokens:
                self.hashed.remove(block)
            block.tokens, block.holders = (), 1
            request.blocks.append(block)
        del self.free[: max(0, missing)]
        if self.load.prefix_caching:
            for number in range((request.computed + tokens) // BLOCK):
                if not request.blocks[number].tokens:
                    request.blocks[number].tokens = request.beginning(number + 1)
                    self.hashed.append(request.blocks[number])
        return True

    def release(self, request):
        self.running.remove(request)
        for block in reversed(request.blocks):
            block.holders -= 1
            if not block.holders:
                self.free.insert(len(self.free) if block.tokens else 0, block)
        request.blocks = []

    def step(self):
        budget, scheduled, preempted = self.load.max_num_batched_tokens, [], []
        place = 0
        while place < len(self.running) and budget:
            request = self.running[place]
            tokens = min(request.known - request.computed, budget)
            while not (fits := self.allocate(request, tokens)):
                victim = self.running[-1]
                self.release(victim)
                victim.computed = 0
                self.waiting.appendleft(victim)
                preempted.append(victim.index)
                if victim is request:
                    break
            if not fits:
                break
            scheduled.append((request, tokens))
            budget -= tokens
            place += 1
        while self.waiting and budget and not preempted and len(self.running) < self.load.max_num_seqs:
            request = self.waiting[0]
            hit = self.hit(request)
            idle = [block for block in hit if not block.holders]
            if -(-request.known // BLOCK) - len(hit) + len(idle) > len(self.free):
                break
            for block in hit:
                block.holders += 1
            self.free = [block for block in self.free if block not in idle]
            request.blocks, request.computed = hit, len(hit) * BLOCK
            tokens = min(request.known - request.computed, budget)
            self.allocate(request, tokens)
            self.running.append(self.waiting.popleft())
            scheduled.append((request, tokens))
            budget -= tokens
        free = len(self.free)
        for request, tokens in scheduled:
            request.computed += tokens
            if request.computed == request.known:
                request.tokens.append(TOKEN)
                request.to_make -= 1
                if not request.to_make:
                    self.release(request)
        return Decision(tuple((r.index, tokens) for r, tokens in scheduled), tuple(sorted(preempted)), free)

    @property
    def idle(self):
        return not (self.running or self.waiting)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_every_decision_is_that_of_the_rules(prefix_caching):
    loads = [random_load(seed, prefix_caching) for seed in range(40)]
    steps = [pair for load in loads for pair in decisions(load, Ours(load), Rules(load))]
    assert len(steps) > 5000
    for number, (ours, rules) in enumerate(steps):
        assert ours == rules, number
    assert sum(bool(rules.preempted) for _, rules in steps) > vllm_decisions.PREEMPTING * len(steps)
    assert any(len(rules.preempted) > 1 for _, rules in steps), "more than one in a step"


def test_a_small_list_by_hand():
    """Three blocks: the second request gives way at its 17th token and comes back with what it had made."""
    load = Load((((2,) * 14, 5, 0), ((3,) * 15, 5, 0)), 3, 4, 20)
    (made,) = zip(*decisions(load, Ours(load)), strict=True)
    assert [decision.scheduled for decision in made] == [
        ((0, 14), (1, 6)),  # the second's first chunk
        ((0, 1), (1, 9)),
        ((0, 1), (1, 1)),
        ((0, 1),),
        ((0, 1),),
        ((1, 17),),
        ((1, 1),),
        ((1, 1),),
    ]
    assert [decision.preempted for decision in made if decision.preempted] == [(1,)]


def test_a_side_that_decides_otherwise_is_reported():
    class Hasty(Rules):
        def step(self):
            return super().step() if len(self.running) < 3 else Decision((), (), 0)

    load = random_load(0)
    pairs = decisions(load, Ours(load), Hasty(load))
    assert any(ours != hasty for ours, hasty in (next(pairs) for _ in range(20)))


@pytest.fixture(autouse=True)
def logs_go_on(monkeypatch):
    monkeypatch.setattr(vllm_decisions.logging, "disable", lambda level: None)


def test_missing_vllm_is_printed(monkeypatch, capsys):
    monkeypatch.setitem(vllm_decisions.sys.modules, "vllm", None)
    monkeypatch.setattr(vllm_decisions.sys, "argv", ["vllm_decisions"])
    vllm_decisions.main()
    assert "skipped: vLLM can't be imported" in capsys.readouterr().out


@pytest.mark.slow
def test_every_decision_is_that_of_vllm(monkeypatch, capsys):
    if vllm_decisions.imported() is None:
        pytest.skip("vLLM can't be imported here")
    monkeypatch.setattr(vllm_decisions.sys, "argv", ["vllm_decisions", "--lists", "20"])
    with pytest.raises(SystemExit) as end:
        vllm_decisions.main()
    assert not end.value.code, capsys.readouterr().out
