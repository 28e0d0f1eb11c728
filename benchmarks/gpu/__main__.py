"""This machine's GPU: whether kernels and engine are right on it, and how fast they are beside peers and the roofline.

python -m benchmarks.gpu --out gpu.json       # ten minutes on one GPU; its profile goes beside, to gpu.profile.json
python -m benchmarks.gpu --interpret          # no GPU: tiny shapes in Triton's interpreter, for correctness alone
python -m benchmarks.gpu --compile 80,90      # no GPU: compiles every kernel for these compute capabilities
"""

import argparse
import importlib.metadata
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest import mock

PARTS = ("checks", "engine", "shares", "steps", "serving", "ranks", "profile", "times")
"""What is done on a GPU, in this order."""
_BATCHES = (1, 64, 256)
"""Sequences of 1,024 tokens in the decoding iterations that are timed."""


def main(arguments: list[str] | None = None) -> int:
    """Check and time, or compile; print, write. 0 where all is right, 1 where a kernel isn't, 2 for a bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="write the results to this JSON file")
    parser.add_argument("--limit-s", type=float, default=540.0, help="begin no part, and time no kernel, later (540)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--interpret", action="store_true", help="tiny shapes in Triton's interpreter")
    parser.add_argument("--compile", metavar="CC[,CC]", help="compile for compute capabilities such as 80,90")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    try:
        capabilities = [int(cc) for cc in options.compile.split(",")] if options.compile else []
    except ValueError:
        return _refuse(f"--compile '{options.compile}' isn't a list of compute capabilities such as 80,90.")
    parts = options.parts.split(",")
    if unknown := [name for name in parts if name not in PARTS]:
        return _refuse(f"--parts '{unknown[0]}' isn't known: {', '.join(PARTS)} are.")
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    elif os.environ.get("TRITON_INTERPRET") == "1":
        return _refuse("TRITON_INTERPRET=1 is set, so that kernels would be interpreted: unset it, or add --interpret.")

    import torch

    report: dict[str, Any] = {"provenance": _provenance()}
    if capabilities:
        from benchmarks.gpu.compiled import LIMITS

        unknown = [cc for cc in capabilities if cc not in LIMITS]
        if unknown:
            return _refuse(f"--compile {unknown[0]} isn't known: {', '.join(map(str, LIMITS))} are.")
        report["compiled"] = _compile(capabilities)
    elif options.interpret:
        from benchmarks.kernels.case import TINY

        with _as_on_a_gpu():
            report["checks"] = _check(TINY, torch.device("cpu"))
        report["engine"] = _interpreted_engine()
    elif torch.cuda.is_available():
        for name, rows in _parts(parts, options.out, began + options.limit_s):
            report[name] = rows
            _write(options.out, report)  # whatever comes of the rest
    else:
        return _refuse(
            "This machine has no CUDA device that torch sees: run it where there is one, or with --interpret (tiny "
            "shapes, correctness alone) or --compile 90 (compiles for a GPU that isn't there)."
        )
    _write(options.out, report)
    return 1 if any("failed" in row for part in PARTS for row in report.get(part, [])) else 0


def _parts(names: list[str], out: str | None, deadline: float) -> Iterator[tuple[str, Any]]:
    """The results of each part, as long as there is time."""
    import torch

    device = torch.device("cuda")
    if lack := _no_flashinfer(device):
        print(f"left out: {lack}")
    if {"steps", "times"} & {*names}:
        roofline = _roofline(device)
        yield "roofline", asdict(roofline)
    part: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "checks": lambda: _check(_real_sizes(), device),
        "engine": lambda: [*_engine(12, 0, device), *_flashinfer_engine(device)],
        "shares": lambda: _shares(device),
        "ranks": lambda: _two_ranks(device),
        "steps": lambda: [
            row for way in _ways(device) for batch in _BATCHES for row in _steps(device, roofline, batch, way)
        ],
        "serving": lambda: _serving(device),
        "profile": lambda: _profile(device, out),
        "times": lambda: _time(_real_sizes(), device, roofline, deadline),
    }
    for name in names:
        if time.perf_counter() > deadline:
            print(f"left out for lack of time: {name}")
            yield name, [{"left_out": "no time left"}]
        else:
            yield name, part[name]()
            torch.cuda.empty_cache()


def _refuse(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 2


def _write(out: str | None, report: dict[str, Any]) -> None:
    if out:
        Path(out).write_text(json.dumps(report, indent=1), encoding="utf-8")


def _provenance() -> dict[str, Any]:
    import torch

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        **{name: importlib.metadata.version(name) for name in ("torch", "triton")},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
    }


def _real_sizes() -> Any:
    """The real shapes, without the caches that this device can't hold."""
    import torch

    from benchmarks.kernels.case import REAL, fitting

    sizes = fitting(REAL, torch.cuda.get_device_properties(0).total_memory, 2)
    for number, context in REAL.decoding:
        if (number, context) not in sizes.decoding:
            print(f"left out for lack of memory: decoding, {number} × 1 of {context}")
    return sizes


