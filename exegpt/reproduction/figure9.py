"""Figure 9: memory of FasterTransformer, WAA-C and WAA-M without a bound, OPT-13B and GPT-3 101B, tasks T and G.

Every split of the devices is searched. WAA-C's is the one nearest the ratio of computing times, WAA-M's the one whose
sides differ least in memory in use per device. The figure's bars have no numbers, so only its statements are compared.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from exegpt.report.sections import Section
from exegpt.reproduction.faster_transformer import best_under, static_batches
from exegpt.reproduction.setup import Setup, paper_mode, setup
from xcore.quantity import counted, signed_percent
from xcore.specs.schedule import BLOCK_SIZE, Stage
from xscheduler.allocation import uniform_stages
from xscheduler.search_problem import Limits, SearchProblem
from xscheduler.spaces.waa import gpu_splits, memory_split, time_split
from xsimulator.cost.memory import StageMemory
from xsimulator.estimates import controls_of, outcome
from xsimulator.steady import static
from xsimulator.steady.outcome import memory

CASES = (("opt-13b", "4xA40"), ("gpt3-101b", "2x8xA100-SXM-80GB"))
TASKS = ("T", "G")
PAPER = {"opt-13b": 0.18, "gpt3-101b": 0.29}
"""Model memory of WAA over FasterTransformer's, as the paper's text says."""


@dataclass(frozen=True)
class MemoryUse:
    """Memory in use of one scheme, in bytes."""

    scheme: str
    encoding: int
    """Devices that only encode."""
    sides: tuple[float, ...]
    """Mean of a device, on each side; one figure if each device does both."""
    spread: float
    """Most that two devices in use differ."""
    weights: float
    """Bytes of the weights on all devices."""
    cache: float
    """Bytes of keys and values on all devices."""
    throughput_seq_s: float

    @property
    def imbalance(self) -> float:
        """Return by how much the means of the sides differ."""
        return max(self.sides) - min(self.sides)


@dataclass(frozen=True)
class Figure9Row:
    """One model and task."""

    model: str
    cluster: str
    task: str
    ft: MemoryUse
    waa_c: MemoryUse
    waa_m: MemoryUse


@dataclass(frozen=True)
class Figure9:
    """All rows."""

    rows: tuple[Figure9Row, ...]


def reproduce(progress: Callable[[int, int], None] = lambda done, total: None) -> Figure9:
    """Search every split of every case."""
    rows, cases = [], [(*where, task) for where in CASES for task in TASKS]
    for done, case in enumerate(cases, 1):
        rows.append(row(*case))
        progress(done, len(cases))
    return Figure9(tuple(rows))


def row(model: str, cluster: str, task: str) -> Figure9Row:
    """Return the memory of each scheme."""
    where = setup(model, cluster, task)
    scenario = where.scenario(uniform_stages(where.model, where.cluster, 1))
    problem = SearchProblem(scenario.replica.cost_model, scenario.load, Limits(), {"replicas": 1})
    devices = where.cluster.devices
    by_time = time_split(problem, devices)
    splits = gpu_splits(problem, devices, by_time, memory_split(problem, devices))
    uses = {n: use for n in splits if (use := _waa(where, n))}
    computing = min(uses, key=lambda n: (abs(n - by_time), n))
    balanced = min(uses, key=lambda n: (uses[n].imbalance, n))
    return Figure9Row(model, cluster, task, _faster_transformer(where), uses[computing], uses[balanced])


def _waa(where: Setup, encoding: int) -> MemoryUse | None:
    """Return the memory of the best schedule with so many encoding devices; None if memory holds none."""
    fixed = {"replicas": 1, "encode_devices": encoding}
    best = paper_mode(where, None, policies=("waa-c",), fixed=fixed).schedule
    if best is None:
        return None
    scenario = where.scenario(best.stages)
    result = outcome(scenario, best.policy, controls_of(best))
    return _use("WAA", best.stages, memory(scenario, result), result.throughput)


def _faster_transformer(where: Setup) -> MemoryUse:
    """Return the memory of FasterTransformer's batch of highest throughput."""
    stages = uniform_stages(where.model, where.cluster, where.cluster.devices_per_node)
    batch = best_under(static_batches(where), None)
    scenario = where.scenario(stages, form="paper")
    step = static.outcome(scenario, batch.batch).demand.step
    blocks = batch.batch * -(-(where.workload.input.max + where.workload.output.max) // BLOCK_SIZE)
    held = tuple((stage, blocks) for stage in scenario.replica.memory(step))
    return _use("FT", stages, held, batch.throughput_seq_s)


def _use(scheme: str, stages: Sequence[Stage], held: Sequence[tuple[StageMemory, int]], throughput: float) -> MemoryUse:
    ranks = [(stage.phase, *own) for stage, own in zip(stages, held, strict=True) for _ in stage.devices]
    used = [of.bytes(blocks) for _, of, blocks in ranks]
    sides = [
        [bytes_ for bytes_, (phase, *_) in zip(used, ranks, strict=True) if (phase == "encode") == encodes]
        for encodes in (True, False)
    ]
    return MemoryUse(
        scheme,
        len(sides[0]),
        tuple(sum(side) / len(side) for side in sides if side),
        max(used) - min(used),
        sum(of.weights for _, of, _ in ranks),
        sum(of.block * blocks for _, of, blocks in ranks),
        throughput,
    )


def sections(figure: Figure9) -> list[Section]:
    """Return a line for each scheme, and the paper's statements."""
    heads = ("model", "task", "scheme", "encoding", "encoder GPU", "decoder GPU", "spread", "model", "over FT's", "KV")
    return [
        Section(
            "figure9: memory in use without a bound, GB (encoding: devices that only encode)",
            (*heads, "seq/s"),
            tuple(line for row in figure.rows for line in _lines(row)),
            (
                "The paper: balanced except OPT on G, where both variants take one encoder and three decoders; model "
                "memory +18 % (OPT) and +29 % (GPT-3) over FT. Two copies of the weights are +100 % of FT's model; "
                "in brackets the second copy over all of FT's memory in use.",
                *(_statement(row) for row in figure.rows),
            ),
        )
    ]


def _lines(row: Figure9Row) -> Iterator[tuple[str, ...]]:
    ft = row.ft
    in_use = sum(ft.sides) * _devices(row)
    for name, use in (("FT", ft), ("WAA-C", row.waa_c), ("WAA-M", row.waa_m)):
        more = use.weights - ft.weights
        over = "–" if use is ft else f"{signed_percent(more / ft.weights)} ({signed_percent(more / in_use)})"
        sides = [f"{side / 1e9:.1f}" for side in use.sides]
        figures = [f"{value / 1e9:.1f}" for value in (use.spread, use.weights)]
        cells = (*(sides if len(sides) == 2 else ("–", *sides)), *figures, over, f"{use.cache / 1e9:.1f}")
        yield (row.model, row.task, name, str(use.encoding), *cells, f"{use.throughput_seq_s:.2f}")


def _devices(row: Figure9Row) -> int:
    return setup(row.model, row.cluster, row.task).cluster.devices


def _statement(row: Figure9Row) -> str:
    use = row.waa_m
    same = "the same split as" if row.waa_c.encoding == use.encoding else "another split than"
    share = use.imbalance / max(use.sides)
    encoders = counted(use.encoding, "encoding device")
    return f"{row.model} on {row.task}: WAA-M takes {encoders}, {same} WAA-C's; its sides differ by {share:.0%}."
