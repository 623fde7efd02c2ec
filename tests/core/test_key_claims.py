"""Claims of keys: one request at a time, for a while, as long as its owner lives."""

from hypothesis import given
from hypothesis import strategies as st

from onepiece.core.key_claims import KeyClaims

LIVING = frozenset({"p.1", "q.1"})


def claims_of_two() -> KeyClaims:
    """Room for two claims, of ten seconds."""
    return KeyClaims(claims_max=2, seconds=10.0)


def test_a_key_is_one_requests_until_it_lets_go() -> None:
    """Another request is refused; the same one may claim it again, and nobody else may release it."""
    claims = claims_of_two()
    assert claims.claim("k", "1", "p.1", living=LIVING, now=0.0)
    assert not claims.claim("k", "2", "q.1", living=LIVING, now=1.0)
    assert not claims.is_free("k", "2", living=LIVING, now=1.0)
    assert claims.is_free("k", "1", living=LIVING, now=1.0)
    claims.release("k", "2")
    assert not claims.claim("k", "2", "q.1", living=LIVING, now=1.0)
    claims.release("k", "1")
    assert claims.claim("k", "2", "q.1", living=LIVING, now=1.0)


def test_a_claim_is_over_with_its_time_or_its_owner() -> None:
    """Ten seconds behind the last time it was claimed, and at once when its owner's life is over."""
    claims = claims_of_two()
    assert claims.claim("k", "1", "p.1", living=LIVING, now=0.0)
    assert claims.claim("k", "1", "p.1", living=LIVING, now=5.0)
    assert not claims.claim("k", "2", "q.1", living=LIVING, now=14.9)
    assert claims.claim("k", "2", "q.1", living=LIVING, now=15.0)
    assert claims.claim("k", "1", "p.2", living={"p.2"}, now=15.0)


def test_too_many_are_refused_until_some_are_over() -> None:
    """The bound holds; what is out of time makes room."""
    claims = claims_of_two()
    assert claims.claim("a", "1", "p.1", living=LIVING, now=0.0)
    assert claims.claim("b", "2", "p.1", living=LIVING, now=1.0)
    assert not claims.claim("c", "3", "p.1", living=LIVING, now=2.0)
    assert claims.claim("a", "1", "p.1", living=LIVING, now=9.0), "what has its place may keep it"
    assert claims.claim("c", "3", "p.1", living=LIVING, now=11.0)
    assert len(claims) == 2


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["claim", "release"]),
            st.sampled_from("abc"),
            st.sampled_from("123"),
            st.floats(0.0, 8.0),
        ),
        max_size=40,
    )
)
def test_a_key_never_has_two_claims_at_a_time(steps: list[tuple[str, str, str, float]]) -> None:
    """Whatever is asked in whatever order: as a plain list of what was granted says, within the bound."""
    claims, granted, now = claims_of_two(), dict[str, tuple[str, float]](), 0.0
    for what, key, uid, pause in steps:
        now += pause
        granted = {each: (of, until) for each, (of, until) in granted.items() if until > now}
        if what == "release":
            claims.release(key, uid)
            if key in granted and granted[key][0] == uid:
                del granted[key]
            continue
        has_room = key in granted or len(granted) < 2
        is_free = key not in granted or granted[key][0] == uid
        assert claims.claim(key, uid, "p.1", living=LIVING, now=now) == (has_room and is_free)
        if has_room and is_free:
            granted[key] = (uid, now + 10.0)
        assert len(claims) <= 2
