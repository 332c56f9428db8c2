"""No point that is served is split over tensor-parallel ranks: rows come whole, and once."""

import pytest

from rheostat_wire.v1 import capture_pb2, types_pb2

from ..messages import capture, request, site_set
from ..subscribers import EVERY, Subscriber, opening, rows_of, wanted


@pytest.mark.parametrize("name", ["SHARDING_GATHERED", "SHARDING_LOCAL"])
async def test_rows_come_whole_and_once_whatever_sharding_is_asked_for(running, name) -> None:
    sharding = capture_pb2.Sharding.Value(name)
    post = site_set(types_pb2.POINT_RESID_POST, layers=[1])
    plain, asked = [
        [
            event.captured
            for event in await running.client.generate(request(captures=[capture(post, **fields)]))
            if event.HasField("captured")
        ]
        for fields in ({}, {"sharding": sharding})
    ]
    assert asked == plain
    assert not any(part.HasField("shard") for part in asked)


async def test_so_they_do_in_a_subscription(running) -> None:
    shardings = (capture_pb2.SHARDING_GATHERED, capture_pb2.SHARDING_LOCAL)
    readers = [
        await Subscriber.open(running, opening(EVERY, [wanted(1, sharding=one)]))
        for one in shardings
    ]
    await running.client.generate(request(request_id="a"))
    for one in readers:
        await one.until("end_of_request")
    assert rows_of(readers[0].events) == rows_of(readers[1].events) != {}