def _check(sizes: Any, device: Any) -> list[dict[str, Any]]:
    import torch

    from benchmarks.kernels.cases import all_cases
    from benchmarks.kernels.check import check

    rows = []
    for dtype in (torch.float16, torch.bfloat16):
        for case in all_cases(sizes, dtype, device):
            row = _row(case)
            try:
                verdict = check(case)
            except Exception as error:  # the others are still worth knowing
                row["failed"] = _why(error)
            else:
                row |= {name: value if math.isfinite(value) else None for name, value in asdict(verdict).items()}
                if not verdict.passed:
                    row["failed"] = (
                        f"the error is {verdict.error:.1e}, of the worst row {verdict.row_error:.1e}, and "
                        f"{verdict.allowed:.1e} is allowed"
                    )
            rows.append(row)
            outcome = row.get("failed") or f"ok, error {row['error']:.1e}, of the worst row {row['row_error']:.1e}"
            print(outcome, f" {_title(row)}", flush=True)
    print(f"{len(rows)} comparisons, {sum('failed' in row for row in rows)} wrong.")
    return rows


def _engine(*arguments: Any) -> list[dict[str, Any]]:
    """The engine's tokens in float32 beside transformers'."""
    from benchmarks.tokens import run

    return _compared(lambda: run(*arguments))


def _no_flashinfer(device: Any) -> str | None:
    """Why FlashInfer can't be compared here; None where it can."""
    import torch

    from exegpt.kernels.attention_flashinfer import why_not

    return why_not(device, torch.bfloat16, 128)


def _ways(device: Any) -> list[str]:
    """Whose attention is measured."""
    return ["triton"] if _no_flashinfer(device) else ["triton", "flashinfer"]


def _flashinfer_engine(device: Any) -> list[dict[str, Any]]:
    """The engine's tokens by FlashInfer beside those by Triton, in float16."""
    from benchmarks.tokens import run_flashinfer

    if lack := _no_flashinfer(device):
        return [{"left_out": lack}]
    return _compared(lambda: run_flashinfer(12, 0, device), "Triton's", "float16")


def _two_ranks(device: Any) -> list[dict[str, Any]]:
    """The same of two ranks, which share the GPU where there is one."""
    from benchmarks.job import has_mpi
    from benchmarks.tokens import run_two_ranks

    if not has_mpi():
        print("left out for lack of mpirun or mpi4py: the engine on two ranks")
        return [{"left_out": "no mpirun or no mpi4py"}]
    return _compared(lambda: run_two_ranks(12, 0, device))


def _shares(device: Any) -> list[dict[str, Any]]:
    """A product, and two models, on shares of the multiprocessors."""
    from benchmarks.gpu.shares import model_times, product_times

    rows: list[dict[str, object]] = []
    for measure in (product_times, model_times):
        try:
            rows += measure(device)
        except Exception as error:
            rows.append({"failed": _why(error)})
    for row in rows:
        print(
            row.get("failed") or "ok",
            {name: round(value, 3) for name, value in row.items() if isinstance(value, float)},
        )
    return rows


def _compared(
    compare: Callable[[], list[Any]], other: str = "transformers'", dtype: str = "float32"
) -> list[dict[str, Any]]:
    try:
        results = compare()
    except (Exception, SystemExit) as error:  # a failed job has printed why, and ended
        print(f"{_why(error)}  the engine's tokens")
        return [{"failed": _why(error)}]
    rows = []
    for result in results:
        row = asdict(result) | (
            {"failed": f"{result.differences} outputs are not {other}"} if result.differences else {}
        )
        rows.append(row)
        verdict = row.get("failed") or f"ok, {result.tokens} tokens, {result.near_ties} near-ties"
        print(f"{verdict}  engine, {result.arch}, {result.policy}, {dtype}", flush=True)
    return rows


