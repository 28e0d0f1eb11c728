"""`exegpt profile`: measure a model's layers on this machine, or under mpirun on a cluster."""

from exegpt.options.option_record import command
from exegpt.options.profile import ProfileOptions


@command
def profile(options: ProfileOptions) -> None:
    """Measure a model's layers on this machine, and store the profile.

    An interrupted measurement continues where it stopped. A built-in model gets random weights: times don't depend on
    them.

    Under mpirun, with one rank per device, it measures a cluster: every tensor-parallel degree within a node, and the
    links.

    `exegpt profile import` makes profiles from published measurements.

    Example: exegpt profile --model my-model

    Example: mpirun -n 4 exegpt profile --model my-model --out profile.json --cluster-out cluster.yaml
    """
    from exegpt.api.profiling import measure
    from xcore.console import output
    from xrunner.comm.ranks import job

    with job() as ranks:
        measured = measure(options, ranks)
    if measured is None:
        return
    provenance = measured.provenance
    if options.json:
        facts = {"fingerprint": measured.fingerprint, "source": measured.source, "provenance": provenance}
        return output.emit(
            {
                "profile": facts,
                "out": str(options.out) if options.out else None,
                "provenance": output.provenance(measured),
            }
        )
    where = provenance.get("device") or provenance["processor"]
    by = f", attention by {provenance['attention']}" if "attention" in provenance else ""
    print(f"Measured {options.model} on {where}{by}; stored as profile {measured.fingerprint}.")
