"""The clock of a manager, on a loop that stands still now and then."""

from onepiece.node.own_time import LOOK_SECONDS, OwnTime


def test_what_it_was_late_by_did_not_pass() -> None:
    """A loop that comes to a tenth of its looks lives a tenth of the time. None goes back."""
    loop_time = 0.0
    own = OwnTime(lambda: loop_time)
    moments = [own.now()]
    for _ in range(4):
        loop_time += 10 * LOOK_SECONDS
        moments.append(own.now())  # somebody asks before it looks
        own.look()
        moments.append(own.now())
    assert moments == sorted(moments)
    assert moments[-1] == 4 * LOOK_SECONDS
    assert own.on_the_loop(moments[-1] + 1.0) == loop_time + 1.0


def test_it_goes_with_the_loop_that_is_in_time() -> None:
    """Looks that come a little early, or when they are due, lose nothing."""
    loop_time = 100.0
    own = OwnTime(lambda: loop_time)
    for _ in range(8):
        loop_time += LOOK_SECONDS
        own.look()
    assert own.now() == 100.0 + 8 * LOOK_SECONDS
