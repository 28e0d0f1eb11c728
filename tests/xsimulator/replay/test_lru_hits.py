"""Prefix hits of replays: an LRU simulation where requests don't overlap, the Python pool's where they do."""

import json
import random
from collections import OrderedDict

import pytest

from tests.xcore.small_specs import profile
from tests.xrunner.cells import schedule
from xcore.specs.builtin_models import builtin_model
from xcore.traces.trace import read_trace
from xsimulator.replay.event_simulator import replay

SPEC = builtin_model("opt-1.3b")
PROFILE = profile(SPEC)
BLOCK = 16


def lru(texts, requests, total):
    """The cached tokens of each request's prompt, by a cache of `total` blocks that forgets the least recently used."""
    cache, hits = OrderedDict(), []
    for text, request in zip(texts, requests, strict=True):
        tokens = request.input + request.output - 1  # the last token's keys and values are never computed
        keys = [tuple(text[:end]) for end in range(BLOCK, tokens + 1, BLOCK)]
        most = (request.input - 1) // BLOCK
        hit = next((place for place, key in enumerate(keys[:most]) if key not in cache), min(most, len(keys)))
        hits.append(hit * BLOCK)
        for key in keys[:hit]:
            cache.move_to_end(key)
        while len(cache) + -(-tokens // BLOCK) - hit > total:
            cache.popitem(last=False)
        for key in reversed(keys):  # the end of a text is forgotten before its beginning
            cache[key] = None
            cache.move_to_end(key)
    return hits


def fresh(rng, tokens):
    return [rng.randrange(1 << 40) for _ in range(tokens)]


def blocks_trace(rng, size):
    """Prompts of named blocks as in Mooncake's traces (512 tokens) or Bailian's (16): a few long common beginnings."""
    tokens, rows, texts = {}, [], []
    for i in range(60):
        names = [rng.randrange(3) + 10 * place for place in range(rng.randrange(1024 // size))]
        own = rng.randrange(size + 1, 3 * size)
        names += [100_000 + 10 * i + place for place in range(-(-own // size))]
        for name in names:
            tokens.setdefault(name, fresh(rng, size))
        input, output = (len(names) - -(-own // size)) * size + own, rng.randrange(1, 80)
        text = [token for name in names for token in tokens[name]][:input]
        texts.append([*text, *fresh(rng, output)])
        rows.append({"input_length": input, "output_length": output, "hash_ids": names})
    return rows, texts


def mooncake(rng):
    return blocks_trace(rng, 512)


def bailian(rng):
    rows, texts = blocks_trace(rng, 16)
    return [{**row, "chat_id": i, "parent_chat_id": -1} for i, row in enumerate(rows)], texts


def turns(rng, sessions, first, further, output):
    """Sessions whose turns continue prompt and answer, in a random order."""
    rows, texts, said = [], [], {}
    for _ in range(80):
        name = rng.randrange(sessions)
        text = [*said.get(name, fresh(rng, rng.randrange(*first))), *fresh(rng, rng.randrange(*further))]
        answer = fresh(rng, rng.randrange(*output))
        rows.append({"input": len(text), "output": len(answer), "session_id": f"s{name}"})
        texts.append([*text, *answer])
        said[name] = texts[-1] if len(texts[-1]) < 1500 else fresh(rng, rng.randrange(*first))
    return rows, texts


def conversation(rng):
    return turns(rng, 12, (1, 60), (20, 120), (20, 200))


def agent(rng):
    return turns(rng, 5, (300, 900), (30, 200), (2, 40))


@pytest.mark.parametrize(
    ("trace", "admission"), [(mooncake, "grow"), (bailian, "reserve"), (conversation, "reserve"), (agent, "grow")]
)
def test_hits_are_those_of_an_lru_cache_and_of_the_python_pool(tmp_path, trace, admission):
    rows, texts = trace(random.Random(7))
    path = tmp_path / "trace.jsonl"

    def requests(gap_s):
        timed = [{**row, "timestamp_s": i * gap_s} for i, row in enumerate(rows)]
        path.write_text("".join(json.dumps(row) + "\n" for row in timed))
        return read_trace(path)

    shares = []
    for total in (1200, 400, 150):
        cache = {"kv_blocks": total, "block_size": BLOCK, "prefix_caching": True, "admission": admission}
        plan = schedule(SPEC, "chunked", max_num_batched_tokens=200, **cache)
        alone = replay(plan, PROFILE, requests(1000.0), timeline=False)
        hits = [served.cached_tokens for served in sorted(alone.served, key=lambda served: served.index)]
        assert hits == lru(texts, requests(1000.0), total)
        shares.append(sum(hits))
        together = requests(0.01)
        crowd = replay(plan, PROFILE, together, timeline=False)
        pool = replay(plan, PROFILE, together, timeline=False, prompts=texts, lanes=True)
        assert [s.cached_tokens for s in crowd.served] == [s.cached_tokens for s in pool.served]
        assert crowd.reused == pool.reused
        assert max(s.finish_s - s.arrival_s for s in crowd.served) > 0.02, "requests overlap"
    assert shares[0] >= shares[1] > shares[2]
