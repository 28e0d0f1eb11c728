"""`exegpt profile`: measures this machine's layers, or under mpirun a cluster's."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from exegpt.cli import options


def profile(
    context: typer.Context,
    model: options.MODEL = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the profile to this file too.")] = None,
    cluster_out: Annotated[
        Path | None, typer.Option(help="Write the cluster that was found to this YAML file, for --cluster.")
    ] = None,
    device: options.DEVICE = None,
    attention: options.ATTENTION = None,
    dtype: options.RUN_DTYPE = None,
    threads: options.THREADS = None,
    json: options.JSON = False,
) -> None:
    """Measure this machine's layers for a model; an interrupted measurement goes on where it stopped. A built-in
    model's weights are drawn at random: times don't depend on them.

    Under mpirun, one rank per device, it measures a cluster: every tensor-parallel degree within a node, and the links.

    Measurements that others published become profiles by `exegpt profile import`.

    Example: exegpt profile --model my-model

    Example: mpirun -n 4 exegpt profile --model my-model --out profile.json --cluster-out cluster.yaml
    """
    if context.invoked_subcommand:
        return
    from exegpt import document
    from exegpt.cli import inputs, output
    from exegpt.errors import InputError
    from xrunner.comm.ranks import job

    if model is None:
        raise InputError("Name a model to measure with --model, or import a profile: `exegpt profile import`.")
    with job() as ranks:
        first = ranks.rank == 0
        ranks.agree(lambda: _typed(model, (out, cluster_out) if first else (), ranks.threads(threads)))
        from exegpt.models.device import find_device  # seconds, if all is well so far
        from exegpt.models.planning import choose_attention
        from xprofiler.cluster import found_cluster, write_cluster
        from xprofiler.job import Job, keep
        from xprofiler.measure import measure_job
        from xprofiler.points import FULL

        inputs.set_threads(ranks.threads(threads))
        kind = ranks.agree(lambda: {"device": find_device(device, ranks.local).type})["device"]
        there = find_device(kind, ranks.local)
        asked = dtype or ("fp32" if there.type == "cpu" else "bf16")

        def choose() -> dict[str, str]:
            chosen, notes = choose_attention(attention, inputs.find_model(model), asked, there)
            return {"attention": chosen, "why": " ".join(notes)}

        chosen, why = ranks.agree(choose).values()
        if first and why:
            output.note(f"· {why}")
        with output.progress("measuring layers") if first else nullcontext(lambda done, total: None) as progress:
            source = Path(model) if Path(model).is_dir() else inputs.find_model(model)
            found = measure_job(
                source, asked, ranks, lambda _, done, total: progress(done, total), there, attention=chosen
            )
        several = ranks.size > 1
        cluster = found_cluster(ranks, found.intra, found.inter, there) if cluster_out or several else None
        if not first:
            return
        measured = found.profile
        if cluster and several:
            keep(Job(cluster, measured), inputs.find_model(model), ranks, there, FULL, chosen)
        if out:
            document.write(out, measured)
        if cluster_out and cluster:
            write_cluster(cluster_out, cluster)
    if json:
        facts = {"fingerprint": measured.fingerprint, "source": measured.source, "provenance": measured.provenance}
        return output.emit(
            {"profile": facts, "out": str(out) if out else None, "provenance": output.provenance(measured)}
        )
    where = measured.provenance.get("device") or measured.provenance["processor"]
    by = f", attention by {measured.provenance['attention']}" if "attention" in measured.provenance else ""
    print(f"Measured {model} on {where}{by}: {measured.fingerprint}, stored.")


def _typed(model: str, outs: tuple[Path | None, ...], threads: int | None) -> dict[str, str]:
    """What was asked of this rank; InputError for a model that isn't there or a file that can't be written."""
    from exegpt.cli import inputs, output

    spec = inputs.find_model(model)
    for out in outs:
        output.check_output(out)
    return {"model": f"{spec.name} ({spec.fingerprint})", "threads": str(threads)}
