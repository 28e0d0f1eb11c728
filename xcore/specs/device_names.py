"""Names of devices: the built-in kinds by their own name, by sellers' names, and by what people type."""

import re

from xcore.errors import InputError
from xcore.specs.device_sheets import KINDS, SHEETS
from xcore.specs.device_spec import DeviceSpec

_WORDS = {
    "T4": "16gb",
    "A10": "24gb",
    "A10G": "24gb",
    "L4": "24gb",
    "A40": "48gb",
    "L40": "48gb",
    "L40S": "48gb",
    "A100-40GB": "sxm",
    "A100-80GB": "sxm",
    "A800-80GB": "sxm",
    "H20": "sxm",
    "H200-SXM": "141gb",
    "H200-NVL": "141gb",
    "GH200-96GB": "480gb",  # of the CPU
    "B200": "sxm 180gb 192gb",
    "B300-SXM": "288gb",
    "GB200": "nvl72 186gb 192gb",
    "GB300": "nvl72 288gb",
    "RTXPRO6000": "workstation",
}
"""Words of a kind's names that are not in its own: the memory as it is sold, the form."""
_SAY_NOTHING = re.compile(r"nvidia|geforce|tesla|ada|blackwell|hbm\de?|edition|amd|instinct|oam")
"""Words of marketing names that distinguish no two kinds."""
_RARER = re.compile(r".*-(PCIe|NVL|Server)")
"""Kinds that are meant only if their form is named, where there is another."""
_SPELLINGS = (
    (r"\brtx[-_ ]*(pro)?[-_ ]*(?=\d)", r"rtx\1"),  # RTX 4090, RTX PRO 6000
    (r"^(?=\d{4}\b)", "rtx"),  # 4090
    (r"\bsxm\d\b", "sxm"),
    (r"(\d)g(i?b)?\b", r"\1gb"),  # 80G, 80GiB
    (r"\bmi(\d{3})\b", r"mi\1x"),
)


def device_kind(kind: str) -> DeviceSpec:
    """Return the built-in device of this kind, by its name or by words that fit no other (`H200`, `a100-sxm4-80gb`).

    Raises:
        InputError: The kind is unknown, with the list of kinds; or it fits several kinds, with those.
    """
    kinds = kinds_named(kind)
    if len(kinds) == 1:
        return SHEETS[kinds[0]].device
    if kinds:
        raise InputError(f"'{kind}' is ambiguous: write {' or '.join(kinds)}.")
    raise InputError(
        f"There is no device kind '{kind}': the kinds are {', '.join(KINDS)}; to describe another device, edit the "
        f"file that `exegpt show 8x{KINDS[0]} --yaml` prints."
    )


def kinds_named(text: str) -> list[str]:
    """Return the kinds that a name may stand for: one if it is clear, none if it is unknown."""
    exact = [kind for kind in KINDS if kind.lower() == text.lower()]
    words = _words(text)
    kinds = exact or [kind for kind in KINDS if words and _names(words, kind)]
    usual = [kind for kind in kinds if not _RARER.fullmatch(kind)]
    return usual if len(usual) == 1 else kinds


def _words(text: str) -> list[str]:
    """Return the words of a kind's name: `NVIDIA H100-SXM5-80GB` is h100, sxm, 80gb."""
    text = re.sub(r"[-_ ]+", "-", text.lower())
    for spelling, usual in _SPELLINGS:
        text = re.sub(spelling, usual, text)
    return [word for word in text.split("-") if word and not _SAY_NOTHING.fullmatch(word)]


def _names(words: list[str], kind: str) -> bool:
    """Return whether these words name a kind: its name first, then its memory or its form."""
    kind_words, memory = _words(kind), f"{SHEETS[kind].mib / 2**10:.0f}gb"
    known = {*kind_words, *_WORDS.get(kind, "").split(), memory}
    return words[0] == kind_words[0] and known.issuperset(words)
