"""MuxServe's synthetic workloads placed by this package's search, beside the placements that its authors published."""

from dataclasses import dataclass, replace

from exegpt.report.sections import Section
from exegpt.reproduction.muxserve_cases import (
    DEVICE_BYTES,
    INPUT,
    LONGEST,
    OTHER_GB,
    OUTPUT,
    SHAPES,
    PublishedModel,
    Served,
    simulate,
)
from xcore.quantity import figure_text, signed_percent
from xcore.specs.iteration_profile import IterationProfile
from xmulti.sharing.iteration_cost import TableCost
from xmulti.sharing.placement import Placer, Popular

NODES, DEVICES_PER_NODE = 4, 8
SIZES = {"llama-7b": 1, "llama-13b": 2, "llama-30b": 4, "llama-65b": 8}
"""Size in the order of placement: rate × size."""


@dataclass(frozen=True)
class SearchedPlacement:
    """Requests/s of one case with the published placement and with the one that is searched here, both simulated."""

    alpha: str
    scale: str
    published: float
    searched: float
    meshes: tuple[int, ...]
    """Devices of each mesh of the searched placement."""


def searched_placement(
    alpha: str,
    scale: str,
    profiles: dict[str, IterationProfile],
    rows: list[PublishedModel],
    published: Served,
    contention: float,
) -> SearchedPlacement:
    """Place a case's LLMs, and replay the requests whose results with the published placement are `published`."""
    placer = Placer(DEVICE_BYTES, OTHER_GB * DEVICE_BYTES / 80)
    placement = placer.place([_popular(profiles, row) for row in rows], NODES, DEVICES_PER_NODE, lambda done, of: None)
    assert placement, "the published placement has room"
    occupied = [mesh for mesh in placement.meshes if mesh.occupants]
    names = {
        occupant.popular.name: f"mesh{len(mesh.devices)}idx{place}"
        for place, mesh in enumerate(occupied)
        for occupant in mesh.occupants
    }
    placed = [replace(row, mesh=names[row.llm]) for row in rows]
    result = simulate(profiles, placed, "muxserve", contention)
    sizes = tuple(len(mesh.devices) for mesh in occupied)
    return SearchedPlacement(alpha, scale, published.sums.plain, result.sums.plain, sizes)


def _popular(profiles: dict[str, IterationProfile], row: PublishedModel) -> Popular:
    layers, heads, billions = SHAPES[row.model]
    profile = profiles[row.model]

    def cost(devices: int) -> TableCost | None:
        return TableCost(profile, devices) if devices in profile.degrees else None

    work, token_bytes = row.rate * SIZES[row.model], layers * heads * 128 * 2 * 2
    return Popular(row.llm, row.rate, INPUT[0], OUTPUT[0], work, cost, 2e9 * billions, token_bytes, 2 * LONGEST)


def searched_section(placements: tuple[SearchedPlacement, ...]) -> Section:
    """Return the sums of requests/s by case."""
    rows = tuple(
        (
            f"{of.alpha} × {of.scale}",
            figure_text(of.published),
            figure_text(of.searched),
            signed_percent(of.searched / of.published - 1),
            " ".join(f"{of.meshes.count(size)}×{size}" for size in sorted({*of.meshes}, reverse=True)),
        )
        for of in placements
    )
    ahead = sum(of.searched >= of.published for of in placements)
    ratios = [of.searched / of.published - 1 for of in placements]
    notes = (
        f"Searched placements are at least level in {ahead} of {len(placements)} cases: "
        f"{signed_percent(min(ratios))} to {signed_percent(max(ratios))}.",
    )
    columns = ("α × scale", "published placement", "searched", "more", "its meshes")
    return Section("Published and searched placements of the 19 LLaMAs, simulated requests/s", columns, rows, notes)
