"""Listings of sinks, and of what they wrote."""

import pytest

import rheostat
from rheostat_wire.v1 import capture_service_pb2 as pb


def test_sinks_are_read_page_by_page(client, server):
    server.on(
        "ListSinks",
        pb.ListSinksResponse(sinks=[pb.Sink(name="a")], next_page_token="a"),
        pb.ListSinksResponse(sinks=[pb.Sink(name="b")]),
    )
    assert [one.name for one in client.run(lambda engine: engine.sinks())] == ["a", "b"]
    assert server.asked == [
        pb.ListSinksRequest(page_size=1000),
        pb.ListSinksRequest(page_size=1000, page_token="a"),
    ]


def test_artifacts_are_read_page_by_page(client, server):
    one = pb.Artifact(state=pb.ARTIFACT_STATE_COMPLETE)
    server.on(
        "GetArtifacts",
        pb.GetArtifactsResponse(artifacts=[one, one], next_page_token="2"),
        pb.GetArtifactsResponse(artifacts=[one]),
    )
    assert len(client.run(lambda engine: engine.artifacts("r", sink_name="disk"))) == 3
    asked = {"request_id": "r", "sink_name": "disk", "page_size": 1000}
    assert server.asked == [
        pb.GetArtifactsRequest(**asked),
        pb.GetArtifactsRequest(**asked, page_token="2"),
    ]


def test_an_id_that_is_no_text_is_refused_before_it_is_sent(client, server):
    with pytest.raises(rheostat.InvalidRequest):
        client.run(lambda engine: engine.artifacts("\ud800"))
    assert server.asked == []
