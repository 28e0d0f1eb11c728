"""Mixtures of experts: time per token by data sheet, beside what others measured under a fixed number of clients.

Rows are those of aiconfigurator's `silicon_sample.csv` whose experts are split over the tensor-parallel group and whose
mean time to first token is below ten seconds: beyond, the server held fewer sequences than there were clients. The
grouped products were fitted to tables of kernels (`benchmarks/grouped_products.py`); nothing is fitted to these rows.

    python -m benchmarks.silicon_experts
"""

import csv
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.engine_spec import find_engine
from xcore.specs.profile import Profile
from xcore.specs.workload import Workload
from xprofiler.aiconfigurator import SYSTEMS, systems_folder
from xprofiler.roofline import roofline_profile
from xscheduler.engine_settings import engine_schedule
from xscheduler.settings import Setting
from xsimulator.estimates import estimate

MODELS = {
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
}
ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt-llm"}
MEAN_LENGTH = 0.9
"""Lengths are drawn from 80 % to 100 % of the nominal ones."""
TOKENS = 8192
LATEST_MS = 1e4
"""Longest mean time to first token of the rows that are compared."""


@dataclass(frozen=True)
class Group:
    """Rows of one model, system, engine, dtype and degree."""

    model: str
    system: str
    engine: str
    dtype: str
    tp: int

    def profile(self) -> Profile:
        """The data sheet's profile."""
        spec, cluster = builtin_model(self.model), parse_cluster(f"{self.tp}x{SYSTEMS[self.system]}")
        engine = find_engine(ENGINES[self.engine])
        return roofline_profile(spec, cluster, self.dtype, (self.tp,), kv_dtype=self.kv_dtype, engine=engine)

    @property
    def kv_dtype(self) -> str:
        """Keys and values: 8 bits where the weights have them and the system is newer than an H100, as in the runs."""
        return "fp8" if self.system != "h100_sxm" and "gpt-oss" not in self.model else "bf16"

    def tpot_s(self, profile: Profile, clients: int, lengths: tuple[int, int]) -> float:
        """The time per token of `clients` that each send the next request when the last one ended."""
        spec, cluster = builtin_model(self.model), parse_cluster(f"{self.tp}x{SYSTEMS[self.system]}")
        workload = Workload.fixed(*(int(MEAN_LENGTH * length) for length in lengths))
        setting = Setting(spec, cluster, workload, profile, self.kv_dtype, ())
        limits = {"max_num_seqs": clients, "max_num_batched_tokens": TOKENS}
        schedule = engine_schedule(setting, "chunked", self.tp, None, 16, **limits)
        tpot_s = estimate(schedule, profile).tpot_s
        assert tpot_s is not None, "outputs of more than one token"
        return tpot_s


def rows() -> dict[Group, list[dict[str, str]]]:
    """The rows of each group."""
    folder = systems_folder()
    if folder is None:
        raise SystemExit("aiconfigurator is not installed: pip install exegpt[gpu-data]")
    groups: dict[Group, list[dict[str, str]]] = defaultdict(list)
    with (folder / "silicon_sample.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            name, together = MODELS.get(row["model_path"]), row["attention_dp_size"] in ("", "1")
            parted = row["moe_ep_size"] == "1" and row["moe_tp_size"] == row["tp_size"] in ("1", "2", "4", "8")
            alone = row["mode"] == "agg" and row["pp_size"] in ("", "1")
            held = float(row["silicon_ttft_ms"]) < LATEST_MS
            if name and together and parted and alone and held and row["system"] in SYSTEMS:
                dtype = "fp8" if row["precision"] == "fp8" else "mxfp4" if "gpt-oss" in name else "nvfp4"
                groups[Group(name, row["system"], row["backend"], dtype, int(row["tp_size"]))].append(row)
    return groups


def main() -> None:
    """Print the errors of each group."""
    everything: list[float] = []
    for group, measured in sorted(rows().items(), key=str):
        profile, errors, waiting = group.profile(), [], 0
        for row in measured:
            lengths = int(row["isl"]), int(row["osl"])
            try:
                tpot_s = group.tpot_s(profile, int(row["batch_size"]), lengths)
            except InputError:  # the clients' requests don't fit at once
                waiting += 1
                continue
            errors.append(1e3 * tpot_s / float(row["silicon_tpot_ms"]) - 1)
        everything += errors
        if errors:
            print(
                f"{group.model:16} {group.system:9} {group.engine:7} {group.dtype:6} TP{group.tp}: "
                f"{len(errors):3} rows, mean error {np.abs(errors).mean():6.1%}, bias {np.mean(errors):+6.1%}"
                + (f"; {waiting} don't fit" if waiting else "")
            )
    print(f"all {len(everything)} rows: median error {np.median(np.abs(everything)):.1%}")


if __name__ == "__main__":
    main()
