"""Sites of interventions in wire format equal what protobuf writes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rheostat_server.generation.applied_sites import Moved, applied_site, applied_sites
from rheostat_server.tensors import float32
from rheostat_wire.v1 import receipt_pb2, types_pb2

from ..admissions import admitted
from ..messages import add, request, site_set, tensor

LAYERS = [0, 1, 2]
NUMBERS = st.floats(0) | st.just(np.nan)

(INTERVENTION,) = admitted(
    request(
        steer=[
            add(
                tensor(np.ones((len(LAYERS), 4), np.float32)),
                sites=site_set(types_pb2.POINT_RESID_POST, layers=LAYERS),
            )
        ]
    )
).interventions


def expected(layer: int, rows: int, moved: Moved | None) -> receipt_pb2.AppliedSite:
    site = types_pb2.Site(point=types_pb2.POINT_RESID_POST, layer=layer)
    message = receipt_pb2.AppliedSite(site=site, row_count=rows)
    if moved is not None:
        message.dose.norm = float32(moved.change / moved.rows)
        message.dose.relative_mean = float32(moved.relative / moved.rows)
        message.dose.relative_max = float32(moved.relative_max)
    return message


@given(st.integers(1, 2**40), st.integers(0, 9), st.lists(st.tuples(*[NUMBERS] * 3), min_size=3))
def test_sites_together_and_alone_are_what_protobuf_writes(rows, surplus, numbers) -> None:
    numbers = numbers[: len(LAYERS)]
    moved = [Moved(rows + surplus, *three) for three in numbers]
    alone = [
        applied_site(field, rows, one)
        for field, one in zip(INTERVENTION.site_fields, moved, strict=True)
    ]
    sums = tuple(zip(*numbers, strict=True))
    assert applied_sites(INTERVENTION, rows, rows + surplus, sums) == b"".join(alone)
    read = receipt_pb2.AppliedIntervention.FromString(b"".join(alone))
    each = zip(LAYERS, [rows] * 3, moved, strict=True)
    assert list(read.sites) == [expected(*one) for one in each]


def test_a_site_without_a_dose_has_its_rows_alone() -> None:
    for rows in (0, 7):
        written = applied_site(INTERVENTION.site_fields[1], rows, None)
        read = receipt_pb2.AppliedIntervention.FromString(written)
        assert list(read.sites) == [expected(1, rows, None)]
