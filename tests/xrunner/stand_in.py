"""A GPU of this process: the runner's way through a GPU, over the CPU's tensors."""

import torch

from xrunner.models.device import CPU


class StandIn:
    """Computes at once, and lets copies to the host, and those beside the computing, come late: until a moment is asked
    for that lies behind them, their target holds rubbish. A graph calls the captured function again, until it is
    dropped; while it is captured, no event may be queried.
    """

    device = CPU

    def __init__(self):
        self.pins, self.queued, self.waited, self.begun, self.captured, self.replayed = {}, [], 0, 0, 0, 0
        self.capturing, self.dropped = False, 0

    def pinned(self, count):
        assert not self.capturing, "to look for memory that is free again, torch asks for moments"
        host = torch.empty(count, dtype=torch.uint8)
        self.pins[host.data_ptr()] = host  # kept, so that no other tensor gets its address
        return host

    def copy(self, target, source):
        target_pinned, source_pinned = (t.untyped_storage().data_ptr() in self.pins for t in (target, source))
        assert target_pinned != source_pinned, "neither end of a copy, or both, are pinned memory"
        if target_pinned:
            self._later(target, source)
        else:
            target.copy_(source)

    def copy_beside(self, target, source):
        return self._later(target, source)

    def moment(self):
        return Moment(self, len(self.queued))

    def begin_graphs(self):
        self.begun += 1

    def capture(self, compute):
        assert self.begun, "graphs need memory that they share"
        self.captured += 1
        self.capturing = True
        try:
            compute()
        finally:
            self.capturing = False
        made_at = self.dropped

        def replay():
            assert made_at == self.dropped, "the graph has been dropped"
            self.replayed += 1
            compute()

        return replay

    def drop_graphs(self):
        self.dropped += 1

    def _later(self, target, source):
        taken = source.clone()
        target.view(torch.uint8).fill_(0xA5)
        self.queued.append(lambda: target.copy_(taken))
        return self.moment()


class Moment:
    def __init__(self, gpu, behind):
        assert not gpu.capturing, "a moment within a graph is no moment"
        self.gpu, self.behind, self.asked = gpu, behind, False

    def query(self):
        """Not yet when first asked."""
        assert not self.gpu.capturing, "to ask for a moment ends a capture"
        if not self.asked:
            self.asked = True
            return False
        self.synchronize()
        return True

    def synchronize(self):
        self.gpu.waited += 1
        for place in range(self.behind):
            if self.gpu.queued[place]:
                self.gpu.queued[place]()
                self.gpu.queued[place] = None
