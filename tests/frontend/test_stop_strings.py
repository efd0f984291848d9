"""Stop strings against the obvious way of finding them, for every cut of the text."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.frontend.stop_strings import StopAutomaton, StopMatcher

TEXT = st.text("ab\u00e9", max_size=24)
STOPS = st.lists(st.text("ab\u00e9", min_size=1, max_size=5), min_size=1, max_size=4)


def slow_match(text: str, stops: list[str], armed_from: int) -> tuple[int, str] | None:
    """Where the first stop string completes that ends after ``armed_from``, and which it is."""
    for end in range(armed_from + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


def slow_held(text: str, stops: list[str]) -> int:
    """Length of the longest end of the text that begins some stop string and is not all of it."""
    lengths = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


@given(text=TEXT, stops=STOPS, cuts=st.sets(st.integers(0, 24)), include=st.booleans(), armed_from=st.integers(0, 24))
def test_equals_the_slow_twin_for_every_cut(
    text: str, stops: list[str], cuts: set[int], include: bool, armed_from: int
) -> None:
    borders = sorted({0, len(text), *(cut for cut in cuts | {armed_from} if cut < len(text))})
    matcher = StopMatcher(StopAutomaton(stops), include)
    found = slow_match(text, stops, armed_from)
    shown = ""
    for start, stop in pairwise(borders):
        shown += matcher.push(text[start:stop], armed=start >= armed_from)
        if matcher.matched is not None:
            break
        assert shown == text[: stop - slow_held(text[:stop], stops)]
    if found is None:
        assert matcher.matched is None
        assert shown + matcher.flush() == text
    else:
        end, which = found
        assert matcher.matched == which
        assert shown == text[: end if include else end - len(which)]


def test_the_earlier_in_the_list_wins_a_tie() -> None:
    for stops in (["xbc", "bc"], ["bc", "xbc"]):
        matcher = StopMatcher(StopAutomaton(stops), False)
        assert matcher.push("a") + matcher.push("xbcd") == ("a" if stops[0] == "xbc" else "ax")
        assert matcher.matched == stops[0]


def test_text_that_cannot_become_a_stop_string_is_never_held() -> None:
    """B004."""
    matcher = StopMatcher(StopAutomaton(["Z" * 20]), False)
    for piece in (" 5", " 6", " and", " more"):
        assert matcher.push(piece) == piece
    assert matcher.push("ZZ") == ""
    assert matcher.push("Y") == "ZZY"


def test_long_hostile_stop_strings_cost_constant_time_per_character() -> None:
    stops = ["a" * 1000 + chr(0x4E00 + place) for place in range(8)]
    matcher = StopMatcher(StopAutomaton(stops), False)
    shown = "".join(matcher.push("aaaa") for _ in range(2000))
    assert len(shown) == 8000 - 1000
    assert matcher.push(chr(0x4E00 + 3)) == ""
    assert matcher.matched == stops[3]
