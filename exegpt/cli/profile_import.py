"""`exegpt profile import`: make a Profile from published measurements."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exegpt.options import shared_options
from exegpt.options.option_record import argument, command, option, required
from xcore.errors import InputError

if TYPE_CHECKING:
    from xcore.specs.profile import Profile

SOURCES = ("aiconfigurator", "vidur", "layers", "samullm", "muxserve")


@dataclass(frozen=True, kw_only=True)
class ImportOptions(shared_options.JsonOption):
    """The measurements, and the profile that is made of them."""

    source: str = argument("The source: aiconfigurator, vidur, layers, samullm or muxserve.")
    path: Path | None = argument(
        default=None,
        help="vidur, layers, samullm: the folder of the source's files. muxserve: its cost file. aiconfigurator: "
        "its systems folder. Default: that of the installed package.",
    )
    model: str | None = shared_options.MODEL
    out: Path = required("Write the profile to this file.", "-o")
    system: str | None = option(None, "aiconfigurator: the GPU system, like h100_sxm.")
    engine: str = option("vllm", "aiconfigurator: the engine whose kernels were measured: vllm, trtllm or sglang.")
    dtype: str | None = option(
        None, "The dtype of the weights. Default: that of meta.yaml for layers, fp16 for vidur, else bf16."
    )
    kv_dtype: str | None = shared_options.KV_DTYPE
    expert_parallel: bool = shared_options.EXPERT_PARALLEL
    attention_dp: int | None = shared_options.ATTENTION_DP
    overhead: str | None = option(
        None, "The engine's own time per iteration, like 3ms; no source includes it. Default: 0."
    )


@command
def import_(options: ImportOptions) -> None:
    """Make a profile from published measurements.

    Sources of a profile are aiconfigurator's operator tables (the installed package), Vidur's CSV files (mlp,
    attention, network), and folders of one engine's layers (attention.csv, dense.csv, per_sequence.csv, moe.csv).

    samullm's files give a cost table of all their models, for plans of stages. muxserve's cost file gives the iteration
    times of one model by share of a GPU, for `exegpt simulate --plan`.

    Example: exegpt profile import aiconfigurator --system h100_sxm --model llama-3.1-70b --dtype fp8 --out h100.json
    """
    from xcore import document
    from xcore.choices import check_choice
    from xcore.console import output
    from xcore.files import check_output
    from xcore.specs.model import BYTES

    check_choice(options.source, SOURCES, "Source")
    for value, name in ((options.dtype, "--dtype"), (options.kv_dtype, "--kv-dtype")):
        check_choice(value or "bf16", tuple(BYTES), name)
    check_output(options.out)
    if options.source == "samullm":
        return _cost_table(options)
    if options.source == "muxserve":
        return _iterations(options)
    imported, name = _profile(options)
    document.write(options.out, imported)
    if options.json:
        return output.emit(
            {
                "profile": {"fingerprint": imported.fingerprint, "source": imported.source},
                "degrees": [d.tp for d in imported.degrees],
                "out": str(options.out),
                "provenance": {**output.provenance(imported), "import": imported.provenance},
            }
        )
    degrees = ", ".join(str(d.tp) for d in imported.degrees)
    print(f"Wrote '{options.out}': {name} on {imported.device} in {imported.dtype}, tensor-parallel degrees {degrees}.")
    for key, value in imported.provenance.items():
        output.note(f"· {key}: {value}")


def _profile(options: ImportOptions) -> "tuple[Profile, str]":
    """Return the profile that a source has for a model, and the model's name."""
    from xcore.duration import parse_duration
    from xscheduler.settings import find_model, with_experts

    source, path = options.source, options.path
    if options.model is None:
        raise InputError("Name the model with --model: a profile is for one model.")
    spec = with_experts(find_model(options.model), options.expert_parallel, options.attention_dp)
    overhead_s = parse_duration(options.overhead) if options.overhead else 0.0
    if overhead_s is None:
        raise InputError(f"--overhead '{options.overhead}' is not a time per iteration: write one like 3ms.")
    if source == "aiconfigurator":
        from xprofiler.aiconfigurator import SYSTEMS, aiconfigurator_profile

        if options.system is None:
            raise InputError(f"Name the system with --system: one of {', '.join(SYSTEMS)}.")
        dtypes = options.dtype or "bf16", options.kv_dtype
        return aiconfigurator_profile(spec, options.system, options.engine, *dtypes, path, overhead_s), spec.name
    folder = _folder(path, source)
    if source == "layers":
        from xprofiler.layer_folder import layers_profile

        return layers_profile(spec, folder, options.dtype, overhead_s), spec.name
    from xprofiler.vidur import vidur_profile

    return vidur_profile(spec, folder, options.dtype or "fp16", overhead_s), spec.name


def _folder(path: Path | None, source: str) -> Path:
    """Return the folder of a source's files; InputError if there is none."""
    if path is None or not path.is_dir():
        what = "No folder is given" if path is None else f"There is no folder '{path}'"
        raise InputError(f"{what}: name the folder of the {source} files after the source.")
    return path


def _cost_table(options: ImportOptions) -> None:
    """Make a cost table from SamuLLM's files."""
    from xcore import document
    from xcore.console import output
    from xprofiler.samullm_costs import samullm_costs

    folder = _folder(options.path, options.source)
    if options.model is not None:
        raise InputError(
            f"A cost table has all models of the samullm files, not only '{options.model}': leave --model out."
        )
    table = samullm_costs(folder)
    document.write(options.out, table)
    models: list[dict[str, object]] = [
        {"name": known.name, "context": known.context, "degrees": [degree.tp for degree in known.degrees]}
        for known in table.models
    ]
    if options.json:
        provenance = {**output.provenance(), "import": {"source": table.source, "machine": table.machine}}
        return output.emit({"models": models, "out": str(options.out), "provenance": provenance})
    print(f"Wrote '{options.out}': costs of {len(models)} models on {table.machine}.")
    rows = [(m.name, f"{m.context:,}", ", ".join(str(degree.tp) for degree in m.degrees)) for m in table.models]
    output.table(("model", "context", "tensor-parallel degrees"), rows, "Cost table")


def _iterations(options: ImportOptions) -> None:
    """Import one model's iteration times from MuxServe's cost file."""
    from xcore import document
    from xcore.console import output
    from xcore.quantity import percent_text
    from xprofiler.muxserve_tables import muxserve_profiles

    file, model = options.path, options.model
    if file is None or not file.is_file():
        what = "No file is given" if file is None else f"There is no file '{file}'"
        raise InputError(f"{what}: name MuxServe's cost file after the source.")
    profiles = muxserve_profiles(file)
    if model not in profiles:
        which = f"'{file}' has no model '{model}'" if model else "No model is given"
        raise InputError(f"{which}: pass --model with one of {', '.join(profiles)}.")
    profile = profiles[model]
    document.write(options.out, profile)
    shares = {tp: [tables.share for tables in profile.of(tp)] for tp in profile.degrees}
    if options.json:
        facts = {"model": model, "device": profile.device, "shares": shares, "out": str(options.out)}
        return output.emit({**facts, "provenance": {**output.provenance(), "import": profile.provenance}})
    print(f"Wrote '{options.out}': iterations of {model} on {profile.device}.")
    rows = [(str(tp), ", ".join(map(percent_text, of_degree))) for tp, of_degree in shares.items()]
    output.table(("tensor-parallel degree", "shares of the multiprocessors"), rows, "Iterations")
