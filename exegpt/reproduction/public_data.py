"""Public measurements that a reproduction stands on: they are no part of exegpt."""

import os
from pathlib import Path

from exegpt.errors import InputError


def public_data(whose: str, folder: str) -> Path:
    """A folder of the one that EXEGPT_DATA names; InputError, which says how to name it, where it isn't there."""
    path = Path(os.environ.get("EXEGPT_DATA", "data")) / folder
    if not path.is_dir():
        raise InputError(
            f"This needs {whose} published measurements, and there is no folder '{path}': set EXEGPT_DATA to the "
            f"folder that has {folder}/."
        )
    return path
