"""`exegpt`, each rank of which takes itself for a machine: `mpirun -n 2 python -m tests.xserver.two_machines`."""

import sys

from exegpt.cli import main
from xrunner.comm import ranks, relay


class Apart(ranks.Ranks):
    """Every rank on a node of its own."""

    def __init__(self, world=None, node=None):
        super().__init__(world, node and node.Split(world.rank))


if __name__ == "__main__":
    ranks.Ranks = Apart  # what `job` makes
    relay._addresses = lambda: ("127.0.0.1",)  # there may be no other network
    sys.exit(main())
