"""`exegpt profile import`: make a Profile from published measurements."""

from pathlib import Path
from typing import Annotated, Any

import typer

from exegpt.cli import options

SOURCES = ("aiconfigurator", "vidur", "layers", "samullm", "muxserve")


def import_(
    source: Annotated[str, typer.Argument(help="aiconfigurator, vidur, layers, samullm or muxserve")],
    path: Annotated[
        Path | None,
        typer.Argument(
            help="vidur, layers, samullm: the folder of the source's files. muxserve: its cost file. aiconfigurator: "
            "its systems folder, if not in the installed package."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help=options.MODEL_HELP)] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the profile to this file.")] = ...,  # type: ignore[assignment]
    system: Annotated[str | None, typer.Option(help="aiconfigurator: the GPU system, like h100_sxm.")] = None,
    engine: Annotated[
        str, typer.Option(help="aiconfigurator: the engine whose kernels were measured: vllm, trtllm or sglang.")
    ] = "vllm",
    dtype: Annotated[
        str | None, typer.Option(help="Default: the dtype in the meta.yaml of layers, fp16 for vidur, else bf16.")
    ] = None,
    kv_dtype: options.KV_DTYPE = None,
    overhead: Annotated[
        str | None,
        typer.Option(help="The engine's own time per iteration, like 3ms; no source includes it. Default: 0."),
    ] = None,
    json: options.JSON = False,
) -> None:
    """Make a profile from published measurements.

    Sources are aiconfigurator's operator tables (the installed package), Vidur's CSV files (mlp, attention, network),
    or a folder of one engine's layers (attention.csv, dense.csv, per_sequence.csv). From samullm's files it makes a
    cost table of all their models, for plans of stages; from muxserve's cost file the iteration times of one model by
    share of a GPU, for `exegpt simulate --plan`.

    Example: exegpt profile import aiconfigurator --system h100_sxm --model llama-3.1-70b --dtype fp8 --out h100.json
    """
    from xcore import document
    from xcore.choices import check_choice
    from xcore.console import output
    from xcore.duration import parse_duration
    from xcore.errors import InputError
    from xcore.files import check_output
    from xcore.specs.model import BYTES
    from xscheduler.settings import find_model

    check_choice(source, SOURCES, "Source")
    for value, option in ((dtype, "--dtype"), (kv_dtype, "--kv-dtype")):
        check_choice(value or "bf16", tuple(BYTES), option)
    check_output(out)
    if source == "samullm":
        return _cost_table(path, model, out, json)
    if source == "muxserve":
        return _iterations(path, model, out, json)
    if model is None:
        raise InputError("Name the model with --model: a profile is for one model.")
    spec = find_model(model)
    overhead_s = parse_duration(overhead) if overhead else 0.0
    if overhead_s is None:
        raise InputError(f"--overhead '{overhead}' is not a time per iteration: write one like 3ms.")
    if source == "aiconfigurator":
        from xprofiler.aiconfigurator import SYSTEMS, aiconfigurator_profile

        if system is None:
            raise InputError(f"Name the system with --system: one of {', '.join(SYSTEMS)}.")
        imported = aiconfigurator_profile(spec, system, engine, dtype or "bf16", kv_dtype, path, overhead_s)
    else:
        if path is None or not path.is_dir():
            what = "No folder is given" if path is None else f"There is no folder '{path}'"
            raise InputError(f"{what}: name the folder of the {source} files after the source.")
        if source == "layers":
            from xprofiler.layer_folder import layers_profile

            imported = layers_profile(spec, path, dtype, overhead_s)
        else:
            from xprofiler.vidur import vidur_profile

            imported = vidur_profile(spec, path, dtype or "fp16", overhead_s)
    document.write(out, imported)
    if json:
        return output.emit(
            {
                "profile": {"fingerprint": imported.fingerprint, "source": imported.source},
                "degrees": [d.tp for d in imported.degrees],
                "out": str(out),
                "provenance": {**output.provenance(imported), "import": imported.provenance},
            }
        )
    degrees = ", ".join(str(d.tp) for d in imported.degrees)
    print(f"'{out}': {spec.name} on {imported.device} in {imported.dtype}, tensor-parallel degrees {degrees}.")
    for key, value in imported.provenance.items():
        output.note(f"· {key}: {value}")


def _cost_table(folder: Path | None, model: str | None, out: Path, json: bool) -> None:
    """Make a cost table from SamuLLM's files."""
    from xcore import document
    from xcore.console import output
    from xcore.errors import InputError
    from xprofiler.samullm_costs import samullm_costs

    if folder is None or not folder.is_dir():
        what = "No folder is given" if folder is None else f"There is no folder '{folder}'"
        raise InputError(f"{what}: name the folder of the samullm files after the source.")
    if model is not None:
        raise InputError(f"A cost table has all models of the samullm files, not only '{model}': leave out --model.")
    table = samullm_costs(folder)
    document.write(out, table)
    models: list[dict[str, Any]] = [
        {"name": known.name, "context": known.context, "degrees": [degree.tp for degree in known.degrees]}
        for known in table.models
    ]
    if json:
        provenance = {**output.provenance(), "import": {"source": table.source, "machine": table.machine}}
        return output.emit({"models": models, "out": str(out), "provenance": provenance})
    print(f"'{out}': costs of {len(models)} models on {table.machine}.")
    rows = [(m["name"], f"{m['context']:,}", ", ".join(map(str, m["degrees"]))) for m in models]
    output.table(("model", "context", "tensor-parallel degrees"), rows, "Cost table")


def _iterations(file: Path | None, model: str | None, out: Path, json: bool) -> None:
    """Import one model's iteration times from MuxServe's cost file."""
    from xcore import document
    from xcore.console import output
    from xcore.errors import InputError
    from xcore.quantity import percent_text
    from xprofiler.muxserve_tables import muxserve_profiles

    if file is None or not file.is_file():
        what = "No file is given" if file is None else f"There is no file '{file}'"
        raise InputError(f"{what}: name MuxServe's cost file after the source.")
    profiles = muxserve_profiles(file)
    if model not in profiles:
        which = f"'{file}' has no model '{model}'" if model else "No model is given"
        raise InputError(f"{which}: pass --model with one of {', '.join(profiles)}.")
    profile = profiles[model]
    document.write(out, profile)
    shares = {tp: [tables.share for tables in profile.of(tp)] for tp in profile.degrees}
    if json:
        facts = {"model": model, "device": profile.device, "shares": shares, "out": str(out)}
        return output.emit({**facts, "provenance": {**output.provenance(), "import": profile.provenance}})
    print(f"'{out}': iterations of {model} on {profile.device}.")
    rows = [(str(tp), ", ".join(map(percent_text, of_degree))) for tp, of_degree in shares.items()]
    output.table(("tensor-parallel degree", "shares of the multiprocessors"), rows, "Iterations")