def _interpreted_engine() -> list[dict[str, Any]]:
    """The same of a tiny model, whose kernels are interpreted on the CPU."""
    from benchmarks.model_sizes import TINY
    from xrunner.models.device import CPU

    with _as_on_a_gpu():
        return _engine(3, 0, CPU, ("llama",), TINY)


def _as_on_a_gpu() -> Any:
    """Within it the kernels for GPUs take the CPU's tensors: they are interpreted, or compiled and not run."""
    from exegpt.kernels import gpu_device

    return mock.patch.object(gpu_device, "on_gpu", lambda x: True)


def _roofline(device: Any) -> Any:
    import torch

    from benchmarks.kernels.timing import measure_roofline

    roofline = measure_roofline(torch.bfloat16, device)
    bandwidths = ", ".join(f"{name} {bandwidth / 1e9:.0f} GB/s" for name, bandwidth in roofline.bandwidths.items())
    print(f"Roofline: {bandwidths}; {roofline.rate / 1e12:.0f} TFLOP/s")
    if not roofline.sheet_bandwidth:
        print(f"No data sheet's bandwidth: '{torch.cuda.get_device_name(device)}' is none of exegpt's device kinds.")
    return roofline


def _steps(device: Any, roofline: Any, batch: int, attention: str = "triton") -> list[dict[str, Any]]:
    """A decoding iteration of Llama-3.1-8B with random weights."""
    from benchmarks.gpu.model import time_step
    from xcore.specs.builtin_models import builtin_model
    from xrunner.comm.gpu import Gpu

    try:
        step = time_step(builtin_model("llama-3.1-8b"), "bf16", batch, 1024, Gpu(device), roofline, print, attention)
    except Exception as error:
        print(f"{_why(error)}  a decoding iteration, attention by {attention}")
        return [{"failed": _why(error)}]
    if step is None:
        return []
    row = asdict(step) | ({} if step.alike else {"failed": "the graph's tokens are not the eager ones"})
    print(
        row.get("failed") or "ok",
        f" decoding {step.batch} × 1 of {step.context}, {step.model}, bfloat16, {step.attention}: "
        f"graph {step.graph * 1e3:.2f} ms, eager {step.eager * 1e3:.2f} ms, {step.bound / step.graph:.1%} and "
        f"{step.bound / step.eager:.1%} of the roofline ({step.bound * 1e3:.2f} ms)",
        flush=True,
    )
    return [row]


def _serving(device: Any) -> list[dict[str, Any]]:
    """A thousand requests by the engine and by transformers' continuous batching, at the same bound."""
    from benchmarks.gpu.serving import TINYLLAMA, document, measured_model, serve, text

    try:
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            model = measured_model(Path(folder), TINYLLAMA, "bf16", device)
            _say(f"{TINYLLAMA.name} made and profiled in {time.perf_counter() - began:.0f} s")
            rows = serve(*model, 1024, device, report=_say)
    except Exception as error:
        print(f"{_why(error)}  serving")
        return [{"failed": _why(error)}]
    print(text(rows[-1]), flush=True)
    return [document(row) for row in rows]


def _say(line: str) -> None:
    print(line, flush=True)


def _profile(device: Any, out: str | None) -> list[dict[str, Any]]:
    """Measure a layer of Llama-3.1-8B as `exegpt profile` does, and write its profile beside the results."""
    from xcore import document
    from xcore.specs.builtin_models import builtin_model
    from xprofiler.measure import measure_profile

    began = time.perf_counter()
    try:
        profile = measure_profile(builtin_model("llama-3.1-8b"), "bf16", device=device)
    except Exception as error:
        print(f"{_why(error)}  a profile")
        return [{"failed": _why(error)}]
    path = str(Path(out).with_suffix(".profile.json")) if out else None
    if path:
        document.write(path, profile)
    seconds, rest = time.perf_counter() - began, profile.degree(1).decoder.rest
    of_one, of_many = (f"{float(rest(tokens)) * 1e6:.1f} µs" for tokens in (1, 64))
    print(f"Profile {profile.fingerprint} in {seconds:.0f} s: {path or 'kept for this machine'}")
    print(f"A layer without its attention takes {of_one} for 1 token, {of_many} for 64.", flush=True)
    return [{"fingerprint": profile.fingerprint, "seconds": seconds, "file": path}]


