"""`profile`: measure a model's layers on this machine, or on a job's ranks with the links between them."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from exegpt.options.profile import ProfileOptions
from xcore import document
from xcore.console import output
from xcore.files import check_output
from xcore.frozen_heap import imports
from xcore.specs.profile import Profile
from xrunner.threads import set_threads
from xscheduler.settings import find_model, run_dtype, run_kv_dtype

if TYPE_CHECKING:
    from xrunner.comm.ranks import Ranks


def measure(options: ProfileOptions, ranks: "Ranks") -> Profile | None:
    """Measure, store and write the profile, and with several ranks also the cluster.

    All ranks call it. Returns None on all ranks but the first.
    """
    first = ranks.rank == 0
    ranks.agree(lambda: _facts(options, first, ranks.threads(options.threads)))
    with imports():  # late: they take seconds
        from xprofiler.job import ProfilingJob, keep
        from xprofiler.measure import measure_job
        from xprofiler.measured_cluster import found_cluster, write_cluster
        from xprofiler.points import FULL
        from xrunner.models.device import find_device

    set_threads(ranks.threads(options.threads))
    kind = ranks.agree(lambda: {"device": find_device(options.device, ranks.local).type})["device"]
    device, model, several = find_device(kind, ranks.local), options.measured_model, ranks.size > 1
    dtype = run_dtype(options.dtype, None, find_model(model), kind)
    kept = run_kv_dtype(options.kv_dtype, None, dtype)
    attention = _attention(options, dtype, ranks, kind)
    with output.progress("measuring layers") if first else nullcontext(lambda done, total: None) as progress:
        source = Path(model) if Path(model).is_dir() else find_model(model)
        measured = measure_job(
            source,
            dtype,
            ranks,
            lambda _, done, total: progress(done, total),
            device,
            attention=attention,
            kv_dtype=kept,
        )
    wanted = options.cluster_out or several
    cluster = found_cluster(ranks, measured.intra, measured.inter, device) if wanted else None
    if not first:
        return None
    if cluster and several:
        keep(ProfilingJob(cluster, measured.profile), find_model(model), ranks, device, FULL, attention)
    if options.out:
        document.write(options.out, measured.profile)
    if options.cluster_out and cluster:
        write_cluster(options.cluster_out, cluster)
    return measured.profile


def _facts(options: ProfileOptions, first: bool, threads: int | None) -> dict[str, str]:
    """Return the facts that must agree between ranks.

    Raises InputError for a missing model or a file that can't be written.
    """
    spec = find_model(options.measured_model)
    for out in (options.out, options.cluster_out) if first else ():
        check_output(out)
    return {"model": f"{spec.name} ({spec.fingerprint})", "threads": str(threads)}


def _attention(options: ProfileOptions, dtype: str, ranks: "Ranks", kind: str) -> str:
    """Return the attention kernels that all ranks measure; rank 0 prints why they were chosen."""
    from xrunner.models.attention_planning import choose_attention
    from xrunner.models.device import find_device
    from xrunner.models.weights import products_text

    def choose() -> dict[str, str]:
        device = find_device(kind, ranks.local)
        attention, notes = choose_attention(options.attention, find_model(options.measured_model), dtype, device)
        return {"attention": attention, "why": "; ".join((*notes, *products_text(dtype, kind == "cpu")))}

    attention, why = ranks.agree(choose).values()
    if why and ranks.rank == 0:
        output.note(f"· {why}")
    return attention
