"""Capture classes are shared by content, counted and recycled, with the forms that they hold."""

import numpy as np

from rheostat_engine.core.classes import CaptureClasses, Sites
from rheostat_engine.core.forms import Forms
from rheostat_engine.row_forms import Coding, RowForm


def forms() -> Forms:
    return Forms(width=16, itemsize=4, vectors={}, limit=1 << 20)


def raw(*sites: int) -> Sites:
    return frozenset((site, 0) for site in sites)


def test_equal_sets_share_a_class_until_nobody_uses_it() -> None:
    classes = CaptureClasses(4, forms())
    ones = classes.acquire([raw(1, 3), raw(), raw(1, 3)])
    others = classes.acquire([raw(0), raw(1, 3)])
    assert ones[0] == ones[2] == others[1] != others[0]
    assert ones[1] == 0
    assert classes.table.ranks[ones[0]].tolist() == [-1, 0, -1, 1]
    assert classes.table.ranks[others[0]].tolist() == [0, -1, -1, -1]
    assert classes.table.ranks[0].tolist() == [-1, -1, -1, -1]
    classes.release(ones)
    assert len(classes) == 2
    classes.release(others)
    assert len(classes) == 0


def test_the_table_grows_with_what_is_in_use_and_no_further() -> None:
    classes = CaptureClasses(8, forms())
    for mask in range(1, 200):
        sites = raw(*(site for site in range(8) if mask >> site & 1))
        classes.release(classes.acquire([sites]))
    assert len(classes.table.ranks) == 2


def test_a_class_ranks_sites_within_their_form_and_holds_the_forms_it_names() -> None:
    held = forms()
    eight, top = held.acquire(RowForm(Coding.FULL8)), held.acquire(RowForm(Coding.TOPK8, kept=2))
    classes = CaptureClasses(5, held)
    (mixed,) = classes.acquire([frozenset({(0, eight), (1, 0), (2, top), (3, eight)})])
    (plain,) = classes.acquire([raw(0, 1)])
    assert classes.table.ranks[mixed].tolist() == [0, 0, 0, 1, -1]
    assert classes.table.forms[mixed].tolist() == [eight, 0, top, eight, 0]
    counts = np.zeros(1 + max(eight, top), int)
    counts[[0, eight, top]] = 1, 2, 1
    assert classes.table.counts[mixed].tolist() == counts.tolist()
    held.release(eight)
    held.release(top)
    assert len(held) == 2
    classes.release([mixed])
    assert len(held) == 0
    assert classes.table.counts.shape[1] == 1
    assert classes.table.counts[plain].tolist() == [2]
