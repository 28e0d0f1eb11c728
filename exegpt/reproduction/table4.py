"""Table 4: seconds to load a model from host memory (DRAM) or from an SSD, on nodes of eight A40s.

Every device loads its own weights, all at the same time. From DRAM a device takes as long as one copy over its own
link, `host_copy` of a profile; the roofline has the link of its kind. From an SSD it loads at the rate that plans of
stages assume. Beside that are the rates per node that the paper's seconds imply. Nothing is fitted to them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from exegpt.report.sections import Section
from exegpt.reproduction.setup import setup
from xcore.quantity import figure_text, signed_percent
from xcore.specs.model import BYTES
from xmulti.files.application_file import LOAD_BYTES_S

PER_NODE = 8
PAPER = {
    ("gpt3-39b", 16): (0.9, 2.1),
    ("gpt3-101b", 32): (1.3, 7.1),
    ("gpt3-175b", 32): (2.1, 11.9),
    ("gpt3-341b", 48): (3.5, 15.1),
}
"""Seconds from DRAM and from SSD, by model and number of devices."""


@dataclass(frozen=True)
class ModelLoading:
    """ModelLoading one model."""

    model: str
    devices: int
    node_bytes: float
    """Bytes of weights that each node loads."""
    dram_s: float
    ssd_s: float
    paper: tuple[float, float]
    """Seconds from DRAM and from SSD."""

    @property
    def implied_bytes_s(self) -> tuple[float, float]:
        """Return each node's rates that the paper's seconds imply."""
        return self.node_bytes / self.paper[0], self.node_bytes / self.paper[1]


@dataclass(frozen=True)
class Table4:
    """All rows."""

    rows: tuple[ModelLoading, ...]


def reproduce(progress: Callable[[int, int], None] = lambda done, total: None) -> Table4:
    """Compute every row."""
    rows = []
    for done, ((model, devices), paper) in enumerate(PAPER.items(), 1):
        rows.append(loading(model, devices, paper))
        progress(done, len(PAPER))
    return Table4(tuple(rows))


def loading(model: str, devices: int, paper: tuple[float, float]) -> ModelLoading:
    """Return the seconds to load a model on so many devices."""
    where = setup(model, f"{devices // PER_NODE}x{PER_NODE}xA40", "S")
    held = where.model.parameters * BYTES[where.profile.dtype] / devices  # bytes on each
    copy = where.profile.host_copy or where.profile.send
    return ModelLoading(model, devices, held * PER_NODE, copy.at(held), held / LOAD_BYTES_S, paper)


def sections(table: Table4) -> list[Section]:
    """Return the rows beside the paper's."""
    heads = ("DRAM, s", "paper", "deviation", "SSD, s", "paper", "deviation")
    return [
        Section(
            "table4: seconds to load a model on nodes of eight A40s",
            ("model", "GPUs", "GB per node", *heads, "paper implies, GB/s per node", "from SSD"),
            tuple(_cells(row) for row in table.rows),
            (
                f"From DRAM: each GPU over its own link. From an SSD: {LOAD_BYTES_S / 1e9:g} GB/s per GPU with the "
                "engine's start, as SamuLLM's host has it. The paper gives no bandwidth. Its seconds from DRAM imply a "
                "quarter of what a node's eight links have together.",
            ),
        )
    ]


def _cells(row: ModelLoading) -> tuple[str, ...]:
    pairs = zip((row.dram_s, row.ssd_s), row.paper, strict=True)
    seconds = [cell for own, said in pairs for cell in (figure_text(own), f"{said:g}", signed_percent(own / said - 1))]
    implied = [figure_text(rate / 1e9) for rate in row.implied_bytes_s]
    return (row.model, str(row.devices), figure_text(row.node_bytes / 1e9), *seconds, *implied)
