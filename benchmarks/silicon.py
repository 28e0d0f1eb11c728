"""Predictions from published operator and layer timings beside what others measured on real GPUs.

(a) one vLLM server's run on an RTX PRO 6000, request by request; (b) aggregated serving of Llama-3.1-70B in fp8 on H100
and H200; (c) static batches of Llama-2-70B on A100 and H100. Nothing is measured here and no GPU is needed.

    python -m benchmarks.silicon [--table a|b|c] [--peer estimates.jsonl]
"""

import argparse
import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from xcore.arrays import Array
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile, Table
from xcore.specs.request_times import RequestTimes, latencies, percentiles
from xcore.specs.schedule import Schedule, Stage
from xcore.specs.workload import RequestLengths, Workload
from xscheduler.engine_settings import engine_schedule
from xscheduler.settings import Setting

DATA = Path(os.environ.get("EXEGPT_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


def with_overhead(profile: Profile, seconds: float) -> Profile:
    """The profile with an engine's own time per iteration."""
    return replace(profile, overhead=Table(("batch",), ((1.0,),), (seconds,)))


def chunked_engine(
    model: ModelSpec,
    cluster: str,
    workload: Workload,
    profile: Profile,
    kv_dtype: str,
    tp: int,
    seqs: int,
    tokens: int,
    memory_fraction: float | None = None,
) -> Schedule:
    """The settings of an engine that encodes prompts in chunks: most sequences, most tokens per iteration."""
    where = parse_cluster(cluster, memory_fraction)
    setting = Setting(model, where, workload, profile, kv_dtype, ())
    return engine_schedule(setting, "chunked", tp, None, 16, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def admitted_by_vllm(schedule: Schedule) -> Schedule:
    """The schedule with vLLM's defaults: blocks come as tokens do, and what a preempted request leaves is found again.
    One of the blocks that it allocates holds nothing (its null block).
    """
    return replace(schedule, admission="grow", prefix_caching=True, kv_blocks=schedule.kv_blocks - 1)


# (a) one server's run, request by request

_RUN = DATA / "vllm_runs" / "rtxpro6000_llama-3.1-8b"


def _measured_run() -> tuple[list[RequestLengths], list[RequestTimes]]:
    """The run's requests in order of arrival, and what they experienced since each was queued."""
    rows = [json.loads(line) for line in (_RUN / "requests.jsonl").read_text(encoding="utf-8").splitlines()]
    begin = rows[0]["queued_ts"]
    requests, served = [], []
    for i, row in enumerate(rows):
        names = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
        queued, scheduled, first, last = (row[name] - begin for name in names)
        requests.append(RequestLengths(row["input_toks"], row["output_toks"], queued))
        served.append(RequestTimes(i, row["input_toks"], row["output_toks"], queued, scheduled, first, last))
    return requests, served


@dataclass(frozen=True)
class Run:
    """One server's run beside its replays."""

    kv_tokens: int
    needed_tokens: int
    """The most that 128 of the requests may ever cache."""
    overhead_s: float
    """The engine's time per iteration, calibrated on the TPOT of every tenth request alone."""
    measured: dict[str, Array]
    """`ttft`, `tpot`, `latency` of the other requests in seconds."""
    bare: dict[str, Array]
    """The same, replayed without overhead."""
    predicted: dict[str, Array]


def replayed_run() -> Run:
    """The vLLM run: profile from the GPU's layer timings, replayed by the event simulator."""
    from xprofiler.layer_folder import layers_profile
    from xsimulator.replay.event_simulator import replay

    requests, measured = _measured_run()
    profile = layers_profile(builtin_model("llama-3.1-8b"), _RUN / "profile_tp1")
    workload = Workload.from_requests("run", requests)
    engine = chunked_engine(builtin_model("llama-3.1-8b"), "1xRTXPRO6000", workload, profile, "bf16", 1, 128, 2048)
    schedule = admitted_by_vllm(engine)

    def tpot_of_known(served: Sequence[RequestTimes]) -> float:
        return float(latencies([s for s in served if s.index % 10 == 0], "arrival")["tpot"].mean())

    def replayed(seconds: float) -> tuple[RequestTimes, ...]:
        return replay(schedule, with_overhead(profile, seconds), requests).served

    overhead = calibrated(lambda seconds: tpot_of_known(replayed(seconds)), tpot_of_known(measured))
    runs = (measured, replayed(0.0), replayed(overhead))
    others = [latencies([s for s in run if s.index % 10], "arrival") for run in runs]
    needed = sum(sorted(r.input + r.output for r in requests)[-128:])
    return Run(schedule.kv_blocks * schedule.block_size, needed, overhead, *others)


def table_a() -> None:
    """One server's run, request by request."""
    run = replayed_run()
    print("(a) vLLM 0.19, Llama-3.1-8B in bf16 on one RTX PRO 6000: 300 requests, chunked prefill")
    print(f"    engine's time per iteration {run.overhead_s * 1e3:.2f} ms, from TPOT of every tenth request (0, 10, …)")
    print(f"    KV cache {run.kv_tokens} tokens; 128 sequences need {run.needed_tokens} at most")
    print(f"    {'the other 270 requests':24} {'measured':>9} {'no overhead':>17} {'calibrated':>17}")
    for key in ("ttft", "tpot", "latency"):
        figures = [percentiles(times[key]) for times in (run.measured, run.bare, run.predicted)]
        for name in ("mean", "p50", "p99"):
            m, *predicted = (f[name] or 0.0 for f in figures)
            print(f"    {key + ' ' + name:24} {m:8.4g}s" + "".join(f" {v:8.4g}s {v / m - 1:+7.1%}" for v in predicted))


def calibrated(predicted: Callable[[float], float], measured: float) -> float:
    """The engine's time per iteration, at most 0.1 s, at which a prediction that rises with it equals a measurement."""
    low, high = 0.0, 0.1
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) < measured else (low, middle)
    return (low + high) / 2


# (b) aggregated serving under a fixed concurrency

_ROWS = "silicon_sample.csv"
_MODEL = "meta-llama/Llama-3.1-70B"
_KV = {
    ("h100_sxm", "vllm"): "bf16",
    ("h200_sxm", "vllm"): "fp8",
    ("b200_sxm", "vllm"): "fp8",
    ("h200_sxm", "trtllm"): "fp8",
    ("b200_sxm", "trtllm"): "fp8",
}
"""(system, engine) → dtype of keys and values, which the table doesn't name. On H100 with two GPUs, 32 sequences of
8192 + 1024 tokens already wait for memory: they would all fit in 8 bits. On H200 as many as fit only in 8 bits do not
wait, and B200's rows are of the same kind.
"""
_UNSEEN = "b200_sxm"
"""No row of this system calibrates."""
_PER_CLIENT = 10
"""Requests per client: the measurements, like InferenceMAX's, are taken over ten of each client's."""
_SHORTEST = 0.8
"""Lengths are drawn from 80 % to 100 % of the nominal ones, as those measurements do."""


@dataclass(frozen=True)
class Aggregated:
    """One row: `clients` that each send the next request when the last one ended; milliseconds."""

    name: str
    system: str
    engine: str
    tp: int
    clients: int
    input: int
    output: int
    ttft_ms: float
    tpot_ms: float

    @staticmethod
    def of(row: Mapping[str, str]) -> "Aggregated":
        """Return the measurement of a row of aiconfigurator's `silicon_sample.csv`."""
        return Aggregated(
            name=row["id"],
            system=row["system"],
            engine=row["backend"],
            tp=int(row["tp_size"]),
            clients=int(row["batch_size"]),
            input=int(row["isl"]),
            output=int(row["osl"]),
            ttft_ms=float(row["silicon_ttft_ms"]),
            tpot_ms=float(row["silicon_tpot_ms"]),
        )


def aggregated_rows() -> list[Aggregated]:
    from xprofiler.aiconfigurator import systems_folder

    folder = systems_folder()
    if folder is None:
        raise SystemExit("aiconfigurator is not installed: pip install exegpt[gpu-data]")
    with (folder / _ROWS).open(encoding="utf-8", newline="") as file:
        return [
            Aggregated.of(row)
            for row in csv.DictReader(file)
            if row["model_path"] == _MODEL and (row["system"], row["backend"]) in _KV and row["precision"] == "fp8"
        ]


def predict_aggregated(row: Aggregated, profile: Profile, kv_dtype: str | None = None) -> tuple[float, float]:
    """(TTFT, TPOT) in milliseconds, means over the clients' requests. `kv_dtype`: `_KV`'s where none is named."""
    return predict_clients(row, builtin_model("llama-3.1-70b"), profile, kv_dtype or _KV[row.system, row.engine])


def predict_clients(row: Aggregated, model: ModelSpec, profile: Profile, kv_dtype: str) -> tuple[float, float]:
    """(TTFT, TPOT) in milliseconds, means over the requests of `row.clients` clients of any model.

    A client's next request arrives when one ends, so the n-th request beyond the first of each client arrives at the
    n-th end, without the time outside the engine, which its own first token has. TensorRT-LLM reserves memory for whole
    requests at admission, vLLM doesn't.
    """
    from xprofiler.aiconfigurator import SYSTEMS
    from xsimulator.replay.event_simulator import replay

    rng = np.random.default_rng(0)
    count = _PER_CLIENT * row.clients
    lengths = [rng.integers(int(_SHORTEST * most), most + 1, count) for most in (row.input, row.output)]
    requests = [RequestLengths(int(a), int(b)) for a, b in zip(*lengths, strict=True)]
    workload = Workload.from_requests(row.name, requests)
    cluster = f"{row.tp}x{SYSTEMS[row.system]}"
    schedule = chunked_engine(model, cluster, workload, profile, kv_dtype, row.tp, row.clients, 8192)
    if row.engine == "vllm":
        schedule = admitted_by_vllm(schedule)
    served = sorted(replay(schedule, profile, requests, timeline=False).served, key=lambda s: s.index)
    ends = sorted(s.finish_s - profile.front_end_s for s in served)
    arrivals = [0.0] * row.clients + ends[: count - row.clients]
    ttft = np.mean([s.first_token_s - at for s, at in zip(served, arrivals, strict=True)])
    tpot = latencies(served, "arrival")["tpot"].mean()
    return float(ttft) * 1e3, float(tpot) * 1e3


def table_b(peer: Path | None) -> None:
    """Aggregated serving, and the peer's estimates of the same rows where it gives any.

    The engine's own time per sequence and iteration comes from every tenth row; B200's rows are predicted with what the
    others gave.
    """
    from xprofiler.aiconfigurator import aiconfigurator_profile

    model = builtin_model("llama-3.1-70b")
    profiles = {of: aiconfigurator_profile(model, *of, "fp8", kv) for of, kv in _KV.items()}
    rows = {of: [row for row in aggregated_rows() if (row.system, row.engine) == of] for of in _KV}
    bare = {of: [predict_aggregated(row, profiles[of]) for row in rows[of]] for of in _KV}
    theirs = {}
    if peer:
        theirs = {r["id"]: (r["ttft_ms"], r["tpot_ms"]) for r in map(json.loads, peer.read_text().splitlines())}
    print("(b) Llama-3.1-70B in fp8, aggregated serving: mean absolute errors (signed means)")
    for engine in dict.fromkeys(engine for _, engine in _KV):
        systems = [of for of in _KV if of[1] == engine]
        known = [(rows[of][i], bare[of][i]) for of in systems for i in _tenth(rows[of])]
        each = max(float(np.median([(row.tpot_ms - tpot) / row.clients for row, (_, tpot) in known])), 0.0)
        print(f"  {engine}: {each * 1e3:.1f} us per sequence and iteration are the engine's own, by TPOT of these:")
        print(f"    {', '.join(f'{r.system[:4]} TP {r.tp} {r.input}/{r.output} x{r.clients}' for r, _ in known)}")
        for of in systems:
            profile = replace(profiles[of], overhead=Table(("batch",), ((0.0, 1.0),), (0.0, each * 1e-3)))
            others = sorted(set(range(len(rows[of]))) - set(_tenth(rows[of])))
            left = [rows[of][i] for i in others]
            without = {rows[of][i].name: bare[of][i] for i in others}
            predicted = {row.name: predict_aggregated(row, profile) for row in left}
            compared = [row for row in left if row.name in theirs]
            print(f"  {of[0]} {engine}, KV in {_KV[of]}; {len(left)} of {len(rows[of])} rows")
            _errors("ours, no overhead", left, without)
            _errors("ours", left, predicted)
            if compared:
                _errors(f"no overhead, {len(compared)} rows of the peer's", compared, without)
                _errors("ours, the same rows", compared, predicted)
                _errors("aiconfigurator's own, the same rows", compared, theirs)


def _tenth(rows: Sequence[Aggregated]) -> range:
    """Every tenth row, and no more than a tenth of all; none of the unseen system's."""
    return range(0, 0 if rows[0].system == _UNSEEN else len(rows) // 10 * 10, 10)


def _errors(title: str, rows: Sequence[Aggregated], predicted: Mapping[str, tuple[float, float]]) -> None:
    errors = np.array([np.array(predicted[r.name]) / (r.ttft_ms, r.tpot_ms) - 1 for r in rows])
    size, sign, median = np.abs(errors).mean(axis=0), errors.mean(axis=0), np.median(np.abs(errors), axis=0)
    tpot, ttft = (f"{size[i]:6.1%} ({sign[i]:+6.1%}), median {median[i]:6.1%}" for i in (1, 0))
    print(f"    {title:38} TPOT {tpot}   TTFT {ttft}")


# (c) static batches

_STATIC = {"a100-80gb": "a100_sxm", "h100-80gb": "h100_sxm"}
"""Hardware in the table → system. The rows of the power-capped H100 are left out: they are the others' times 1.3."""
_ONE, _EIGHT = (512, 1, 128), (512, 8, 128)
"""(prompt tokens, batch, output tokens) whose first five rows calibrate the engine's time per step."""


@dataclass(frozen=True)
class Static:
    """Rows of one hardware and tensor-parallel degree; arrays [n], milliseconds."""

    hardware: str
    tp: int
    shapes: Array
    """[n, 3]: prompt tokens, batch, output tokens."""
    prompt_ms: Array
    token_ms: Array


def _static() -> list[Static]:
    with (DATA / "gpu" / "splitwise_perf_model.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == "llama2-70b" and row["hardware"] in _STATIC]
    groups = []
    for hardware, tp in sorted({(row["hardware"], int(row["tensor_parallel"])) for row in rows}):
        group = [row for row in rows if (row["hardware"], int(row["tensor_parallel"])) == (hardware, tp)]
        shapes = np.array([[int(row[k]) for k in ("prompt_size", "batch_size", "token_size")] for row in group])
        times = (np.array([float(row[key]) for row in group]) for key in ("prompt_time", "token_time"))
        groups.append(Static(hardware, tp, shapes, *times))
    return groups


def predict_static(rows: Static, profile: Profile) -> tuple[Array, Array]:
    """(prompt, token) milliseconds of each row, without the engine's own time. A token's context is the prompt and half
    of the output.
    """
    from xsimulator.cost.group import Group
    from xsimulator.cost.stage import stage_costs

    layers = builtin_model("llama-2-70b").layers
    (cost,) = stage_costs(
        (Stage(tuple(range(rows.tp)), rows.tp, "both", None, (0, layers)),),
        lambda tp: Group(profile.degree(tp), profile.overhead),
    )
    length, batch, output = rows.shapes.astype(np.float64).T
    return cost.encode_fixed(batch, length) * 1e3, cost.decode(batch, length + output / 2) * 1e3


@dataclass(frozen=True)
class StaticErrors:
    """Absolute relative errors of one hardware and degree, [4, n]: token and prompt times, both without overhead."""

    hardware: str
    tp: int
    step_ms: float
    """The engine's own time of a decoding step, from five rows."""
    fixed_ms: float
    each_ms: float
    """The engine's own time of an encoding step and of each of its tokens, from ten rows."""
    others: Array
    """Of all rows but those ten."""
    unseen: Array
    """Of all rows but those with the ten's prompts and batches."""


def static_errors() -> list[StaticErrors]:
    """Operator tables, and an engine's time per step from ten of each 105 rows."""
    from xprofiler.aiconfigurator import aiconfigurator_profile

    model = builtin_model("llama-2-70b")
    groups = []
    for rows in _static():
        prompt, token = predict_static(rows, aiconfigurator_profile(model, _STATIC[rows.hardware], "vllm", "fp16"))
        first = [np.flatnonzero((rows.shapes == shape).all(axis=1))[:5] for shape in (_ONE, _EIGHT)]
        step = float(np.median(rows.token_ms[first[0]] - token[first[0]]))
        tokens = rows.shapes[:, 0] * rows.shapes[:, 1]
        least, more = (float(np.median(rows.prompt_ms[i] - prompt[i])) for i in first)
        each = (more - least) / float(tokens[first[1][0]] - tokens[first[0][0]])
        fixed = least - each * float(tokens[first[0][0]])
        predicted = (token + step, prompt + np.maximum(fixed + each * tokens, 0.0), token, prompt)
        measured = (rows.token_ms, rows.prompt_ms) * 2
        errors = np.abs(np.stack([p / m - 1 for p, m in zip(predicted, measured, strict=True)]))
        known = np.isin(np.arange(len(tokens)), np.concatenate(first))
        seen = np.logical_or(*((rows.shapes[:, :2] == shape[:2]).all(axis=1) for shape in (_ONE, _EIGHT)))
        groups.append(StaticErrors(rows.hardware, rows.tp, step, fixed, each, errors[:, ~known], errors[:, ~seen]))
    return groups


def table_c() -> None:
    """Static batches."""
    print("(c) Llama-2-70B in fp16, static batches: median absolute errors")
    print(f"    engine's time per step from the first five rows of (prompt, batch, output) {_ONE} and of {_EIGHT};")
    print("    those rows are left out, 'unseen' leaves out every row of those two prompts and batches")
    columns = ("per decoding step", "per encoding step", "token", "prompt", "unseen", "no overhead")
    print(f"    {'':16} " + " ".join(f"{c:>{w}}" for c, w in zip(columns, (18, 26, 8, 8, 8, 18), strict=True)))
    groups = static_errors()
    for e in groups:
        encoding = f"{e.fixed_ms:6.1f} ms + {e.each_ms * 1e3:5.1f} us/token"
        _static_line(f"{e.hardware} TP {e.tp}", f"{e.step_ms:6.1f} ms", encoding, e.others, e.unseen)
    for tp in sorted({e.tp for e in groups}):
        parts = ([getattr(e, part) for e in groups if e.tp == tp] for part in ("others", "unseen"))
        _static_line(f"both, TP {tp}", "", "", *(np.concatenate(part, axis=1) for part in parts))


def _static_line(title: str, decoding: str, encoding: str, others: Array, unseen: Array) -> None:
    token, prompt, bare_token, bare_prompt = np.median(others, axis=1)
    left = np.median(unseen, axis=1)[1]
    print(
        f"    {title:16} {decoding:>18} {encoding:>26} {token:8.1%} {prompt:8.1%} {left:8.1%}"
        f" {bare_token:9.1%} {bare_prompt:8.1%}"
    )


TABLES = ("a", "b", "c")


def main() -> None:
    """Print one table, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=TABLES)
    parser.add_argument("--peer", type=Path, help="b: the peer's estimates, from benchmarks/silicon_peer.py")
    arguments = parser.parse_args()
    for table in [arguments.table] if arguments.table else TABLES:
        if table in "ac" and not DATA.is_dir():
            print(f"({table}) needs public data, and there is no folder '{DATA}': set EXEGPT_DATA.")
            continue
        {"a": table_a, "b": lambda: table_b(arguments.peer), "c": table_c}[table]()


if __name__ == "__main__":
    main()
