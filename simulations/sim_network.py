"""What lies between simulated hosts: wires on which everything arrives late, in order, or not at all.

A *wire* joins a producer's process and an owner's host by two *lanes*, one in each direction. What is
sent on a lane arrives in the order of sending, each parcel late by what is drawn for it; lanes know
nothing of each other, so sessions overtake one another freely.

What can happen to a wire::

    regular end       what is under way arrives up to some point, then the other side is told
    reset             the same, for both sides
    a process dies    as a regular end of its side; or, where its host goes dark, nothing more is heard of it
    a cut             parcels of one direction wait until it is healed; who hears nothing for
                      ``silence_seconds`` gives the wire up
    a pause           as a cut, where the owner's processor has a part in each operation
"""

import itertools
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Final, Protocol

from attrs import define, evolve, frozen

from simulations.loop import Process, VirtualLoop
from transports import ConnectFailed, PeerLost, TransportError

SILENCE_SECONDS: Final = 10.0
"""As in ``transports.Options``."""


@frozen
class Weather:
    """What the network is like in one run."""

    latency_seconds: float
    """The least that a parcel takes."""
    jitter_seconds: float
    """The mean of what comes on top."""
    spike_chance: float
    spike_seconds: float
    """Now and then a parcel takes up to so long."""
    one_sided: bool
    """Operations land without the owner's processor, also while its process is stopped."""
    guarded_bytes_max: int
    split_chance: float
    """Of a posted chain, to land piece by piece; else it lands whole."""
    piece_bytes: int
    """Pieces are at most so long."""
    window_bytes: int
    """Bytes under way on one wire beyond which ``post`` waits."""
    fence_seconds: float
    """The most that a fence takes; writes land meanwhile."""
    flip_chance: float
    """Of each piece, to arrive with one bit changed."""

    @classmethod
    def draw(cls, rng: Random) -> "Weather":
        """The weather of a run."""
        one_sided = rng.random() < 0.5
        return cls(
            latency_seconds=rng.choice((0.00005, 0.0005, 0.002)),
            jitter_seconds=rng.choice((0.00001, 0.0005, 0.005)),
            spike_chance=rng.choice((0.0, 0.001, 0.01)),
            spike_seconds=rng.choice((0.05, 0.5, 2.0)),
            one_sided=one_sided,
            guarded_bytes_max=0 if one_sided else rng.choice((0, 1 << 12, 1 << 30)),
            split_chance=rng.choice((0.02, 0.2, 1.0)),
            piece_bytes=rng.choice((256, 4096, 1 << 20)),
            window_bytes=rng.choice((1 << 14, 1 << 20)),
            fence_seconds=rng.choice((0.0, 0.001, 0.05)),
            flip_chance=rng.choice((0.0, 0.0, 0.0002)),
        )


class Guest(Protocol):
    """Who answers at a host."""

    def knock(self, wire: "Wire", knock: object) -> None:
        """A producer has arrived."""
        ...


@define(eq=False)
class Host:
    """A place in the network, whatever process lives there."""

    name: str
    process: Process | None = None
    """The process that lives there now."""
    guest: Guest | None = None
    """What listens there."""
    is_dark: bool = False
    """Nothing answers there, not even that nobody listens."""


@define(eq=False)
class Parcel:
    """Something under way; ``freeze`` makes it independent of the sender's memory."""

    arrive: Callable[[], None]
    freeze: Callable[[], None] | None = None
    due: float = 0.0


