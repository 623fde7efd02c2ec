"""When a sender looks how much was taken: soon after it sent something, and ever less often after that."""

from transports.sender_pace import Pace


def test_a_look_that_is_due_is_not_put_off() -> None:
    """However much is sent, the look that the first message asked for stays where it is."""
    now = 0.0
    pace = Pace(lambda: now)
    pace.sent(1)
    due = pace.wait
    for count in range(2, 50):
        now += due / 100
        pace.sent(count)
    assert pace.wait < due
    now = due
    pace.sent(50)
    assert pace.wait <= 0


def test_looks_become_rarer_while_nothing_moves() -> None:
    """The pause grows up to a bound, and what is sent then brings the next look near again."""
    pace = Pace(lambda: 0.0)
    pace.sent(1)
    waits = [pace.wait]
    for _ in range(5):
        pace.later()
        waits.append(pace.wait)
    assert waits == sorted(waits)
    assert waits[0] < waits[-1] == waits[-2]
    pace.sent(2)
    assert pace.wait == waits[0]


def test_who_waits_for_everything_to_be_taken_waits_less() -> None:
    """``drained`` is the one call that a look is made for."""
    pace = Pace(lambda: 0.0)
    pace.sent(1)
    alone = pace.wait
    pace.drainers += 1
    pace.soon()
    assert pace.wait < alone
    for _ in range(5):
        pace.later()
    assert pace.wait < alone
