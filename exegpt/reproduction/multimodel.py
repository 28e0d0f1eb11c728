"""The results of five papers about several models on one cluster, one system after the other."""

from collections.abc import Callable
from dataclasses import dataclass

from exegpt.report.sections import Section
from exegpt.reproduction import hermes, hermes_sections, learned_order, muxserve, samullm, seallm
from exegpt.reproduction.hermes import Hermes
from exegpt.reproduction.learned_order import LearnedOrder
from exegpt.reproduction.public_data import public_data
from exegpt.reproduction.seallm import SeaLLM

STANDS_ON = "Simulated, with the data that the papers' authors published; nothing here was run on a GPU."


@dataclass(frozen=True)
class Multimodel:
    """Every system's own result."""

    muxserve: muxserve.CasesResult
    samullm: samullm.Samullm
    hermes: Hermes
    learned_order: LearnedOrder
    seallm: SeaLLM


def reproduce(progress: Callable[[int, int], None]) -> Multimodel:
    """Run one system after the other; InputError at once if published measurements are missing."""
    for whose, folder in (("MuxServe's", "muxserve"), ("SamuLLM's", "samullm"), ("Hermes'", "hermes")):
        public_data(whose, folder)

    systems = (muxserve.reproduce, samullm.reproduce, hermes.reproduce, learned_order.reproduce, seallm.reproduce)

    def part(number: int) -> Callable[[int, int], None]:
        return lambda done, of: progress(1000 * number + round(1000 * done / of), 1000 * len(systems))

    return Multimodel(*[work(part(number)) for number, work in enumerate(systems)])  # type: ignore[operator]


def sections(result: Multimodel) -> list[Section]:
    """Return the sections of every system."""
    return [
        *muxserve.sections(result.muxserve),
        *samullm.sections(result.samullm),
        *hermes_sections.sections(result.hermes),
        *learned_order.sections(result.learned_order),
        *seallm.sections(result.seallm),
    ]
