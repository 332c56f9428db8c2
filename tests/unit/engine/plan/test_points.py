"""One number stands for a site, whatever it is called."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import Point, Site
from rheostat_engine.plan.points import site_count


def test_the_sites_of_a_model_are_numbered_in_the_order_in_which_a_block_comes_to_them() -> None:
    assert {index: Site.names(index, 2) for index in range(site_count(2))} == {
        0: (Site(Point.RESID_PRE, 0),),
        1: (Site(Point.ATTN_OUT, 0),),
        2: (Site(Point.RESID_MID, 0),),
        3: (Site(Point.MLP_OUT, 0),),
        4: (Site(Point.RESID_POST, 0), Site(Point.RESID_PRE, 1)),
        5: (Site(Point.ATTN_OUT, 1),),
        6: (Site(Point.RESID_MID, 1),),
        7: (Site(Point.MLP_OUT, 1),),
        8: (Site(Point.RESID_POST, 1),),
    }


@given(st.integers(1, 200))
def test_every_name_leads_to_its_site_and_back(num_layers: int) -> None:
    named = [
        (name, index)
        for index in range(site_count(num_layers))
        for name in Site.names(index, num_layers)
    ]
    assert all(name.index == index for name, index in named)
    points = [point for point in Point if point is not Point.ROUTER_LOGITS]
    everything = [Site(point, layer) for layer in range(num_layers) for point in points]
    assert sorted(name for name, _ in named) == sorted(everything)


@pytest.mark.parametrize("index", [-1, 9])
def test_a_number_outside_of_the_model_has_no_name(index: int) -> None:
    with pytest.raises(ValueError, match=f"^site {index} is not one of the 9 sites$"):
        Site.names(index, 2)
