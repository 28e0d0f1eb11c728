"""Exported launch commands, read back and simulated: whether the bounds hold, and the figures are those beside them.

Questions are drawn with a seed over 1 to 16 devices, with bounds so tight that RRA or WAA, which the target doesn't
run, has the best schedule in a third of them.

    python -m benchmarks.exports
    python -m benchmarks.exports --target sglang --questions 20 --parser …/env/bin/python
    python -m benchmarks.exports --questions 20 --seed 1 --commands commands.txt
"""

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exegpt.api.simulate import simulate
from exegpt.api.tuning import BoundedAnswer, TuneProblem, tune_bounds
from exegpt.options.simulate import SimulateOptions
from exegpt.options.tune import TuneOptions
from xcore.document import from_dict
from xcore.specs.bound import ALL_REQUESTS
from xcore.specs.estimate import Estimate
from xscheduler.export import ENGINES, Export, Target
from xscheduler.launch_command import read_launch
from xscheduler.setting_search import SearchOptions
from xscheduler.settings import find_setting
from xscheduler.spaces import POLICIES

AGREE = 0.02
"""Share by which a figure may differ."""
FIGURES = ("throughput_seq_s", "latency_s", "ttft_bounded_s", "tpot_bounded_s")
CLUSTERS = tuple(f"{n}x{{}}" for n in range(1, 9)) + tuple(f"{n}x{{}}" for n in ("2x5", "2x6", "2x7", "2x8", "3x3"))
KINDS = ("H100-SXM", "H200-SXM", "A100-80GB", "L40S", "B200")
MODELS = (("llama-3.1-8b", None), ("qwen3-14b", None), ("qwen3-32b", None), ("llama-3.1-70b", "fp8"))
CONVERTED = {"tensorrt-llm": {"llama-3.1-70b": ("nvidia/Llama-3.1-70B-Instruct-FP8", None)}}
"""Checkpoints in 8 bits, for engines that convert no weights."""
WORKLOADS = ("2048/256", "1024/512", "512/512", "4096/64", "500/1500", "S", "T", "C1")
OTHERS = ("rra", "waa-c", "waa-m")
PARSERS = {
    "sglang": "import shlex, sys\n"
    "from sglang.srt.server_args import prepare_server_args\n"
    "for line in sys.stdin:\n"
    "    words = shlex.split(line)\n"
    "    prepare_server_args(words[words.index('sglang.launch_server') + 1:])\n",
    "vllm": "import shlex, sys\n"
    "from vllm.entrypoints.cli.serve import make_arg_parser\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = make_arg_parser(FlexibleArgumentParser(prog='vllm serve'))\n"
    "for line in sys.stdin:\n"
    "    words = shlex.split(line)\n"
    "    parser.parse_args(words[words.index('serve') + 1:])\n",
}
"""Programs that read commands with the engine's own parser, which ends them with an error for one that it refuses."""


@dataclass(frozen=True)
class Question:
    """What is asked of `tune`; times in seconds."""

    model: str
    dtype: str | None
    cluster: str
    workload: str
    latency_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    engine: str = "vllm"

    @property
    def target(self) -> Target:
        """The engine whose commands are asked for."""
        return Target(self.engine)

    def answer(self, policies: tuple[str, ...] = POLICIES, fixed: dict[str, int] | None = None) -> BoundedAnswer:
        """The best schedules, and the export."""
        search = SearchOptions(ALL_REQUESTS, self.ttft_s, self.tpot_s, policies, "bnb", 0.0, fixed=fixed or {})
        setting = find_setting(
            self.model, self.cluster, self.workload, "roofline", dtype=self.dtype, engine=self.engine
        )
        options = TuneProblem((setting,), (self.latency_s,), search, TuneOptions(advice=False), target=self.target)
        return tune_bounds(options)[0]


@dataclass(frozen=True)
class Check:
    """An export beside its simulation."""

    question: Question
    answer: BoundedAnswer
    export: Export
    simulated: Estimate

    @property
    def winner(self) -> str:
        """The policy of the best schedule of all."""
        assert self.answer.tuned.schedule
        return self.answer.tuned.schedule.policy

    @property
    def difference(self) -> float:
        """The largest relative difference of a figure to the export's."""
        pairs = [(getattr(self.simulated, key), getattr(self.export.estimate, key)) for key in FIGURES]
        return max(float(abs(got / said - 1.0)) for got, said in pairs if got is not None and said)

    @property
    def gain(self) -> float:
        """How much throughput the engine has above the search's schedule, which reserves blocks."""
        assert self.answer.tuned.best_on_engine and self.answer.tuned.best_on_engine.estimate
        return self.simulated.throughput_seq_s / self.answer.tuned.best_on_engine.estimate.throughput_seq_s - 1.0

    @property
    def broken(self) -> list[str]:
        """The bounds that don't hold in the simulation."""
        asked = {"latency_s": "latency_s", "ttft_bounded_s": "ttft_s", "tpot_bounded_s": "tpot_s"}
        limits = {key: getattr(self.question, name) for key, name in asked.items()}
        return [key for key, limit in limits.items() if limit and (getattr(self.simulated, key) or 0.0) > limit]


