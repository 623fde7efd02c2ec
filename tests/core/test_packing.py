from collections import Counter
from itertools import product
from random import Random

import pytest
from attrs import evolve
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onepiece.core.inventory import DeviceKind, StageNeed
from onepiece.core.packing import Packing, Room, desired_instances, pack
from tests.core.cluster import GIB, make_need, make_workflow


def _rooms(*sizes: tuple[int, ...], kind: DeviceKind = DeviceKind.GPU) -> list[Room]:
    """Nodes with devices of these sizes in GiB."""
    prefix = "cuda" if kind is DeviceKind.GPU else "cpu"
    return [
        Room(f"node-{n}", f"{prefix}:{d}", kind, size * GIB)
        for n, devices in enumerate(sizes, 1)
        for d, size in enumerate(devices)
    ]


def _pack(needs: list[StageNeed], rooms: list[Room], *, on_cpu: bool = False) -> Packing:
    by_key = {need.stage: need for need in needs}
    return pack(by_key, {need.stage: need.instances for need in needs}, rooms, on_cpu=on_cpu)


def _used(packing: Packing, needs: list[StageNeed]) -> Counter[tuple[str, str]]:
    sizes = {need.stage: need.memory_bytes for need in needs}
    used: Counter[tuple[str, str]] = Counter()
    for chosen in packing.chosen:
        for device in chosen.devices:
            used[chosen.node_id, device] += sizes[chosen.stage]
    return used


