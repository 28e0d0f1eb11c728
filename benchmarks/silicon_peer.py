"""What aiconfigurator itself estimates for the rows of table (b) of benchmarks/silicon.py, one JSON line for each.

It runs where aiconfigurator 0.12.0 is installed with all it needs, which may be another environment than ours:

    python benchmarks/silicon_peer.py > estimates.jsonl
"""

import csv
import json
import logging
import sys
from pathlib import Path

KV = {"h100_sxm": "bfloat16", "h200_sxm": "fp8", "b200_sxm": "fp8"}
"""The dtype of keys and values, as in table (b)."""


def main() -> None:
    """Estimate every row; those that it refuses (memory) are left out and counted on standard error."""
    import aiconfigurator_core
    from aiconfigurator.cli.api import cli_estimate

    logging.disable(logging.CRITICAL)
    table = Path(aiconfigurator_core.__file__).parent / "systems" / "silicon_sample.csv"
    refused = 0
    with table.open(encoding="utf-8", newline="") as file:
        every = [r for r in csv.DictReader(file) if r["model_path"].endswith("Llama-3.1-70B")]
    rows = [r for r in every if r["system"] in KV and r["precision"] == "fp8"]
    for row in rows:
        try:
            estimate = cli_estimate(
                "meta-llama/Meta-Llama-3.1-70B",
                row["system"],
                backend_name=row["backend"],
                isl=int(row["isl"]),
                osl=int(row["osl"]),
                batch_size=int(row["batch_size"]),
                tp_size=int(row["tp_size"]),
                gemm_quant_mode="fp8",
                kvcache_quant_mode=KV[row["system"]],
            )
        except RuntimeError:
            refused += 1
            continue
        print(json.dumps({"id": row["id"], "ttft_ms": estimate.ttft, "tpot_ms": estimate.tpot}), flush=True)
    print(f"{refused} of {len(rows)} rows were refused", file=sys.stderr)


if __name__ == "__main__":
    main()
