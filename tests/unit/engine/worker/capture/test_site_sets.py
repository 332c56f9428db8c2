"""Capture classes are shared by content, counted and recycled, with the forms that they hold."""

import numpy as np
import numpy.typing as npt

from rheostat_engine.plan.row_encodings import Codec, RowEncoding
from rheostat_engine.worker.capture.site_sets import SiteSets
from rheostat_engine.worker.transport.row_encodings import RowEncodings


def encodings() -> RowEncodings:
    return RowEncodings(width=16, itemsize=4, vectors={}, limit=1 << 20)


def site_sets_of(sites: int, held: RowEncodings | None = None) -> SiteSets:
    """Classes of sites whose numbers are ten times their places."""
    return SiteSets(10 * np.arange(sites), held or encodings())


def sets(*many: dict[int, int], sites: int) -> npt.NDArray[np.int16]:
    """Sets of sites, each with the form of its rows."""
    found = np.zeros((len(many), sites), np.int16)
    for row, one in zip(found, many, strict=True):
        for site, encoding in one.items():
            row[site] = 1 + encoding
    return found


def raw(*sites: int) -> dict[int, int]:
    return dict.fromkeys(sites, 0)


def test_equal_sets_share_a_class_until_nobody_uses_it() -> None:
    site_sets = site_sets_of(4)
    ones = site_sets.acquire(sets(raw(1, 3), raw(), raw(1, 3), sites=4))
    others = site_sets.acquire(sets(raw(0), raw(1, 3), sites=4))
    assert ones[0] == ones[2] == others[1] != others[0]
    assert ones[1] == 0
    assert site_sets.table.ranks[ones[0]].tolist() == [-1, 0, -1, 1]
    assert site_sets.table.ranks[others[0]].tolist() == [0, -1, -1, -1]
    assert site_sets.table.ranks[0].tolist() == [-1, -1, -1, -1]
    assert site_sets.sites_of(ones[0], 0) == [10, 30]
    site_sets.release(ones)
    assert len(site_sets) == 2
    site_sets.release(others)
    assert len(site_sets) == 0


def test_a_class_that_is_given_out_again_has_its_new_sites() -> None:
    site_sets = site_sets_of(4)
    (one,) = site_sets.acquire(sets(raw(1, 3), sites=4))
    assert site_sets.sites_of(one, 0) == [10, 30]
    site_sets.release([one])
    assert site_sets.acquire(sets(raw(0, 2), sites=4)) == [one]
    assert site_sets.sites_of(one, 0) == [0, 20]


def test_the_table_grows_with_what_is_in_use_and_no_further() -> None:
    site_sets = site_sets_of(8)
    for mask in range(1, 200):
        one = raw(*(site for site in range(8) if mask >> site & 1))
        site_sets.release(site_sets.acquire(sets(one, sites=8)))
    assert len(site_sets.table.ranks) == 2


def test_a_class_ranks_sites_within_their_form_and_holds_the_forms_it_names() -> None:
    held = encodings()
    eight, top = (
        held.acquire(RowEncoding(Codec.FULL8)),
        held.acquire(RowEncoding(Codec.TOPK8, kept=2)),
    )
    site_sets = site_sets_of(5, held)
    one = {0: eight, 1: 0, 2: top, 3: eight}
    mixed, other = site_sets.acquire(sets(one, {**one, 4: 0}, sites=5))
    (plain,) = site_sets.acquire(sets(raw(0, 1), sites=5))
    assert site_sets.table.ranks[mixed].tolist() == [0, 0, 0, 1, -1]
    assert site_sets.table.encodings[mixed].tolist() == [eight, 0, top, eight, 0]
    assert site_sets.sites_of(mixed, eight) == [0, 30]
    counts = np.zeros(1 + max(eight, top), int)
    counts[[0, eight, top]] = 1, 2, 1
    assert site_sets.table.counts[mixed].tolist() == counts.tolist()
    held.release(eight)
    held.release(top)
    assert len(held) == 2
    site_sets.release([mixed])
    assert len(held) == 2
    site_sets.release([other])
    assert len(held) == 0
    assert site_sets.table.counts.shape[1] == 1
    assert site_sets.table.counts[plain].tolist() == [2]