_NEEDS = st.lists(
    st.builds(
        lambda gib, instances, devices: make_need("x", gib, instances=instances, devices=devices),
        st.integers(0, 12),
        st.integers(1, 3),
        st.sampled_from([1, 1, 1, 2]),
    ),
    min_size=1,
    max_size=5,
).map(lambda needs: [evolve(need, stage=f"module:s{n}", name=f"s{n}") for n, need in enumerate(needs)])
_SIZES = st.lists(st.lists(st.integers(1, 16), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


@given(needs=_NEEDS, sizes=_SIZES)
def test_memory_is_never_exceeded(needs: list[StageNeed], sizes: list[tuple[int, ...]]) -> None:
    """No device is given more than it has, and each instance has its devices on one node."""
    rooms = _rooms(*sizes)
    packing = _pack(needs, rooms)
    used = _used(packing, needs)
    assert all(used[room.node_id, room.device] <= room.memory_bytes for room in rooms)
    counts = {need.stage: need.device_count for need in needs}
    for chosen in packing.chosen:
        assert len(set(chosen.devices)) == len(chosen.devices) == counts[chosen.stage]


@given(needs=_NEEDS, sizes=_SIZES)
def test_each_instance_is_placed_or_named(needs: list[StageNeed], sizes: list[tuple[int, ...]]) -> None:
    """Nothing is lost: chosen and unplaced are together what was wanted."""
    packing = _pack(needs, _rooms(*sizes))
    counts = Counter(chosen.stage for chosen in packing.chosen)
    counts.update({unplaced.stage: unplaced.instances for unplaced in packing.unplaced})
    assert counts == Counter({need.stage: need.instances for need in needs})


@given(needs=_NEEDS, sizes=_SIZES)
def test_what_is_left_out_fits_nowhere(needs: list[StageNeed], sizes: list[tuple[int, ...]]) -> None:
    """A stage that is left out does not fit in what is left on any node."""
    rooms = _rooms(*sizes)
    packing = _pack(needs, rooms)
    used = _used(packing, needs)
    by_key = {need.stage: need for need in needs}
    for unplaced in packing.unplaced:
        need = by_key[unplaced.stage]
        fitting = Counter(
            room.node_id
            for room in rooms
            if room.memory_bytes - used[room.node_id, room.device] >= need.memory_bytes
        )
        assert all(count < need.device_count for count in fitting.values())


def _fits(items: list[int], sizes: list[int]) -> bool:
    """By trying everything."""
    return any(
        all(
            sum(i for i, at in zip(items, places, strict=True) if at == d) <= size
            for d, size in enumerate(sizes)
        )
        for places in product(range(len(sizes)), repeat=len(items))
    )


@given(
    items=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=3),
)
@settings(max_examples=300)
def test_all_is_placed_when_it_fits(items: list[int], sizes: list[int]) -> None:
    """For small sets the outcome is that of trying everything, however cleverly it must be packed."""
    needs = [make_need(f"s{n}", gib) for n, gib in enumerate(items)]
    packing = _pack(needs, _rooms(*((size,) for size in sizes)))
    assert (not packing.unplaced) == _fits(items, sizes)


def test_a_case_that_greed_alone_gets_wrong() -> None:
    """Spreading first leaves no room for the last one here; the search finds the only way."""
    needs = [make_need(f"s{n}", gib) for n, gib in enumerate([6, 4, 4, 3, 3])]
    assert not _pack(needs, _rooms((10,), (10,))).unplaced


@given(needs=_NEEDS, sizes=_SIZES, random=st.randoms())
def test_order_of_the_input_plays_no_part(
    needs: list[StageNeed], sizes: list[tuple[int, ...]], random: Random
) -> None:
    """The same set gives the same choice, however it is listed."""
    rooms = _rooms(*sizes)
    mixed_needs, mixed_rooms = list(needs), list(rooms)
    random.shuffle(mixed_needs)
    random.shuffle(mixed_rooms)
    expected, got = _pack(needs, rooms), _pack(mixed_needs, mixed_rooms)
    assert sorted(expected.chosen, key=repr) == sorted(got.chosen, key=repr)


@given(nodes=st.integers(1, 6), devices=st.integers(1, 4), stages=st.integers(1, 24))
def test_equal_stages_spread_evenly(nodes: int, devices: int, stages: int) -> None:
    """On equal devices no device has two actors more than another, and no node either."""
    packing = _pack([make_need(f"s{n:02}", 1) for n in range(stages)], _rooms(*([(64,) * devices] * nodes)))
    per_device = Counter({(f"node-{n}", f"cuda:{d}"): 0 for n in range(1, nodes + 1) for d in range(devices)})
    per_device.update((chosen.node_id, chosen.devices[0]) for chosen in packing.chosen)
    assert max(per_device.values()) - min(per_device.values()) <= 1
    per_node = Counter({f"node-{n}": 0 for n in range(1, nodes + 1)})
    per_node.update(chosen.node_id for chosen in packing.chosen)
    assert max(per_node.values()) - min(per_node.values()) <= 1


@given(nodes=st.integers(1, 5), instances=st.integers(1, 5), others=st.integers(0, 4))
def test_instances_of_one_stage_go_to_different_nodes(nodes: int, instances: int, others: int) -> None:
    """While there are as many nodes as instances, no node has two of one stage."""
    assume(instances <= nodes)
    needs = [make_need("denoise", 8, instances=instances), *(make_need(f"s{n}", 1) for n in range(others))]
    packing = _pack(needs, _rooms(*([(64, 64)] * nodes)))
    homes = [chosen.node_id for chosen in packing.chosen if chosen.stage == "module:denoise"]
    assert len(set(homes)) == instances


def test_different_nodes_matter_more_than_load() -> None:
    """The second instance of a stage goes to the busier node rather than to the first one's node."""
    rooms = _rooms((24, 24), (24, 24))
    rooms[2:] = [evolve(room, used_bytes=GIB, stages=("module:other",)) for room in rooms[2:]]
    packing = _pack([make_need("denoise", 8, instances=2)], rooms)
    assert {chosen.node_id for chosen in packing.chosen} == {"node-1", "node-2"}


def test_what_is_there_counts_as_load() -> None:
    """A new stage goes to the device with the fewest actors, then to the emptier one."""
    busy, idle = _rooms((24,), (24,))
    busy = evolve(busy, used_bytes=GIB, stages=("module:other",))
    (chosen,) = _pack([make_need("denoise")], [busy, idle]).chosen
    assert chosen.node_id == idle.node_id


def test_nodes_where_it_failed_come_last() -> None:
    """A node on which the stage failed to load is used only if nothing else fits."""
    need = make_need("denoise", 20)
    rooms = _rooms((24,), (24,))
    failures = {(need.stage, "node-1"): 1}
    (chosen,) = pack({need.stage: need}, {need.stage: 1}, rooms, failures=failures).chosen
    assert chosen.node_id == "node-2"
    (chosen,) = pack({need.stage: need}, {need.stage: 1}, rooms[:1], failures=failures).chosen
    assert chosen.node_id == "node-1"


def test_several_devices_come_from_one_node() -> None:
    """A stage for four devices fits on the node that has four, not on two that have two each."""
    need = make_need("denoise", 40, devices=4)
    rooms = _rooms((80, 80), (80, 80, 80, 80), (80, 80))
    (chosen,) = _pack([need], rooms).chosen
    assert (chosen.node_id, len(chosen.devices)) == ("node-2", 4)
    assert _pack([need], rooms[:2]).unplaced


def test_processors_only_on_request() -> None:
    """A GPU stage goes on a processor only where the caller says that there is no GPU at all."""
    rooms = _rooms((64,), kind=DeviceKind.CPU)
    assert _pack([make_need("denoise")], rooms).unplaced
    assert _pack([make_need("denoise")], rooms, on_cpu=True).chosen
    assert _pack([make_need("mux", kind=DeviceKind.CPU)], rooms).chosen


def test_the_message_names_the_kind_that_is_asked_for() -> None:
    """A stage that wants a GPU is not said to want a processor, where it would do with one."""
    rooms = _rooms((16,), kind=DeviceKind.CPU)
    (unplaced,) = _pack([make_need("denoise", 40)], rooms, on_cpu=True).unplaced
    assert "on 1 gpu device of one node (or cpu, as no worker has a gpu), but cpu:0" in unplaced.message


def test_the_message_names_need_and_room() -> None:
    """What does not fit is told with its need, each device's room as it will be, and what to do."""
    needs = [make_need("denoise", 40), make_need("encode", 4)]
    (unplaced,) = _pack(needs, _rooms((24,), (16,))).unplaced
    assert unplaced.stage == "module:denoise"
    assert "needs 40.0 GiB on 1 gpu device" in unplaced.message
    assert "cuda:0 of node-1 has 20.0 GiB of 24.0 GiB free" in unplaced.message
    assert "cuda:0 of node-2 has 16.0 GiB of 16.0 GiB free" in unplaced.message


def test_the_message_is_bounded() -> None:
    """With a thousand devices the message shows a few and says how many more there are."""
    (unplaced,) = _pack([make_need("denoise", 40)], _rooms(*([(24,) * 8] * 125))).unplaced
    assert "and 992 more" in unplaced.message
    assert len(unplaced.message) < 1000


def test_search_is_bounded() -> None:
    """A set that cannot be packed, and too large to try everything, is given up after its steps."""
    needs = [make_need(f"s{n:02}", 7) for n in range(24)]
    packing = _pack(needs, _rooms(*([(20,)] * 10)))
    assert sum(unplaced.instances for unplaced in packing.unplaced) == 4


@pytest.mark.parametrize(("demand", "expected"), [(None, 2), ({"module:a": 5}, 5), ({"module:a": 0}, 1)])
def test_desired_instances_follow_demand(demand: dict[str, int] | None, expected: int) -> None:
    """Without demand the definition decides; with it the demand does, but never less than one."""
    workflow = make_workflow("w", make_need("a", instances=2), make_need("b"))
    assert desired_instances([workflow], demand) == {"module:a": expected, "module:b": 1}


def test_shared_stages_are_wanted_once() -> None:
    """Two workflows with one stage in common want it once."""
    first = make_workflow("v", make_need("a"), make_need("b"))
    second = make_workflow("w", make_need("a"), make_need("c"))
    assert desired_instances([first, second]) == {"module:a": 1, "module:b": 1, "module:c": 1}