class Lane:
    """One direction of a wire."""

    def __init__(self, network: "Network", source: Host, target: Host) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._under_way: deque[Parcel] = deque()
        self._is_waiting = False
        self._has_ended = False
        self._last_due = 0.0

    def send(self, arrive: Callable[[], None], freeze: Callable[[], None] | None = None) -> None:
        """Have ``arrive`` called in the world's process, behind what was sent before."""
        if not self._has_ended:
            self._append(Parcel(arrive, freeze))

    def end(self, farewell: Callable[[], None] | None = None) -> None:
        """Take nothing more; of what is under way some first part arrives still, and then ``farewell``."""
        if self._has_ended:
            return
        self._has_ended = True
        kept = self._network.rng.randint(0, len(self._under_way))
        while len(self._under_way) > kept:
            self._under_way.pop()
        for parcel in self._under_way:
            if parcel.freeze is not None:
                parcel.freeze()
        if farewell is not None:
            self._append(Parcel(farewell))

    def take_no_more(self) -> None:
        """What is under way arrives; nothing is sent behind it."""
        self._has_ended = True

    def drop(self) -> None:
        """Nothing arrives any more."""
        self._has_ended = True
        self._under_way.clear()

    def _append(self, parcel: Parcel) -> None:
        parcel.due = self._last_due = max(self._last_due, self._network.arrival())
        self._under_way.append(parcel)
        self._await_head()

    def _await_head(self) -> None:
        if not self._is_waiting and self._under_way:
            self._is_waiting = True
            self._network.loop.at(self._under_way[0].due, self._look)

    def _look(self) -> None:
        self._is_waiting = False
        if not self._under_way:
            return
        if self._network.is_cut(self._source, self._target):
            self._is_waiting = True
            self._network.when_healed(self._source, self._target, self._go_on)
        elif self._under_way[0].due <= self._network.loop.now:
            self._network.on_arrival(self._source.name, self._target.name)
            self._under_way.popleft().arrive()
            self._await_head()
        else:
            self._await_head()

    def _go_on(self) -> None:
        """The cut was healed: what waited there needs its time once more."""
        self._is_waiting = False
        if self._under_way:
            self._under_way[0].due = self._last_due = max(self._last_due, self._network.arrival())
            self._await_head()


class Wire:
    """A connection between a producer's process and an owner's host."""

    def __init__(self, network: "Network", number: int, near: Host, far: Host) -> None:
        assert near.process is not None, "who connects is alive"
        self.number = number
        self.near, self.far = near, far
        self.near_process: Process = near.process
        self.far_process: Process | None = None
        """Known once the first parcel has arrived."""
        self.out = Lane(network, near, far)
        self.back = Lane(network, far, near)
        self.tell_near: Callable[[TransportError], None] = lambda _: None
        """The producer's side learns that the session is over."""
        self.tell_far: Callable[[], None] = lambda: None
        """The owner's side learns that the producer is gone."""
        self.is_far_told = False
        self._network = network
        self._is_near_told = False

    def close(self) -> None:
        """The producer's side ends it."""
        self._is_near_told = True
        self.out.end(self.lose_far)
        self.back.drop()
        self._forget_if_over()

    def reset(self) -> None:
        """It breaks; both sides learn of it, each in its time."""
        self.out.end(self.lose_far)
        self.back.end(lambda: self.lose_near(PeerLost("the connection was reset")))

    def refuse(self, error: TransportError) -> None:
        """The owner's side ends it and says why."""
        self.is_far_told = True
        self.back.send(lambda: self.lose_near(error))
        self.back.take_no_more()

    def fall_silent(self) -> None:
        """Nothing was heard for so long that either side gives it up."""
        self.lose_near(PeerLost(f"nothing was heard for {SILENCE_SECONDS:.0f} s"))
        self.lose_far()

    def die_near(self, *, silently: bool) -> None:
        """The producer's process has died: what is left of it gets no answer and reaches nobody."""
        self._is_near_told = True
        self.back.drop()
        self.tell_near(PeerLost("this process is dead: nothing it does has an effect"))
        if silently:
            self.out.end()
            self._network.loop.at(self._network.loop.now + SILENCE_SECONDS, self.lose_far)
        else:
            self.out.end(self.lose_far)
        self._forget_if_over()

    def die_far(self, *, silently: bool) -> None:
        """The owner's process has died, and its memory with it."""
        self.is_far_told = True
        self.out.drop()
        error = PeerLost(f"the process at {self.far.name} has died")
        if silently:
            self.back.end()
            self._network.loop.at(self._network.loop.now + SILENCE_SECONDS, lambda: self.lose_near(error))
        else:
            self.back.end(lambda: self.lose_near(error))
        self._forget_if_over()

    def lose_near(self, error: TransportError) -> None:
        """The producer's side learns that it is over."""
        self.out.end(self.lose_far)
        self.back.drop()
        if not self._is_near_told:
            self._is_near_told = True
            self.tell_near(error)
        self._forget_if_over()

    def lose_far(self) -> None:
        """The owner's side learns that it is over."""
        self.out.drop()
        if not self.is_far_told:
            self.is_far_told = True
            self.tell_far()
        self._forget_if_over()

    def _forget_if_over(self) -> None:
        if self._is_near_told and self.is_far_told:
            self._network.forget(self)


