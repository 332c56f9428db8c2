"""Capture classes are shared by content, counted and recycled."""

from rheostat_engine.core.classes import CaptureClasses


def test_equal_sets_share_a_class_until_nobody_uses_it() -> None:
    classes = CaptureClasses(4)
    ones = classes.acquire([frozenset({1, 3}), frozenset(), frozenset({1, 3})])
    others = classes.acquire([frozenset({0}), frozenset({1, 3})])
    assert ones[0] == ones[2] == others[1] != others[0]
    assert ones[1] == 0
    assert classes.ranks[ones[0]].tolist() == [-1, 0, -1, 1]
    assert classes.ranks[others[0]].tolist() == [0, -1, -1, -1]
    assert classes.ranks[0].tolist() == [-1, -1, -1, -1]
    classes.release(ones)
    assert len(classes) == 2
    classes.release(others)
    assert len(classes) == 0


def test_the_table_grows_with_what_is_in_use_and_no_further() -> None:
    classes = CaptureClasses(8)
    for mask in range(1, 200):
        sites = frozenset(site for site in range(8) if mask >> site & 1)
        classes.release(classes.acquire([sites]))
    assert len(classes.ranks) == 2