def _time(sizes: Any, device: Any, roofline: Any, deadline: float) -> list[dict[str, Any]]:
    import torch

    from benchmarks.kernels.cases import all_cases
    from benchmarks.kernels.timing import device_seconds, time_case

    rows = []
    for case in all_cases(sizes, torch.bfloat16, device):
        row = _row(case)
        rows.append(row)
        if time.perf_counter() > deadline:
            row["left_out"] = "no time left"
            print(f"left out for lack of time  {_title(row)}")
            continue
        try:
            timed = time_case(case, roofline, device_seconds)
        except Exception as error:
            row["failed"] = _why(error)
            print(f"{row['failed']}  {_title(row)}")
            continue
        row |= asdict(timed)
        others = (f"{name} {_seconds(seconds)}" for name, seconds in timed.peers.items())
        shares = ", ".join(f"{share:.1%} by {name}" for name, share in timed.shares.items())
        share_text = f"{_seconds(timed.seconds)}, {timed.share:.1%} of the roofline ({shares})"
        print(f"{share_text}  {_title(row)}:", *others, flush=True)
    return rows


def _compile(capabilities: list[int]) -> list[dict[str, Any]]:
    import torch

    from benchmarks.gpu.compiled import compiling_only, examine
    from benchmarks.kernels.case import SMALL
    from benchmarks.kernels.cases import all_cases

    rows = []
    for capability in capabilities:
        seen = set()
        with compiling_only(capability) as compiled_kernels, _as_on_a_gpu():
            for case in all_cases(SMALL, torch.bfloat16, torch.device("cpu")):
                case.run()
                for kernel in [kernel for kernel in compiled_kernels if kernel.hash not in seen]:
                    seen.add(kernel.hash)
                    facts = examine(kernel, capability)
                    rows.append(_row(case) | {"capability": capability, **asdict(facts)})
                    ahead = "" if facts.buffers is None else f", {facts.buffers} buffers, wait_group {facts.wait_group}"
                    print(
                        f"sm_{capability} {facts.kernel:15} {facts.warps:2} warps, {facts.registers:3} registers, "
                        f"{facts.spilled_bytes:4} B spilled, {facts.shared_bytes:6} B shared, "
                        f"{facts.resident:2} resident, "
                        f"{facts.matrix_instructions:3} matrix instructions{ahead}  {_title(rows[-1])}",
                        flush=True,
                    )
                compiled_kernels.clear()
            _print_balance(capability)
    return rows


def _print_balance(capability: int) -> None:
    """How evenly a work list deals sequences of unlike lengths."""
    import numpy as np
    import torch

    from benchmarks.kernels.case import BLOCK_SIZE, REAL
    from exegpt.kernels.attention import programs_of_decoding
    from exegpt.kernels.work_list import balance, deal

    heads, contexts = REAL.heads, REAL.ragged
    values = torch.empty(0, heads.kv, BLOCK_SIZE, heads.size, dtype=torch.bfloat16)
    programs = programs_of_decoding(heads.query, values)
    assert programs
    first_items, items, _, _ = deal(np.array(contexts), programs, heads.kv)
    print(
        f"sm_{capability} decoding, {contexts[0]} tokens beside {len(contexts) - 1} × {contexts[-1]}: {programs} "
        f"programs for each of {heads.kv} KV heads, "
        f"the greatest share is {balance(first_items, items):.3f} times the mean"
    )


def _row(case: Any) -> dict[str, Any]:
    return {"case": case.name, "shape": case.shape, "dtype": case.dtype}


def _title(row: dict[str, Any]) -> str:
    return f"{row['case']}, {row['shape']}, {row['dtype'].removeprefix('torch.')}"


def _seconds(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value * 1e6:.1f} µs"


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:200]}"


if __name__ == "__main__":
    sys.exit(main())