class Network:
    """All hosts and wires of a run.

    Args:
        loop: The world's loop.
        rng: Draws delays and the fate of what is under way.
        weather: How it behaves.
        on_arrival: Told whenever something gets from one host to another.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        rng: Random,
        weather: Weather,
        on_arrival: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        self.loop = loop
        self.on_arrival = on_arrival
        self.on_write: Callable[[Process, bytes], None] = lambda *_: None
        """Told of each write into a process's memory, with the hello of the producer that wrote."""
        self.rng = rng
        self.weather = weather
        self.slowness = 1.0
        """All delays are multiplied by it."""
        self.flips = 0
        """Bits that arrived changed."""
        self.hosts: dict[str, Host] = {}
        self._wires: dict[int, Wire] = {}
        self._numbers = itertools.count(1)
        self._cuts: dict[tuple[str, str], int] = {}
        self._waiting: dict[tuple[str, str], list[Callable[[], None]]] = {}
        self._cut_numbers = itertools.count(1)

    def calm_down(self) -> None:
        """No more spikes or damage."""
        self.weather = evolve(self.weather, spike_chance=0.0, flip_chance=0.0)

    def host(self, name: str) -> Host:
        """The host of this name; made if it is not there."""
        if name not in self.hosts:
            self.hosts[name] = Host(name)
        return self.hosts[name]

    def arrival(self) -> float:
        """When something that is sent now will be there: within a silence, as wires are given up then."""
        weather = self.weather
        delay = weather.latency_seconds + self.rng.expovariate(1.0) * weather.jitter_seconds
        if weather.spike_chance and self.rng.random() < weather.spike_chance:
            delay += self.rng.random() * weather.spike_seconds
        return self.loop.now + min(delay * self.slowness, SILENCE_SECONDS)

    # --- wires ---------------------------------------------------------------------------------

    def connect(self, near: Host, far: str, knock: object) -> Wire:
        """Open a wire; who listens at the far host gets the ``knock``."""
        wire = Wire(self, next(self._numbers), near, self.host(far))
        self._wires[wire.number] = wire
        wire.out.send(lambda: self._arrive(wire, knock))
        return wire

    def _arrive(self, wire: Wire, knock: object) -> None:
        host = wire.far
        if host.is_dark:
            return
        if host.process is None or host.guest is None:
            wire.refuse(ConnectFailed(f"nobody listens on {host.name}"))
            return
        wire.far_process = host.process
        host.process.call_soon(host.guest.knock, wire, knock)

    def forget(self, wire: Wire) -> None:
        """A wire is over on both sides."""
        self._wires.pop(wire.number, None)

    def wires(self) -> list[Wire]:
        """Those that are not over, oldest first."""
        return list(self._wires.values())

    def bury(self, host: Host, *, silently: bool) -> None:
        """The process at a host has died; ``silently``: its machine with it."""
        process = host.process
        assert process is not None
        host.process, host.guest, host.is_dark = None, None, silently
        for wire in self.wires():
            if wire.near_process is process:
                wire.die_near(silently=silently)
            elif wire.far_process is process:
                wire.die_far(silently=silently)

    # --- cuts and pauses -----------------------------------------------------------------------

    def is_cut(self, source: Host, target: Host) -> bool:
        """Whether nothing gets from one host to another now."""
        return (source.name, target.name) in self._cuts

    def cut(self, source: str, target: str) -> None:
        """Let nothing through in this direction until ``heal``."""
        number = self._cuts[source, target] = next(self._cut_numbers)
        self.loop.at(self.loop.now + SILENCE_SECONDS, self._give_up, source, target, number)

    def heal(self, source: str, target: str) -> None:
        """Let everything through again; no error if it was not cut."""
        self._cuts.pop((source, target), None)
        for go_on in self._waiting.pop((source, target), []):
            go_on()

    def when_healed(self, source: Host, target: Host, go_on: Callable[[], None]) -> None:
        """Call back when the cut between two hosts is healed."""
        self._waiting.setdefault((source.name, target.name), []).append(go_on)

    def _give_up(self, source: str, target: str, number: int) -> None:
        if self._cuts.get((source, target)) != number:
            return
        for wire in self.wires():
            if {wire.near.name, wire.far.name} == {source, target}:
                wire.fall_silent()

    def notice_pause(self, process: Process) -> None:
        """A process is paused: where operations need it, its peers give it up after a while."""
        if self.weather.one_sided:
            return
        steps = process.steps

        def give_up() -> None:
            if process.is_paused and process.steps == steps:
                for wire in self.wires():
                    if process in {wire.near_process, wire.far_process}:
                        wire.fall_silent()

        self.loop.at(self.loop.now + SILENCE_SECONDS, give_up)
