"""Place: a rank's position in a schedule, and its neighbours."""

from dataclasses import dataclass
from functools import cached_property

from xcore.specs.schedule import Schedule, Stage, devices


@dataclass(frozen=True)
class Place:
    """A rank of a schedule.

    One rank is one device: `rank` modulo a replica's devices is the device's number.
    """

    schedule: Schedule
    rank: int

    @cached_property
    def replica(self) -> int:
        """The number of the rank's replica."""
        return self.rank // devices(self.schedule)

    @property
    def device(self) -> int:
        """The number of the rank's device in the schedule."""
        return self.rank - self._first

    @cached_property
    def stage(self) -> int:
        """The index of the rank's stage in the schedule."""
        return next(i for i, stage in enumerate(self.schedule.stages) if self.device in stage.devices)

    @cached_property
    def part(self) -> int:
        """The rank's index in the tensor-parallel group of its stage."""
        return self.group.index(self.rank)

    @cached_property
    def group(self) -> tuple[int, ...]:
        """The ranks of this rank's stage."""
        return self._ranks(self.schedule.stages[self.stage])

    @cached_property
    def line(self) -> tuple[Stage, ...]:
        """The stages that the rank's micro-batches pass, in order: all, or those of its side if disaggregated."""
        phase = self.schedule.stages[self.stage].phase
        return tuple(stage for stage in self.schedule.stages if stage.phase == phase)

    @property
    def tp(self) -> int:
        """The tensor-parallel degree of the rank's stage."""
        return len(self.group)

    @property
    def layers(self) -> range:
        """The decoder layers of which the rank has a shard."""
        return range(*(self.schedule.stages[self.stage].decoder_layers or (0, 0)))

    @property
    def encoder_layers(self) -> range:
        """The encoder layers of which the rank has a shard, in an encoder-decoder."""
        return range(*(self.schedule.stages[self.stage].encoder_layers or (0, 0)))

    @property
    def first(self) -> bool:
        """Whether the rank's stage is the first of its line, which embeds tokens."""
        return self._step == 0

    @property
    def samples(self) -> bool:
        """Whether the rank samples tokens: the first rank of the last stage."""
        return self.part == 0 and self._step == len(self.line) - 1

    @property
    def before(self) -> int | None:
        """The rank that sends states to this one; None on the first stage.

        If the previous stage has another degree, it is the rank with this one's index modulo that degree.
        """
        if self.first:
            return None
        ranks = self._ranks(self.line[self._step - 1])
        return ranks[self.part % len(ranks)]

    @property
    def after(self) -> tuple[int, ...]:
        """The ranks to which this one sends states."""
        if self._step == len(self.line) - 1:
            return ()
        ranks = self._ranks(self.line[self._step + 1])
        return tuple(rank for part, rank in enumerate(ranks) if part % self.tp == self.part)

    @property
    def encoded_by(self) -> int | None:
        """The rank that sends the encoder's output to this one if another stage computes it; chosen as in `before`."""
        if self._ending is None or not self.layers or self.group == self._ending:
            return None
        return self._ending[self.part % len(self._ending)]

    @cached_property
    def encodes_for(self) -> tuple[int, ...]:
        """The ranks to which this one sends the encoder's output."""
        places = (Place(self.schedule, rank) for stage in self.schedule.stages for rank in self._ranks(stage))
        return tuple(place.rank for place in places if place.encoded_by == self.rank)

    @cached_property
    def encoder(self) -> "Place":
        """The first rank that encodes for this rank's replica."""
        encoding = next(stage for stage in self.schedule.stages if stage.phase != "decode")
        return Place(self.schedule, self._ranks(encoding)[0])

    @cached_property
    def driver(self) -> int:
        """The rank that decides for this rank's replica: the first one that decodes."""
        return next(self._ranks(stage)[0] for stage in self.schedule.stages if stage.phase != "encode")

    @cached_property
    def sampler(self) -> int:
        """The rank that samples the tokens of this rank's line."""
        return self._ranks(self.line[-1])[0]

    @cached_property
    def followers(self) -> tuple[int, ...]:
        """The other ranks of this rank's line, in order."""
        return tuple(rank for stage in self.line for rank in self._ranks(stage) if rank != self.driver)

    @cached_property
    def _first(self) -> int:
        """The first rank of this rank's replica."""
        return self.replica * devices(self.schedule)

    @cached_property
    def _ending(self) -> tuple[int, ...] | None:
        """The ranks of the last encoder stage."""
        encoding = [stage for stage in self.schedule.stages if stage.encoder_layers]
        return self._ranks(encoding[-1]) if encoding else None

    @cached_property
    def _step(self) -> int:
        """The index of the rank's stage in its line."""
        return self.line.index(self.schedule.stages[self.stage])

    def _ranks(self, stage: Stage) -> tuple[int, ...]:
        return tuple(self._first + device for device in stage.devices)
