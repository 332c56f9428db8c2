"""Routers lie behind the stream's sites in a worker's tables, and go by their numbers elsewhere."""

import pytest

from rheostat_engine import ROUTERS, Capture, Plan, Point, Rows, Site
from rheostat_engine.plan.points import site_count
from rheostat_engine.plan.tables import steering_table
from rheostat_engine.worker.state.site_slots import SiteSlots

from ...cpu_worker import NOTHING, Worker, stream_at
from ...strategies import EVERYWHERE, SITES, add

LAYERS = (SITES - 1) // 4


def test_routers_have_places_where_there_are_any() -> None:
    with_routers, without = SiteSlots(3, routers=True), SiteSlots(3)
    assert (with_routers.count, without.count) == (site_count(3) + 3, site_count(3))
    assert with_routers.numbers.tolist() == [*range(13), ROUTERS, ROUTERS + 1, ROUTERS + 2]
    assert [with_routers.of(int(one)) for one in with_routers.numbers] == list(range(16))


def test_captured_sites_are_told_in_places_without_other_workers_routers() -> None:
    sites = (0, 12, ROUTERS, ROUTERS + 2)
    assert SiteSlots(3, routers=True).to_slots(sites).tolist() == [0, 12, 13, 15]
    assert SiteSlots(3).to_slots(sites).tolist() == [0, 12]
    assert SiteSlots(3).to_slots((0, 12)).tolist() == [0, 12]


@pytest.mark.parametrize("site", [-1, 13, ROUTERS - 1, ROUTERS + 3, 2**40])
def test_a_site_that_the_model_cannot_have_is_refused(site: int) -> None:
    with pytest.raises(ValueError, match="not one of the model's 13"):
        SiteSlots(3, routers=True).to_slots((1, site))


def test_a_router_is_not_steered() -> None:
    acts = steering_table((add(1), add(ROUTERS)))
    assert acts is not None
    with pytest.raises(ValueError, match="not one of the model's 13"):
        SiteSlots(3, routers=True).check(acts)


def test_a_routers_number_is_beside_the_stream() -> None:
    assert Site(Point.ROUTER_LOGITS, 7).index == ROUTERS + 7
    assert Site.names(ROUTERS + 7, 8) == (Site(Point.ROUTER_LOGITS, 7),)
    with pytest.raises(ValueError, match="is not one of"):
        Site.names(ROUTERS + 8, 8)


def test_rows_of_a_router_come_under_its_number() -> None:
    worker = Worker(routers=True)
    worker.add_request("v", Plan("r", (add(1),), (Capture((1, ROUTERS), EVERYWHERE),)))
    worker.step([("v", 0, 3), ("mate", 4, 2)])
    worker.finish("v")
    rows, released = worker.row_sender.events[1:]
    assert isinstance(rows, Rows)
    assert (rows.sites, rows.positions.tolist()) == ((1, ROUTERS), [0, 1, 2])
    for position, row in enumerate(rows.data[1]):
        assert row.tolist() == stream_at("v", position, SITES).tolist()
    assert released.captured == {1: 3, ROUTERS: 3}
    assert worker.held() == NOTHING


def test_a_worker_without_routers_captures_the_rest() -> None:
    worker = Worker()
    worker.add_request("v", Plan("r", (), (Capture((1, ROUTERS), EVERYWHERE),)))
    worker.step([("v", 0, 2)])
    worker.finish("v")
    assert worker.row_sender.events[-1].captured == {1: 2}
