"""Questions for agents in a closed loop: the answer of `tune --agents` beside the best point of a stated grid.

The grid has, for orca and chunked and every layout, six limits of running sequences (all agents of a
replica, then 0.75, 0.5, 0.35, 0.25 and 0.12 of them), and of the other variable 12 values in equal ratios, ends
included. All of its points are replayed with the answer's turns.

Exit code 1 unless no point of a grid is more than 1 % better, or keeps bounds that the answer doesn't.

    python -m benchmarks.agent_questions
    python -m benchmarks.agent_questions --only 1,4
"""

import argparse
import itertools
import time
from dataclasses import replace

import numpy as np

from exegpt.api.agent_answer import agent_work, answer_agents
from exegpt.api.tuning import TuneProblem, read_problem
from exegpt.options.tune import TuneOptions
from xcore.policies import TRAITS
from xscheduler.agent_search import agent_searches
from xscheduler.candidates import Candidates
from xscheduler.search_problem import Limits
from xscheduler.spaces import spaces

SHARES, OTHERS = (1.0, 0.75, 0.5, 0.35, 0.25, 0.12), 12
MARGIN = 0.01
HEAD = (
    f"{'question':<34}{'agents':>7}{'turns/s':>9}{'cached':>8}{'most':>7}{'replays':>9}{'seconds':>9}{'grid':>6}  best"
)


CHAT = TuneOptions(model="llama-3.1-8b", cluster="1xH100-SXM", workload="200/100", agents=200, turns=8, tool_time="2s")
"""An 8B model on one H100, with 200 agents whose tools take two seconds."""
QUESTIONS: tuple[tuple[str, TuneOptions], ...] = (
    ("chat, most turns", CHAT),
    ("chat with a first token", replace(CHAT, ttft="10s")),
    ("long sessions in a small cache", replace(CHAT, workload="500/100", latency_bound="40s")),
    ("single calls", replace(CHAT, workload="2048/256", turns=1, latency_bound="40s")),
    ("short turns, no tool", replace(CHAT, workload="S", turns=4, tool_time=None, tpot="40ms")),
    ("few agents, fast tokens", replace(CHAT, workload="1000/200", turns=5, agents=16, tpot="12ms")),
    ("draft tokens", replace(CHAT, workload="300/150", draft_acceptance="0.7", num_speculative_tokens="2")),
    (
        "70B on eight GPUs",
        replace(CHAT, model="llama-3.1-70b", cluster="8xH100-SXM", workload="500/100", ttft="3s"),
    ),
)


def best_of_grid(problem: TuneProblem) -> tuple[float, float, int]:
    """Return the excess and the turns/s of the grid's best point, and the number of its points."""
    agents, search, drafts, setting = problem.options.agents, problem.search, problem.drafts, problem.settings[0]
    assert agents, "a closed loop has agents"
    sample = agent_work(problem, agents)[0].sample(agents)
    limits = Limits(problem.bounds_s[0], ttft_s=search.ttft_s, tpot_s=search.tpot_s)
    setting = replace(setting, speculation=drafts.at(drafts.only) if drafts else None)
    played = []
    for policy, own in agent_searches(setting, sample, limits, search).items():
        own.replays = 10**9
        for space in spaces(policy, own.problem) if TRAITS[policy].mixed else ():
            assert isinstance(space, Candidates), "these policies have no families"
            first, other = space.variables
            share = own.meter.together(space.where.replicas)
            batches = {min(max(1, round(part * share)), first.values[-1]) - first.values[0] for part in SHARES}
            sought = np.geomspace(other.values[0], other.values[-1], OTHERS)
            places = {int(np.abs(np.log(np.array(other.values) / value)).argmin()) for value in sought}
            for point in itertools.product(sorted(batches), sorted(places)):
                if lead := own.replayed_at(space, point):
                    played.append((lead.played.excess, lead.played.seconds))
    excess, seconds = min(played)
    return excess, 1 / seconds, len(played)


def compare(number: int) -> bool:
    """Print a question's answer beside the grid's best point; return whether it is good enough."""
    what, asked = QUESTIONS[number - 1]
    problem, begin = read_problem(asked), time.perf_counter()
    answer = answer_agents(problem)
    seconds = time.perf_counter() - begin
    excess, best, points = best_of_grid(problem)
    tuned, most = answer.best.tuned, answer.most
    reached = tuned.estimate.throughput_seq_s if tuned.estimate else 0.0
    cached = answer.best.cached_shares.get(tuned.schedule.policy, 0.0) if tuned.schedule else 0.0
    kept = (
        f"{best / reached - 1:+.1%}" if reached and not excess else f"late by {excess:.1%}" if excess else "keeps them"
    )
    print(
        f"{number:>2} {what:<31}{answer.best.agents:>7}{reached:>9.2f}{cached:>8.1%}"
        f"{most.agents if most else '–':>7}{tuned.search.replays:>9}{seconds:>9.1f}{points:>6}  {kept}",
        flush=True,
    )
    return bool(excess) or best <= (1 + MARGIN) * reached


def main() -> int:
    """Compare all questions, or those of --only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="numbers of questions, from 1 on, separated by commas")
    only = parser.parse_args().only
    chosen = [int(text) for text in only.split(",")] if only else range(1, len(QUESTIONS) + 1)
    print(HEAD)
    good = [compare(number) for number in chosen]
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
