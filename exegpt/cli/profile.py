"""`exegpt profile`: measure a model's layers on this machine, or under mpirun on a cluster."""

from pathlib import Path
from typing import Annotated

import typer

from exegpt.cli import options


def profile(
    context: typer.Context,
    model: options.MODEL = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the profile to this file too.")] = None,
    cluster_out: Annotated[
        Path | None, typer.Option(help="Write the detected cluster to this YAML file, for --cluster.")
    ] = None,
    device: options.DEVICE = None,
    attention: options.ATTENTION = None,
    dtype: options.RUN_DTYPE = None,
    threads: options.THREADS = None,
    json: options.JSON = False,
) -> None:
    """Measure a model's layers on this machine, and store the profile.

    An interrupted measurement continues where it stopped. A built-in model gets random weights: times don't depend on
    them.

    Under mpirun, with one rank per device, it measures a cluster: every tensor-parallel degree within a node, and the
    links.

    `exegpt profile import` makes profiles from published measurements.

    Example: exegpt profile --model my-model

    Example: mpirun -n 4 exegpt profile --model my-model --out profile.json --cluster-out cluster.yaml
    """
    if context.invoked_subcommand:
        return
    from exegpt.api.profiling import ProfileOptions, measure
    from xcore.console import output
    from xcore.errors import InputError
    from xrunner.comm.ranks import job

    typed = locals()

    def read_options() -> ProfileOptions:
        if model is None:
            raise InputError("Name a model to measure with --model, or import a profile with `exegpt profile import`.")
        return options.build(ProfileOptions, typed)

    with job() as ranks:
        measured = measure(ranks.attempt(read_options), ranks)
    if measured is None:
        return
    provenance = measured.provenance
    if json:
        facts = {"fingerprint": measured.fingerprint, "source": measured.source, "provenance": provenance}
        return output.emit(
            {"profile": facts, "out": str(out) if out else None, "provenance": output.provenance(measured)}
        )
    where = provenance.get("device") or provenance["processor"]
    by = f", attention by {provenance['attention']}" if "attention" in provenance else ""
    print(f"Measured {model} on {where}{by}; stored as profile {measured.fingerprint}.")
