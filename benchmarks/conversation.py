"""Conversations on `exegpt serve`, with and without prefix caching.

20 users send the six turns of one conversation after another. All begin with the same system prompt of 500 tokens; a
turn adds 100 tokens, and its answer 60. The cache of KV blocks holds a quarter of what all conversations end with. Both
servers follow one schedule for one small model; they get the same load in turns, within the same minutes. A user sends
a turn whenever one is due, unless the last one is still being answered; a refused turn is sent again when the next one
is due.

The load comes from a process of its own. Goodput is the rate of answers within the bound, as the client measures them.
Exit code 1 unless caching has 1.3 times the goodput, 99 % of the accepted answers of each run are in time, and all
tokens are equal.

    python -m benchmarks.conversation
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.servers import started
from exegpt.loadtest.connection import Address, ConnectionPool
from exegpt.loadtest.endpoint import http_request
from exegpt.loadtest.response import Stream
from xcore import document
from xcore.policies.chunked import ChunkedControl
from xcore.specs.cluster import local_cluster
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule, Stage
from xcore.specs.workload import LengthDistribution, Workload
from xprofiler.machine import cpu_name

USERS, TURNS, SYSTEM, TURN, ANSWER = 20, 6, 500, 100, 60
LONGEST = SYSTEM + TURNS * (TURN + ANSWER)
BLOCK = 16
BLOCKS = USERS * LONGEST // 4 // BLOCK
"""KV blocks: a quarter of what all conversations end with."""
MODEL = "--layers 4 --hidden 256 --heads 4 --kv-heads 2 --ffn 704 --vocab 4000 --context 2048"
SHARES = (0.8, 1.5, 2.5, 4.0)
"""Offered rates, as shares of the rate that the server without caching answers when all users always ask."""
AT_ONCE = 4.0
"""Turns per second of a user who asks again at once."""
RATIO, IN_TIME = 1.3, 0.99
CACHING, PLAIN = "caching", "plain"
HEAD = f"offered/s {'server':8} {'sent':>6} {'429':>5} {'good/s':>8} {'in time':>8} {'p50 s':>6} {'p99 s':>6} cached"


@dataclass(frozen=True)
class Load:
    """A load on one server."""

    url: str
    rate: float
    """Turns per second of all users together."""
    seconds: float
    """The time for which turns become due."""
    seed: int
    """Determines the due times and the tokens of the users."""
    vocab: int


@dataclass
class Ran:
    """The results of a load."""

    sent: int = 0
    refused: int = 0
    failed: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answers: dict[str, list[int]] = field(default_factory=dict)
    """The tokens of each answered turn."""


class Answer(Stream):
    """A streamed answer with its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[int] = []

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        super()._choice(choice, now)
        self.ids += choice.get("token_ids") or ()


# ---- the client, in a process of its own ----


async def run_load(load: Load) -> Ran:
    """Let all users send their turns until the time is over, and all answers have come."""
    ran, pool = Ran(), ConnectionPool(Address.of(load.url))
    system = tokens(load, "system", SYSTEM)
    await asyncio.gather(*(user(load, number, system, pool, ran) for number in range(USERS)))
    pool.close()
    return ran


async def user(load: Load, number: int, system: list[int], pool: ConnectionPool, ran: Ran) -> None:
    """Send one user's turns. The first conversation begins at any of its turns."""
    loop, due = asyncio.get_running_loop(), random.Random(f"{load.seed} due {number}")
    begin_s = due_s = loop.time()
    conversation, turn = 0, number % TURNS
    prompt = [*system, *tokens(load, f"{number} before", turn * (TURN + ANSWER))]
    while (due_s := due_s + due.expovariate(load.rate / USERS)) < begin_s + load.seconds:
        if due_s < loop.time():
            continue  # the last turn was still being answered
        await asyncio.sleep(due_s - loop.time())
        asked = [*prompt, *tokens(load, f"{number} {conversation} {turn}", TURN)]
        reply = await ask(pool, asked, ran)
        if reply is None:
            continue
        ran.answers[f"{load.seed} {number} {conversation} {turn}"] = reply
        prompt, turn = [*asked, *reply], turn + 1
        if turn == TURNS:
            conversation, turn, prompt = conversation + 1, 0, system


