"""What a seed draws for a run of the simulated cluster: its size, its manners, its faults."""

from random import Random
from typing import Final

from attrs import evolve, fields, frozen

from onepiece.core.balance import RebalanceMode
from onepiece.node.options import NodeOptions
from simulations.sim_network import Weather
from simulations.sim_stages import DIAMOND, LINE
from transports import Address

FAULTS: Final = ("kill", "dark", "stop", "pause", "cut", "isolate", "reset", "slow", "full", "clock")
STALL: Final = "stall"
"""A node that stops while it accepts a request. No seed draws it: it is asked for by name."""
MIB: Final = 1 << 20
REBALANCE_SECONDS: Final = 3.0
DEVICES_MOVING: Final = 12
REQUESTS_MOVING: Final = 240
"""Fewer prove nothing to whoever decides about moves."""


@frozen
class Plan:
    """The options of one run; everything else follows from them and the seed."""

    seed: int
    nodes: int
    requests: int
    copies: int
    proxies: int
    stores: int
    """Of the nodes, how many are proxies and stores; the first one is the manager."""
    heartbeat_seconds: float
    lease_seconds: float
    load_seconds: float
    fault_seconds: float
    """Between two faults, on average."""
    faults: tuple[str, ...]
    retain_memory_bytes: int
    disk_seconds: float
    skew_seconds: float
    """How wrong wall clocks are."""
    poison: float
    """Of the requests, to end the process of whatever node runs a certain stage of theirs."""
    lost_answers: float
    repeated_calls: float
    rebalances: bool
    """Instances move with the load, which is heavy, and shifts. No seed draws it: it is asked for."""
    weather: Weather

    @classmethod
    def draw(cls, seed: int, *, nodes: int | None = None, requests: int | None = None) -> "Plan":
        """The plan of a seed; ``nodes`` and ``requests`` are drawn unless given."""
        rng = Random(f"plan {seed}")  # noqa: S311  # a run must be repeatable, not secret
        drawn_nodes, drawn_requests = rng.randint(3, 6), rng.randint(10, 24)
        nodes = nodes or drawn_nodes
        heartbeat_seconds = rng.choice((0.5, 1.0))
        faults = tuple(fault for fault in FAULTS if rng.random() < 0.5)
        return cls(
            seed=seed,
            nodes=nodes,
            requests=requests or drawn_requests,
            copies=rng.choice((2, 2, 3)),
            proxies=rng.randint(2, nodes),
            stores=rng.randint(2, nodes),
            heartbeat_seconds=heartbeat_seconds,
            lease_seconds=heartbeat_seconds * rng.choice((4, 6)),
            load_seconds=rng.choice((20.0, 40.0)),
            fault_seconds=rng.choice((2.0, 5.0, 10.0)),
            faults=() if rng.random() < 0.1 else faults,
            retain_memory_bytes=rng.choice((1, 4096, 1 << 20)),
            disk_seconds=rng.choice((0.0002, 0.002, 0.02)),
            skew_seconds=rng.choice((0.0, 0.5)),
            poison=rng.choice((0.0, 0.0, 0.1)),
            lost_answers=rng.choice((0.0, 0.05)),
            repeated_calls=rng.choice((0.0, 0.05)),
            rebalances=False,
            weather=Weather.draw(rng),
        )

    def node_options(self, number: int) -> NodeOptions:
        """The settings of one node."""
        name = f"n{number}"
        roles = {"worker"}
        if number == 0:
            roles.add("manager")
        if number < self.proxies:
            roles.add("proxy")
        if number >= self.nodes - self.stores:
            roles.add("store")
        options = NodeOptions(
            roles=frozenset(roles),
            listen=Address("sim", name),
            join=(Address("sim", "n0"),) if number else (),
            http=f"{name}:80",
            devices=("cpu:0=4GiB",),
            workflows=() if number else (LINE, DIAMOND),
            name=name,
            inbox_bytes=MIB // 4,
            join_bytes=MIB,
            store_bytes=16 * MIB,
            copies=self.copies,
            retain_memory_bytes=self.retain_memory_bytes,
            retain_disk_bytes=MIB,
            requests_max=64,
            workers=max(1, self.nodes - 1),
            heartbeat_seconds=self.heartbeat_seconds,
            lease_seconds=self.lease_seconds,
            drain_seconds=20.0,
        )
        return self._moving(options) if self.rebalances else options

    def _moving(self, options: NodeOptions) -> NodeOptions:
        """Each actor has a device for itself, and few are idle."""
        devices = tuple(f"cpu:{number}=4GiB" for number in range(-(-DEVICES_MOVING // self.nodes)))
        return evolve(
            options,
            devices=devices,
            rebalance=RebalanceMode.ON,
            rebalance_seconds=REBALANCE_SECONDS,
            requests_max=self.requests,
        )

    def without_faults(self) -> "Plan":
        """The same run in fair weather."""
        weather = evolve(self.weather, spike_chance=0.0, flip_chance=0.0)
        return evolve(self, faults=(), lost_answers=0.0, repeated_calls=0.0, weather=weather)

    def lines(self) -> list[str]:
        """The options, for people."""
        told = [f"{each.name}={getattr(self, each.name)}" for each in fields(type(self))[1:-1]]
        weather = [f"{each.name}={getattr(self.weather, each.name)}" for each in fields(Weather)]
        return [f"seed {self.seed}", "  " + " ".join(told), "  " + " ".join(weather)]