def read_back(question: Question, export: Export) -> Estimate:
    """What `simulate` predicts of the commands: of those that all nodes of the schedule are started with."""
    with tempfile.TemporaryDirectory() as folder:
        commands = list(export.commands)
        for name, text in export.start.files.items():
            (Path(folder) / name).write_text(text)
            commands = [command.replace(name, f"{folder}/{name}") for command in commands]
        launches = [read_launch(command) for command in commands]
    assert len({tuple(sorted(launch.settings.items())) for launch in launches}) == 1
    said: dict[str, Any] = dict(launches[0].settings)
    assert said["replicas"] == question.target.launch.together(export.schedule)
    said["replicas"] = export.schedule.replicas  # those of all nodes
    names = said.keys() & SimulateOptions.__dataclass_fields__.keys()
    options = SimulateOptions(
        model=launches[0].model,
        cluster=question.cluster,
        workload=question.workload,
        profile=["roofline"],
        engine=launches[0].engine,
        **{name: said.pop(name) for name in names},
    )
    return from_dict(Estimate, simulate(options, said, launches[0].longest).facts, "the estimate")


def drawn(rng: random.Random, engine: str = "vllm") -> Question | None:
    """A question whose bounds are 1.1 to 6 times what one sequence takes at a time; None: the model doesn't fit."""
    model, dtype = rng.choice(MODELS)
    kinds = [kind for kind in KINDS if dtype != "fp8" or not kind.startswith("A100")]
    model, dtype = CONVERTED.get(engine, {}).get(model, (model, dtype))
    cluster, workload = rng.choice(CLUSTERS).format(rng.choice(kinds)), rng.choice(WORKLOADS)
    question = Question(model, dtype, cluster, workload, engine=engine)
    alone = question.answer(("chunked",), {"max_num_seqs": 1}).tuned.estimate
    if alone is None or alone.latency_s is None or alone.ttft_bounded_s is None or alone.tpot_bounded_s is None:
        return None
    which = rng.choice(("latency", "tokens", "token", "token"))
    if which == "latency":
        return replace(question, latency_s=alone.latency_s * rng.uniform(1.1, 4.0))
    bounded = replace(question, tpot_s=alone.tpot_bounded_s * rng.uniform(1.1, 3.0))
    return bounded if which == "token" else replace(bounded, ttft_s=alone.ttft_bounded_s * rng.uniform(1.5, 6.0))


def checks(count: int, seed: int, share: float = 1 / 3, engine: str = "vllm") -> Iterator[Check]:
    """Checks of so many drawn questions with an export; in this share of them RRA or WAA has the best schedule."""
    rng, left = random.Random(seed), {True: round(count * share), False: count - round(count * share)}
    while any(left.values()):
        question = drawn(rng, engine)
        answer = question.answer() if question else None
        if question is None or answer is None or answer.export is None or answer.tuned.schedule is None:
            continue
        other = answer.tuned.schedule.policy in OTHERS
        if left[other]:
            left[other] -= 1
            yield Check(question, answer, answer.export, read_back(question, answer.export))


def accepts(python: Path, engine: str, commands: list[str]) -> bool:
    """Whether the engine's own parser, installed for this Python, accepts all commands; prints its error if not."""
    lines = "".join(f"{line}\n" for line in commands)
    program = [str(python), "-c", PARSERS[engine]]
    done = subprocess.run(program, input=lines, text=True, capture_output=True)
    print(
        f"{engine}'s own parser {'refuses a command' if done.returncode else f'accepts all {len(commands)} commands'}"
    )
    if done.returncode:
        print(done.stderr[-2000:])
    return done.returncode == 0


def main() -> None:
    """Print each check, and exit with 1 if a bound is broken or a figure differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--target", choices=ENGINES, default="vllm", help="The engine whose commands are exported.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parser", type=Path, help="A Python with the target, whose own parser reads each command.")
    parser.add_argument("--commands", type=Path, help="Write the commands to this file, for the target's own parser.")
    arguments = parser.parse_args()
    if arguments.parser and arguments.target not in PARSERS:
        parser.error(f"--parser knows the parser of {', '.join(PARSERS)} only")
    found = []
    for check in checks(arguments.questions, arguments.seed, engine=arguments.target):
        found.append(check)
        q = check.question
        state = ", ".join(check.broken) or "ok"
        print(f"{len(found):3} {q.model} {q.cluster} {q.workload} best: {check.winner:8}", end=" ")
        print(f"differs by {check.difference:.2%}, bounds: {state}, beyond the search {check.gain:+.2%}", flush=True)
    broken, off = sum(bool(c.broken) for c in found), sum(c.difference > AGREE for c in found)
    others = sum(c.winner in OTHERS for c in found)
    worst, gains = max(check.difference for check in found), [check.gain for check in found]
    print(f"{len(found)} exports, RRA or WAA best in {others}: {broken} break a bound")
    print(f"{off} have a figure that differs by more than {AGREE:.0%}; at worst {worst:.2%}")
    print(f"throughput beside that of the schedule that was searched: {min(gains):+.2%} to {max(gains):+.2%}")
    if arguments.commands:
        arguments.commands.write_text("\n".join(c.export.text for c in found) + "\n")
    lines = [line for check in found for line in check.export.commands]
    refused = arguments.parser and not accepts(arguments.parser, arguments.target, lines)
    sys.exit(bool(broken or off or refused))


if __name__ == "__main__":
    main()
