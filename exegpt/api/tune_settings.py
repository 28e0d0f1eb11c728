"""The settings of `tune`: a model on a named cluster, or on a node of each device kind."""

from dataclasses import replace
from pathlib import Path

from exegpt.options.shared_options import SpeculationOptions
from exegpt.options.tune import TuneOptions
from exegpt.options.values import only_profile
from xcore.choices import check_choice
from xcore.errors import InputError
from xcore.specs.device_names import device_kind
from xcore.specs.device_sheets import KINDS
from xcore.specs.price import Prices, device_price
from xcore.specs.workload import Workload
from xscheduler.drafts import Drafts
from xscheduler.expert_divisions import with_divisions
from xscheduler.export import ENGINES, FORMS, Target
from xscheduler.replica_layout import NODE
from xscheduler.settings import Setting, find_setting, with_draft

ANY = "any"
"""The value of --devices that stands for all built-in kinds."""


def setting_on(
    options: TuneOptions, cluster: str | None, workload: Workload | None, one_engine: bool = False
) -> Setting:
    """Return the setting on one of the clusters; with `one_engine`, no other engine is predicted.

    An export's engine makes the predictions of a roofline. At a rate, the setting has the fixed number of draft tokens.
    """
    profile = only_profile(options.profile)
    exported = exported_engine(options) if profile in (None, "roofline") else None
    setting = find_setting(
        options.model,
        cluster,
        workload or options.workload,
        profile,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        memory_fraction=options.memory_fraction,
        expert_parallel=options.expert_parallel,
        attention_dp=options.attention_dp,
        columns=options.columns,
        scale_to_context=options.scale_to_context,
        rate=options.rate.split(",")[0] if options.rate else None,
        device=options.device,
        engine=options.engine or exported,
        front_end=options.front_end,
        one_engine=one_engine,
    )
    if not (options.expert_parallel or options.attention_dp or options.devices):
        setting = with_divisions(setting)
    if options.prefix_hit:
        setting = setting.with_prefix_hit(options.prefix_hit)
    drafts = drafts_of(options)
    if drafts is None:
        return setting
    fixed = (options.open_system or options.agents) and len(drafts.lengths) == 1
    return replace(with_draft(setting, drafts.draft), speculation=drafts.at(drafts.only) if fixed else None)


def exported_engine(options: TuneOptions) -> str | None:
    """Return the engine whose launch command the user wants; InputError for an unknown one."""
    return None if options.export is None else check_choice(options.export.lower(), ENGINES, "--export")


def drafts_of(options: SpeculationOptions) -> Drafts | None:
    """Return what may be drafted; None without speculative decoding."""
    asked = options.draft_acceptance, options.num_speculative_tokens
    rate, tokens = (None if value is None else str(value) for value in asked)  # numbers in Python
    return Drafts.of(rate, tokens, options.draft_model, options.draft_layers)


def caching_option(options: TuneOptions) -> str:
    """Return the option that makes schedules cache prefixes, as typed."""
    return f"--prefix-hit {options.prefix_hit:g}" if options.prefix_hit else "--prefix-caching"


def target_of(options: TuneOptions, setting: Setting, policies: tuple[str, ...]) -> Target | None:
    """Return the target of an export; InputError if the engine is unknown or can't run the model."""
    engine = exported_engine(options)
    if engine is None:
        if options.export_as or options.export_out:
            name = "--export-as" if options.export_as else "--export-out"
            raise InputError(f"{name} is about an exported engine: add --export, like --export vllm.")
        return None
    form = check_choice(options.export_as or "command", FORMS, "--export-as")
    target = Target(engine, options.model if options.model and Path(options.model).is_dir() else None, form)
    target.check(setting, policies, drafts=options.draft_acceptance is not None)
    return target


def check_devices(options: TuneOptions) -> None:
    """Raise InputError for options that can't be combined with --devices, or need it."""
    if not options.devices:
        if options.top > 1:
            raise InputError(f"--top {options.top} is the number of answers with --devices: pass --devices any, too.")
        return
    for wrong, what, instead in (
        (not options.open_system, "needs an arrival rate", "add --rate, like --rate 50/s"),
        (options.cluster, "finds the cluster", "leave --cluster out"),
        (options.replicas, "finds the number of replicas", "leave --replicas out"),
        (options.tp_gpus, "finds the devices of a replica", "leave --tp-gpus out"),
        (options.device, "is for kinds by name, not for this machine", "leave --device out"),
        (options.attention_dp, "can't be combined with --attention-dp", "pass --cluster instead"),
        (options.search != "bnb", f"can't be combined with --search {options.search}", "leave --search out"),
        (options.profile not in (None, ["roofline"]), "computes the profile of each kind", "leave --profile out"),
    ):
        if wrong:
            raise InputError(f"--devices {options.devices} {what}: {instead}.")


def settings_of_kinds(
    options: TuneOptions, workload: Workload | None, prices: Prices | None
) -> tuple[tuple[Setting, ...], dict[str, str]]:
    """Return the setting on a node of each kind, and why a kind has none.

    With prices, a kind without one is left out. The workload is read once. Without --policy, only policies that the
    engine runs are searched.
    """
    kinds = KINDS if options.devices == ANY else [device_kind(text.strip()).kind for text in _names(options)]
    settings: list[Setting] = []
    left_out: dict[str, str] = {}
    for kind in dict.fromkeys(kinds):
        if prices is not None and device_price(prices, kind) is None:
            left_out[kind] = "it has no price"
            continue
        try:
            read = settings[0].workload if settings else workload
            asked = replace(options, scale_to_context=options.scale_to_context and read is None)
            settings.append(setting_on(asked, f"{NODE}x{kind}", read, one_engine=options.policy is None))
        except InputError as error:
            left_out[kind] = str(error).rstrip(".")
    if not settings:
        why = next((reason for reason in left_out.values() if reason != "it has no price"), None)
        raise InputError(f"{why or f'--devices {options.devices}: none of these kinds has a price'}.")
    return tuple(settings), left_out


def _names(options: TuneOptions) -> list[str]:
    return (options.devices or "").split(",")
