"""Captured rows, joined by site."""

import numpy as np
import pytest

from rheostat import Activations, InvalidRequest, Point, Rows, Site


def rows(site: Site, positions: list[int]) -> Rows:
    """Rows whose every value is layer + position / 100."""
    at = np.array(positions, np.int64)
    values = np.full((len(positions), 2), site.layer, np.float32) + at[:, None] / np.float32(100)
    return Rows(0, site.point, site.layer, at, at + 1000, values.astype(np.float32))


def captured(**sites: list[list[int]]) -> Activations:
    """Sites by name and layer, each with the positions of its parts."""
    parts = {}
    for name, positions in sites.items():
        point, _, layer = name.rpartition("_")
        site = Site(Point(point), int(layer))
        parts[site] = [rows(site, part) for part in positions]
    return Activations(parts)


def test_parts_join_by_ascending_position_each_position_once():
    found = captured(resid_mid_4=[[4, 5], [0, 1], [1, 2]])
    assert found.positions("resid_mid", 4).tolist() == [0, 1, 2, 4, 5]
    assert found.token_ids("resid_mid", 4).tolist() == [1000, 1001, 1002, 1004, 1005]
    expected = np.float32([4.0, 4.01, 4.02, 4.04, 4.05])
    assert np.array_equal(found["resid_mid", 4], np.stack([expected, expected], axis=1))


def test_sites_come_by_layer_then_point():
    found = captured(resid_post_0=[[0]], mlp_out_1=[[0]], resid_pre_1=[[0]], resid_pre_0=[[0]])
    assert list(found) == [
        Site(Point.RESID_PRE, 0),
        Site(Point.RESID_POST, 0),
        Site(Point.RESID_PRE, 1),
        Site(Point.MLP_OUT, 1),
    ]
    assert found.layers("resid_pre") == (0, 1)


def test_aliases_find_their_points():
    found = captured(resid_pre_1=[[0]], resid_mid_1=[[1]], resid_post_1=[[2]])
    positions = [found.positions(name, 1)[0] for name in ("pre_attn", "post_attn", "post_block")]
    assert positions == [0, 1, 2]


def test_one_site_is_found_under_both_of_its_names():
    found = captured(resid_post_2=[[0]], resid_pre_6=[[0]])
    assert np.array_equal(found["resid_pre", 3], found["resid_post", 2])
    assert np.array_equal(found["resid_post", 5], found["resid_pre", 6])
    assert ("resid_pre", 2) not in found
    assert ("resid_post", 3) not in found


def test_stack_is_layers_rows_width():
    found = captured(resid_post_5=[[0, 1]], resid_post_2=[[0, 1]], resid_mid_0=[[7]])
    expected = np.stack([found["resid_post", 2], found["resid_post", 5]])
    assert np.array_equal(found.stack("resid_post"), expected)
    assert expected.shape == (2, 2, 2)


def test_stack_refuses_layers_with_different_positions():
    with pytest.raises(InvalidRequest, match="rows of different positions"):
        captured(resid_post_0=[[0]], resid_post_1=[[1]]).stack("resid_post")


def test_a_site_without_rows_is_a_key_error_that_names_what_there_is():
    found = captured(resid_post_2=[[0]])
    with pytest.raises(KeyError) as raised:
        _ = found["resid_mid", 2]
    assert raised.value.args == ("no rows of resid_mid[2]; there are resid_post[2]",)
    with pytest.raises(KeyError) as raised:
        found.stack("mlp_out")
    assert raised.value.args == ("no rows of mlp_out; there are resid_post[2]",)
    assert repr(found) == "Activations(resid_post[2]: [1, 2])"


@pytest.mark.parametrize(
    "key",
    [
        "resid_post",
        "blocks.3.hook_resid_post",
        3,
        ("resid_post",),
        ("resid_post", "3"),
        ("resid_post", slice(None)),
        (3, "resid_post"),
    ],
)
def test_what_is_no_point_and_layer_is_told_how_to_index(key):
    found = captured(resid_mid_3=[[0]], resid_post_3=[[0]])
    example = "resid_post" if isinstance(key, str) else "resid_mid"
    told = (
        f'rows go by point and layer, e.g. activations["{example}", 3], not by {key!r}; '
        "there are resid_mid[3], resid_post[3]"
    )
    for use in (found.__getitem__, found.get):
        with pytest.raises(InvalidRequest) as raised:
            use(key)
        assert raised.value.message == told


def test_a_layer_may_be_any_whole_number():
    found = captured(resid_post_3=[[0]])
    assert found["resid_post", np.int64(3)] is found["resid_post", 3]
