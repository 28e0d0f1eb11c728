"""How tests start jobs of several ranks."""

import os
import shutil
import sys
from pathlib import Path

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def launcher_environment(session_files):
    """Variables of `mpirun`: as root, with more ranks than cores, its session's files in an own directory, since it
    doesn't start where a killed one with its process ID has left some.
    """
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_prte_tmpdir_base": str(session_files),
    }
