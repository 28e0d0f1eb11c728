"""The Triton kernels on this machine's GPU: right, and how fast beside their peers and the roofline.

python -m benchmarks.gpu --out gpu.json       # ten minutes on one GPU
python -m benchmarks.gpu --interpret          # no GPU: tiny shapes in Triton's interpreter, for correctness alone
python -m benchmarks.gpu --compile 80,90      # no GPU: compiles every kernel for these compute capabilities
"""

import argparse
import importlib.metadata
import json
import os
import sys
import time
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any


def main(arguments: list[str] | None = None) -> int:
    """Parse, check, time, write. 0 where all is right, 1 where a kernel is wrong, 2 for a bad input."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="write the results to this JSON file")
    parser.add_argument("--limit-s", type=float, default=540.0, help="time no further kernel after so long (540)")
    parser.add_argument("--interpret", action="store_true", help="tiny shapes in Triton's interpreter, without a GPU")
    parser.add_argument("--compile", metavar="CC[,CC]", help="compile only, for compute capabilities such as 80,90")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    os.environ["TRITON_INTERPRET"] = "1" if options.interpret else "0"  # read when Triton is imported: from here on
    try:
        capabilities = [int(cc) for cc in options.compile.split(",")] if options.compile else []
    except ValueError:
        return _refuse(f"--compile '{options.compile}' isn't a list of compute capabilities such as 80,90.")

    import torch

    if not (options.interpret or capabilities or torch.cuda.is_available()):
        return _refuse(
            "This machine has no CUDA device that torch sees: run it where there is one, or with --interpret (tiny "
            "shapes, correctness alone) or --compile 90 (compiles for a GPU that isn't there)."
        )
    torch.manual_seed(0)
    report: dict[str, Any] = {"provenance": _provenance()}
    if capabilities:
        report["compiled"] = _compile(capabilities)
        failed = 0
    else:
        report["checks"] = _check(options.interpret)
        failed = sum(not row["passed"] for row in report["checks"])
        print(f"{len(report['checks'])} comparisons, {failed} wrong.")
    if not (options.interpret or capabilities):
        report |= _time(began + options.limit_s)
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    return 1 if failed else 0


def _refuse(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 2


def _provenance() -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    return {
        "device": device,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        **versions,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
    }


def _check(interpret: bool) -> list[dict[str, Any]]:
    import torch

    from benchmarks.gpu.cases import TINY, all_cases
    from benchmarks.gpu.check import check

    device = torch.device("cpu" if interpret else "cuda")
    sizes = TINY if interpret else _real_sizes()
    rows = []
    for dtype in (torch.float16, torch.bfloat16):
        for case in all_cases(sizes, dtype, device):
            verdict = check(case)
            rows.append({**asdict(verdict), "passed": verdict.passed})
            mark = "ok   " if verdict.passed else "WRONG"
            print(f"{mark} {verdict.error:8.1e} of {verdict.allowed:7.1e}  {_title(case)}", flush=True)
    return rows


def _real_sizes() -> Any:
    """The real shapes, without the caches that this device can't hold."""
    import torch

    from benchmarks.gpu.cases import REAL, fitting

    sizes = fitting(REAL, torch.cuda.get_device_properties(0).total_memory, 2)
    for number, context in REAL.decoding:
        if (number, context) not in sizes.decoding:
            print(f"left out for lack of memory: decoding, {number} × 1 of {context}")
    return sizes


def _time(deadline: float) -> dict[str, Any]:
    import torch

    from benchmarks.gpu.cases import all_cases
    from benchmarks.gpu.timing import measure_roofline, time_case

    device, dtype = torch.device("cuda"), torch.bfloat16
    roofline = measure_roofline([dtype], device)
    print(f"Roofline: {roofline.bandwidth / 1e9:.0f} GB/s, {roofline.rate[str(dtype)] / 1e12:.0f} TFLOP/s")
    rows, left_out = [], []
    for case in all_cases(_real_sizes(), dtype, device):
        if time.perf_counter() > deadline:
            left_out.append(_title(case))
            continue
        timed = time_case(case, roofline)
        rows.append({**asdict(timed), "share": timed.share})
        others = "".join(
            f"  {name} {seconds if isinstance(seconds, str) else f'{seconds * 1e6:.1f} µs'}"
            for name, seconds in timed.peers.items()
        )
        print(f"{timed.seconds * 1e6:9.1f} µs {timed.share:6.1%} of the roofline  {_title(case)} |{others}", flush=True)
    for title in left_out:
        print(f"left out for lack of time: {title}")
    return {"roofline": asdict(roofline), "times": rows, "left_out": left_out}


def _compile(capabilities: list[int]) -> list[dict[str, Any]]:
    import torch

    from benchmarks.gpu.cases import SMALL, all_cases
    from benchmarks.gpu.compiled import compiling_only, examine

    rows = []
    for capability in capabilities:
        seen = set()
        with compiling_only(capability) as made:
            for case in all_cases(SMALL, torch.bfloat16, torch.device("cpu")):
                case.run()
                for kernel in [kernel for kernel in made if kernel.hash not in seen]:
                    seen.add(kernel.hash)
                    one = examine(kernel, capability)
                    rows.append({"capability": capability, "case": _title(case), **asdict(one)})
                    print(
                        f"sm_{capability} {one.name:9} {one.warps:2} warps, {one.registers:3} registers, "
                        f"{one.spilled_bytes:4} B spilled, {one.shared_bytes:6} B shared, {one.matrix_instructions:3} "
                        f"matrix instructions, {one.async_copies:3} copies ahead  {_title(case)}",
                        flush=True,
                    )
                made.clear()
    return rows


def _title(case: Any) -> str:
    return f"{case.name}, {case.shape}, {case.dtype.removeprefix('torch.')}"


if __name__ == "__main__":
    sys.exit(main())
