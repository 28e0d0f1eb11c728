"""Public measurements for reproductions, which aren't part of exegpt."""

import os
from pathlib import Path

from xcore.errors import InputError


def public_data(whose: str, folder: str) -> Path:
    """Return a subfolder of the folder that EXEGPT_DATA names; InputError, with instructions, if it doesn't exist."""
    path = Path(os.environ.get("EXEGPT_DATA", "data")) / folder
    if not path.is_dir():
        raise InputError(
            f"This needs {whose} published measurements, and there is no folder '{path}': set EXEGPT_DATA to the "
            f"folder that contains {folder}/."
        )
    return path
