"""`exegpt profile`: measures this machine's layers."""

from pathlib import Path
from typing import Annotated

import typer

from exegpt.cli import options


def profile(
    model: options.MODEL_DIRECTORY,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the profile to this file too.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16")] = "fp32",
    threads: options.THREADS = None,
    json: options.JSON = False,
) -> None:
    """Measure this machine's layers for a model; an interrupted measurement goes on where it stopped.

    Example: exegpt profile --model my-model
    """
    from exegpt import document
    from exegpt.cli import inputs, output
    from xprofiler.measure import measure_profile

    directory = inputs.model_directory(model)
    output.check_output(out)
    inputs.set_threads(threads)
    with output.progress("measuring layers") as progress:
        measured = measure_profile(directory, dtype=dtype, progress=lambda _, done, total: progress(done, total))
    if out:
        document.write(out, measured)
    if json:
        facts = {"fingerprint": measured.fingerprint, "source": measured.source, "provenance": measured.provenance}
        return output.emit(
            {"profile": facts, "out": str(out) if out else None, "provenance": output.provenance(measured)}
        )
    print(
        f"Measured {model} on {measured.provenance.get('processor', 'this machine')}: {measured.fingerprint}, stored."
    )
