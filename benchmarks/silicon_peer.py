"""What aiconfigurator itself estimates for rows of its table of measurements, one JSON line for each.

The rows are those of table (b) of benchmarks/silicon.py, or with `--experts` the aggregated ones of the mixtures of
experts of benchmarks/silicon_experts.py. It runs where aiconfigurator 0.12.0 is installed with all it needs, which may
be another environment than ours:

    python benchmarks/silicon_peer.py [--experts] > estimates.jsonl
"""

import csv
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

KV = {"h100_sxm": "bfloat16", "h200_sxm": "fp8", "b200_sxm": "fp8", "b300_sxm": "fp8"}
"""The dtype of keys and values, as in table (b); that of gpt-oss has 16 bits everywhere."""
DENSE = "meta-llama/Llama-3.1-70B"
EXPERTS = ("MiniMaxAI/MiniMax-M2.5", "Qwen/Qwen3-235B-A22B-FP8", "openai/gpt-oss-120b")
QUANTISED = {("MiniMaxAI/MiniMax-M2.5", "fp4"): "nvidia/MiniMax-M2.5-NVFP4"}
"""(Model, precision) → the checkpoint with that precision."""


def dense_arguments(row: dict[str, str]) -> dict[str, object] | None:
    """The model and what it is estimated with; None for rows of other models."""
    if row["model_path"] != DENSE or row["system"] not in KV or row["precision"] != "fp8":
        return None
    return {
        "model_path": "meta-llama/Meta-Llama-3.1-70B",
        "gemm_quant_mode": "fp8",
        "kvcache_quant_mode": KV[row["system"]],
    }


def expert_arguments(row: dict[str, str]) -> dict[str, object] | None:
    """The same for mixtures of experts."""
    model = row["model_path"]
    if model not in EXPERTS or row["system"] not in KV or row["mode"] != "agg":
        return None
    if sorted((row["moe_tp_size"], row["moe_ep_size"])) != sorted(("1", row["tp_size"])):
        return None  # splits that are not compared
    return {
        "model_path": QUANTISED.get((model, row["precision"]), model),
        "kvcache_quant_mode": "bfloat16" if "gpt-oss" in model else KV[row["system"]],
        "moe_tp_size": int(row["moe_tp_size"]),
        "moe_ep_size": int(row["moe_ep_size"]),
    }


def rows(experts: bool) -> Iterator[tuple[dict[str, str], dict[str, object]]]:
    """The rows, and what each is estimated with."""
    import aiconfigurator_core

    table = Path(aiconfigurator_core.__file__).parent / "systems" / "silicon_sample.csv"
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            arguments = expert_arguments(row) if experts else dense_arguments(row)
            if arguments:
                yield row, arguments


def main() -> None:
    """Estimate every row; those that it refuses (memory, no data) are left out and counted on standard error."""
    import yaml
    from aiconfigurator.cli.api import cli_estimate

    yaml.SafeLoader = yaml.CSafeLoader  # it reads its lists of kernels anew for each estimate
    logging.disable(logging.CRITICAL)
    refused = count = 0
    for row, arguments in rows("--experts" in sys.argv):
        count += 1
        try:
            estimate = cli_estimate(
                arguments.pop("model_path"),
                row["system"],
                backend_name=row["backend"],
                isl=int(row["isl"]),
                osl=int(row["osl"]),
                batch_size=int(row["batch_size"]),
                tp_size=int(row["tp_size"]),
                **arguments,
            )
        except (RuntimeError, ValueError, AssertionError, LookupError):
            refused += 1
            continue
        print(json.dumps({"id": row["id"], "ttft_ms": estimate.ttft, "tpot_ms": estimate.tpot}), flush=True)
    print(f"{refused} of {count} rows were refused", file=sys.stderr)


if __name__ == "__main__":
    main()
