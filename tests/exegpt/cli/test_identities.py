"""Replays with prefix caching: prompts begin alike as a trace says, as a replay of their tokens confirms."""

import csv
import gzip
import json
import random

import pytest

from tests.public_data import needs_data
from xcore.specs.workload import RequestLengths
from xcore.traces.trace import read_trace
from xscheduler.engine_settings import EngineSettings, follow
from xscheduler.settings import find_setting
from xsimulator.replay.event_simulator import replay

ENGINE = {"max_num_seqs": 64, "admission": "grow", "prefix_caching": True}
KEYS = ("arrival_s", "start_s", "first_token_s", "finish_s", "input_tokens", "output_tokens")
KEYS += ("cached_tokens", "preemptions")


def write(path, names, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    return path


def check(exegpt, path, texts, *columns):
    """The command's requests and figures are those of a replay of the same lengths with the prompts' tokens, in the
    lanes; `texts` are prompt and output of each row.
    """
    out = path.with_suffix(".out.jsonl")
    options = ("--max-num-seqs", 64, "--admission", "grow", "--prefix-caching", "--json", "--out", out, *columns)
    done = exegpt("simulate", "-m", "llama-3.1-8b", "-c", "1xH100-SXM", "--replay", path, *options)
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    named = dict(part.split("=") for part in columns[-1].split(",")) if columns else None
    lengths = [RequestLengths(r.input, r.output, r.arrival_s) for r in read_trace(path, named)]
    where = ("llama-3.1-8b", "1xH100-SXM", str(path), None)
    setting = find_setting(*where, columns=columns[-1] if columns else None, one_by_one=True)
    schedule, _ = follow(setting, EngineSettings.of(ENGINE))
    expected = replay(schedule, setting.profile, lengths, timeline=False, prompts=texts, lanes=True)
    assert done.json["reused_tokens"] == expected.reused > 0
    assert {row["id"] for row in rows} == {served.index for served in expected.served} == set(range(len(texts)))
    by_id = {served.index: served for served in expected.served}
    for row in rows:
        assert [row[key] for key in KEYS] == pytest.approx([getattr(by_id[row["id"]], key) for key in KEYS], rel=1e-9)
    return expected


def fresh(rng, tokens):
    return [rng.randrange(1 << 40) for _ in range(tokens)]


def conversations(rows):
    """Prompt and output of each (conversation, input, output), whose turns continue each other unless they are shorter
    than the prompt before.
    """
    rng, said, texts = random.Random(2), {}, []
    for name, input, output in rows:
        text, prompt = said.get(name, ([], 0))
        before = text[:input] if input >= prompt else []
        texts.append([*before, *fresh(rng, input + output - len(before))])
        said[name] = texts[-1], input
    return texts


def test_drawn_prefixes(exegpt, tmp_path):
    """Of the first requests of a public trace, or of drawn ones where it is not here."""
    rng = random.Random(1)
    prefixes = [fresh(rng, rng.randrange(50, 900)) for _ in range(12)]
    rows, texts = [], []
    for i in range(400):
        input, output, k = 1 + int(rng.lognormvariate(6.4, 1.0)), rng.randrange(1, 200), rng.randrange(12)
        shared = prefixes[k][:input]
        rows.append((input, output, f"{i * 0.05:.2f}", f"p{k}", len(shared)))
        texts.append([*shared, *fresh(rng, input - len(shared))])
    names = ("input", "output", "arrival_s", "prefix_id", "prefix_tokens")
    check(exegpt, write(tmp_path / "t.csv", names, rows), texts)


def test_drawn_prefixes_of_a_public_trace(exegpt, tmp_path):
    path, rng = needs_data("azure", "AzureLLMInferenceTrace_conv.csv"), random.Random(1)
    prefixes, rows, texts = [fresh(rng, 100 * (k + 1)) for k in range(10)], [], []
    with path.open() as file:
        for row, _ in zip(csv.DictReader(file), range(500), strict=False):
            k, input = rng.randrange(10), int(row["ContextTokens"])
            shared = prefixes[k][:input]
            rows.append((row["TIMESTAMP"], input, row["GeneratedTokens"], k, len(shared)))
            texts.append([*shared, *fresh(rng, input - len(shared))])
    names = ("TIMESTAMP", "ContextTokens", "GeneratedTokens", "prefix_id", "prefix_tokens")
    check(exegpt, write(tmp_path / "conv.csv", names, rows), texts)


def test_turns_of_measured_conversations(exegpt, tmp_path):
    path = needs_data("measured", "inferencex", "multiturn_llama70b_fp4_b200_vllm_requests.csv.gz")
    rows = []
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            if row["run"] == "tp2_bs16_offloadoff" and len(rows) < 400:
                own = (row["relative_time_sec"], max(1, int(row["input_num_tokens"])), row["output_num_tokens"])
                rows.append((*own, row["conversation_id"]))
    rows.sort(key=lambda row: float(row[0]))
    texts = conversations([(name, int(input), int(output)) for _, input, output, name in rows])
    names = ("arrival_s", "input_tokens", "output_tokens", "conversation_id")
    expected = check(exegpt, write(tmp_path / "turns.csv", names, rows), texts)
    assert expected.reused > 0.5 * sum(served.input_tokens for served in expected.served)


def test_sessions_of_measured_agents(exegpt, tmp_path):
    path = needs_data("measured", "agent_traces", "lmcache_agent_sessions.csv.gz")
    with gzip.open(path, "rt") as file:
        calls = [row for row in csv.DictReader(file) if int(row["input_tokens_est"]) < 30_000][:200]
    first = min(int(row["timestamp_us"]) for row in calls)
    rows = [
        (int(c["timestamp_us"]) - first, c["input_tokens_est"], max(1, int(c["output_tokens_est"])), c["session"])
        for c in calls
    ]
    rows.sort(key=lambda row: row[0])
    texts = conversations([(name, int(input), int(output)) for _, input, output, name in rows])
    names = ("timestamp_us", "input_tokens_est", "output_tokens_est", "session")
    columns = "input=input_tokens_est,output=output_tokens_est,conversation_id=session"
    check(exegpt, write(tmp_path / "agents.csv", names, rows), texts, "--columns", columns)


def test_blocks_as_in_mooncakes_traces(exegpt, tmp_path):
    rng, rows, texts, blocks = random.Random(3), [], [], {}
    for i in range(120):
        shared = [rng.randrange(3) + 10 * place for place in range(rng.randrange(5))]
        tokens = rng.randrange(1, 900)
        own = [1000 + 10 * i + place for place in range(-(-tokens // 512))]
        for name in shared:
            blocks.setdefault(tuple(shared[: shared.index(name) + 1]), fresh(rng, 512))
        text = [token for place in range(len(shared)) for token in blocks[tuple(shared[: place + 1])]]
        texts.append([*text, *fresh(rng, tokens)])
        rows.append({"timestamp": 60 * i, "input_length": len(texts[-1]), "output_length": rng.randrange(1, 60)})
        rows[-1]["hash_ids"] = [*shared, *own]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check(exegpt, path, texts)


def test_a_trace_that_knows_its_prompts_says_so_without_caching(exegpt, tmp_path):
    path = write(tmp_path / "t.csv", ("input", "output", "session_id"), [(9, 3, "a"), (14, 3, "a")])
    command = ("simulate", "-m", "opt-1.3b", "-c", "1xA40", "--replay", path, "--max-num-seqs", 4)
    assert "t.csv says which prompts begin with the same tokens; --prefix-caching uses this" in " ".join(
        exegpt(*command).err.split()
    )
    done = exegpt(*command, "--prefix-caching", "--block-size", 4)
    assert "of the prompts' tokens were found in the cache" in " ".join(done.err.split())


def test_ids_are_those_of_the_trace_where_rows_are_left_out(exegpt, tmp_path):
    path, out = (
        write(tmp_path / "t.csv", ("input", "output"), [(5000, 3), (9, 3), (9, 0), (9, 4)]),
        tmp_path / "o.jsonl",
    )
    command = ("simulate", "-m", "opt-1.3b", "-c", "1xA40", "--replay", path, "--max-num-seqs", 4, "--out", out)
    assert exegpt(*command).code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["id"], row["output_tokens"]) for row in rows] == [(1, 3), (2, 4)]


def test_times_of_requests_are_for_replays(exegpt, tmp_path):
    done = exegpt("simulate", "-m", "opt-1.3b", "-c", "1xA40", "-w", "T", "--out", tmp_path / "o.jsonl")
    assert done.code == 2 and "needs --replay or --rate" in done.err
