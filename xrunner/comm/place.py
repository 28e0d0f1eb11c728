"""Place: where a rank of a job stands in a schedule, and who its neighbours are."""

from dataclasses import dataclass
from functools import cached_property

from exegpt.schedule import Schedule, Stage


@dataclass(frozen=True)
class Place:
    """One rank is one device: `rank` modulo the devices of a replica is the device's number in the schedule."""

    schedule: Schedule
    rank: int

    @cached_property
    def replica(self) -> int:
        """Which copy of the model it works for."""
        return self.rank // devices(self.schedule)

    @property
    def device(self) -> int:
        """Its device's number in the schedule."""
        return self.rank - self._first

    @cached_property
    def stage(self) -> int:
        """Its stage's place among the schedule's."""
        return next(i for i, stage in enumerate(self.schedule.stages) if self.device in stage.devices)

    @cached_property
    def part(self) -> int:
        """Its place in its stage's tensor-parallel group."""
        return self.group.index(self.rank)

    @cached_property
    def group(self) -> tuple[int, ...]:
        """The ranks of its stage."""
        return self._ranks(self.schedule.stages[self.stage])

    @cached_property
    def line(self) -> tuple[Stage, ...]:
        """The stages that a piece of work goes through here, one after the other: all, or those of its side (WAA)."""
        phase = self.schedule.stages[self.stage].phase
        return tuple(stage for stage in self.schedule.stages if stage.phase == phase)

    @property
    def tp(self) -> int:
        """Its stage's tensor-parallel degree."""
        return len(self.group)

    @property
    def layers(self) -> range:
        """The decoder layers that it has, or has a shard of."""
        return range(*(self.schedule.stages[self.stage].decoder_layers or (0, 0)))

    @property
    def encoder_layers(self) -> range:
        """The encoder layers, in an encoder-decoder."""
        return range(*(self.schedule.stages[self.stage].encoder_layers or (0, 0)))

    @property
    def first(self) -> bool:
        """Whether its stage is the first of its line, which embeds."""
        return self._step == 0

    @property
    def samples(self) -> bool:
        """Whether it turns states into tokens: the last stage's first rank does."""
        return self.part == 0 and self._step == len(self.line) - 1

    @property
    def before(self) -> int | None:
        """Whose states it takes: of a stage of other degree, the rank at its own place modulo that degree."""
        if self.first:
            return None
        ranks = self._ranks(self.line[self._step - 1])
        return ranks[self.part % len(ranks)]

    @property
    def after(self) -> tuple[int, ...]:
        """Who takes its states."""
        if self._step == len(self.line) - 1:
            return ()
        ranks = self._ranks(self.line[self._step + 1])
        return tuple(rank for part, rank in enumerate(ranks) if part % self.tp == self.part)

    @property
    def encoded_by(self) -> int | None:
        """Whose encoder's output it takes, where it decodes with another stage's: of a stage of other degree, as
        `before`.
        """
        if self._ending is None or not self.layers or self.group == self._ending:
            return None
        return self._ending[self.part % len(self._ending)]

    @cached_property
    def encodes_for(self) -> tuple[int, ...]:
        """Who takes its encoder's output."""
        everyone = (Place(self.schedule, rank) for stage in self.schedule.stages for rank in self._ranks(stage))
        return tuple(place.rank for place in everyone if place.encoded_by == self.rank)

    @cached_property
    def encoder(self) -> "Place":
        """The first rank that encodes for its replica."""
        encoding = next(stage for stage in self.schedule.stages if stage.phase != "decode")
        return Place(self.schedule, self._ranks(encoding)[0])

    @cached_property
    def driver(self) -> int:
        """The rank that decides for its replica: the first one of those that decode."""
        return next(self._ranks(stage)[0] for stage in self.schedule.stages if stage.phase != "encode")

    @cached_property
    def sampler(self) -> int:
        """The rank that makes its line's tokens."""
        return self._ranks(self.line[-1])[0]

    @cached_property
    def followers(self) -> tuple[int, ...]:
        """The other ranks of its line, in order."""
        return tuple(rank for stage in self.line for rank in self._ranks(stage) if rank != self.driver)

    @cached_property
    def _first(self) -> int:
        """The first rank of its replica."""
        return self.replica * devices(self.schedule)

    @cached_property
    def _ending(self) -> tuple[int, ...] | None:
        """The ranks of the stage that ends the encoder."""
        encoding = [stage for stage in self.schedule.stages if stage.encoder_layers]
        return self._ranks(encoding[-1]) if encoding else None

    @cached_property
    def _step(self) -> int:
        """Its stage's place in its line."""
        return self.line.index(self.schedule.stages[self.stage])

    def _ranks(self, stage: Stage) -> tuple[int, ...]:
        return tuple(self._first + device for device in stage.devices)


def devices(schedule: Schedule) -> int:
    """Devices of one replica."""
    return sum(len(stage.devices) for stage in schedule.stages)


def ranks_needed(schedule: Schedule) -> int:
    """Ranks of a job that runs this schedule."""
    return devices(schedule) * schedule.replicas