async def ask(pool: ConnectionPool, prompt: Sequence[int], ran: Ran) -> list[int] | None:
    """Send one turn; return the answer's tokens, or None if it is refused or fails."""
    body = {"prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    loop, answer = asyncio.get_running_loop(), Answer()
    begin_s = loop.time()
    ran.sent += 1
    await pool.exchange(http_request(pool.address, "/completions", body), answer, 120.0)
    if answer.status == 429:
        ran.refused += 1
        return None
    if answer.failure or len(answer.ids) != ANSWER:
        ran.failed.append(str(answer.failure or f"{len(answer.ids)} tokens"))
        return None
    ran.latencies_s.append((answer.last or loop.time()) - begin_s)
    ran.prompt_tokens += len(prompt)
    ran.cached_tokens += answer.usage["prompt_tokens_details"]["cached_tokens"]
    return answer.ids


def tokens(load: Load, name: str, count: int) -> list[int]:
    """Return tokens that only the seed and a name determine."""
    draw = random.Random(f"{load.seed} {name}")
    return [draw.randrange(300, load.vocab) for _ in range(count)]


# ---- the comparison ----


def measured(load: Load) -> Ran:
    """Run a load in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.conversation", "--client", json.dumps(asdict(load))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"The client failed: {done.stderr[-2000:]}")
    return Ran(**json.loads(done.stdout))


def schedule_for(model: Path, bound_s: float, caching: bool) -> Schedule:
    """Return the schedule of both servers."""
    spec = ModelSpec.from_directory(model)
    inputs = [SYSTEM + TURN + turn * (TURN + ANSWER) for turn in range(TURNS)]
    lengths = LengthDistribution.from_samples(inputs), LengthDistribution.fixed(ANSWER)
    return Schedule(
        version=Schedule.VERSION,
        policy="chunked",
        control=ChunkedControl(max_num_seqs=16, max_num_batched_tokens=512),
        model=ModelReference(spec, spec.fingerprint),
        cluster=local_cluster(),
        workload=Workload("conversations", *lengths, ANSWER),
        profile=ProfileReference("measured", "0"),
        stages=(Stage((0,), 1, "both", None, (0, spec.layers)),),
        kv_blocks=BLOCKS,
        dtype="fp32",
        kv_dtype="fp32",
        latency_bound_s=bound_s,
        block_size=BLOCK,
        admission="grow",
        prefix_caching=caching,
    )


def capacity(url: str, vocab: int, seconds: float) -> float:
    """Return the rate of the server's answers when every user asks again at once; it learns its speed meanwhile."""
    ran = measured(Load(url, USERS * AT_ONCE, seconds, 0, vocab))
    return len(ran.latencies_s) / seconds


@dataclass(frozen=True)
class Row:
    """The results of one server at one rate, of all rounds."""

    seconds: float
    runs: tuple[Ran, ...]
    bound_s: float

    @property
    def latencies_s(self) -> list[float]:
        """The latencies of all accepted answers."""
        return [latency_s for ran in self.runs for latency_s in ran.latencies_s]

    @property
    def in_time(self) -> float:
        """The share of the accepted answers within the bound."""
        latencies_s = self.latencies_s
        return sum(latency_s <= self.bound_s for latency_s in latencies_s) / max(1, len(latencies_s))

    @property
    def goodput(self) -> float:
        """The answers within the bound per second."""
        return self.in_time * len(self.latencies_s) / (self.seconds * len(self.runs))

    @property
    def text(self) -> str:
        """The columns of the table."""
        sent, refused, cached, prompts = (
            sum(getattr(ran, name) for ran in self.runs)
            for name in ("sent", "refused", "cached_tokens", "prompt_tokens")
        )
        ordered = sorted(self.latencies_s) or [0.0]
        p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
        return (
            f"{sent:6} {refused:5} {self.goodput:8.2f} {self.in_time:8.2%} {p50:6.2f} {p99:6.2f} "
            f"{cached / max(1, prompts):7.1%}"
        )


def compared(urls: dict[str, str], rate: float, asked: argparse.Namespace, seed: int, vocab: int) -> dict[str, Row]:
    """Run the same load on both servers, in turns."""
    runs: dict[str, list[Ran]] = {name: [] for name in urls}
    for number in range(asked.rounds):
        for name in list(urls)[:: -1 if number % 2 else 1]:
            runs[name].append(measured(Load(urls[name], rate, asked.seconds, seed + number, vocab)))
    return {name: Row(asked.seconds, tuple(of), asked.bound) for name, of in runs.items()}


def differing(rows: dict[str, Row]) -> tuple[int, int]:
    """Return how many turns both servers answered, and how many of them with other tokens."""
    own, other = ({turn: ids for ran in row.runs for turn, ids in ran.answers.items()} for row in rows.values())
    both = own.keys() & other.keys()
    return len(both), sum(own[turn] != other[turn] for turn in both)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bound", type=float, default=1.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=2, help="of each rate and server")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.client:
        print(json.dumps(asdict(asyncio.run(run_load(Load(**json.loads(asked.client)))))))
        return
    with tempfile.TemporaryDirectory() as name, ExitStack() as servers:
        directory = Path(name)
        model = directory / "model"
        subprocess.run([sys.executable, "-m", "exegpt", "model", "create", model, *MODEL.split()], check=True)
        vocab = ModelSpec.from_directory(model).vocab
        urls = {}
        for server in (CACHING, PLAIN):
            inside = directory / server
            inside.mkdir()
            document.write(inside / "schedule.json", schedule_for(model, asked.bound, server == CACHING))
            options = ["-m", str(model), "-s", str(inside / "schedule.json"), "--pinned"]
            urls[server], _ = servers.enter_context(started(inside, options))
        most = {server: capacity(urls[server], vocab, asked.seconds) for server in urls}[PLAIN]  # both warm up
        print(f"{cpu_name()}; bound {asked.bound:g} s; without caching {most:.2f} answers/s when all users always ask")
        raise SystemExit(0 if judged(urls, most, asked, vocab) else 1)


def judged(urls: dict[str, str], most: float, asked: argparse.Namespace, vocab: int) -> bool:
    """Print the table; return whether all that is promised holds."""
    print(HEAD)
    tables, held = [], True
    for place, share in enumerate(SHARES):
        rows = compared(urls, share * most, asked, 100 * (place + 1), vocab)
        both, differ = differing(rows)
        for server, row in rows.items():
            print(f"{share * most:9.2f} {server:8} {row.text}", flush=True)
            failed = [why for ran in row.runs for why in ran.failed]
            held &= row.in_time >= IN_TIME and not failed
            if failed:
                print(f"{len(failed)} failed: {failed[0]}")
        print(f"{'':9} tokens of {both} turns answered by both: {differ} differ")
        held &= not differ
        tables.append(rows)
    best = {server: max(rows[server].goodput for rows in tables) for server in urls}
    ratio = best[CACHING] / max(1e-9, best[PLAIN])
    print(
        f"goodput: {best[CACHING]:.2f}/s with caching, {best[PLAIN]:.2f}/s without: {ratio:.2f} times (least: {RATIO})"
    )
    return held and ratio >= RATIO


if __name__ == "__main__":
    main()
