"""What the workers report becomes one description of the model."""

import pytest

from rheostat_engine import Capacity, ModelSites, Point, Site

CAPACITY = {
    "bank_rows": 100,
    "directions": 20,
    "steps": 70,
    "slots": 10,
    "token_rules": 3,
    "capture_rows": 50,
}
REPORT: dict[str, object] = {
    "architecture": "LlamaForCausalLM",
    "num_layers": 4,
    "width": 64,
    "dtype": "bfloat16",
    "runner": "V2",
    "refused": {},
    "experts": {},
    "unrouted": {},
    "block_layouts": {0: "pair", 1: "pair"},
    "variants": ["active", "plain"],
    "no_lens": "",
    "no_directions": "",
    "embedding": None,
    "capacity": CAPACITY,
    "reports": True,
}


def test_the_smallest_limits_and_every_refusal_hold() -> None:
    reports = [
        REPORT,
        {**REPORT, "capacity": {**CAPACITY, "bank_rows": 90, "steps": 60}, "reports": False},
        {
            **REPORT,
            "capacity": {**CAPACITY, "capture_rows": 40, "slots": 9},
            "refused": {"resid_mid": "parallel"},
            "experts": {"2": 8},
            "unrouted": {3: "several"},
            "block_layouts": {"2": "single", "3": "pair"},
        },
    ]
    assert ModelSites.from_reports(reports) == ModelSites(
        architecture="LlamaForCausalLM",
        num_layers=4,
        width=64,
        dtype="bfloat16",
        runner="V2",
        refused={Point.RESID_MID: "parallel"},
        capacity=Capacity(
            bank_rows=90, directions=20, steps=60, slots=9, token_rules=3, capture_rows=40
        ),
        world_size=2,
        experts={2: 8},
        unrouted={3: "several"},
        block_layouts={0: "pair", 1: "pair", 2: "single", 3: "pair"},
        variants=("active", "plain"),
        embedding_refused="no worker has the token embedding",
    )


def embedding(*values: float, first: int = 0) -> dict[str, object]:
    """The report of a part with these elements."""
    part = {
        "refused": "",
        "first": first,
        "count": len(values),
        "total": sum(values),
        "squares": sum(value**2 for value in values),
    }
    return {**REPORT, "embedding": part}


def test_parts_of_the_embedding_are_added_up_each_once() -> None:
    parts = [embedding(1.0, 2.0), embedding(5.0, 4.0, first=2), REPORT, embedding(1.0, 2.0)]
    for reports in (parts, parts[::-1]):
        sites = ModelSites.from_reports(reports)
        assert sites.embedding_std == pytest.approx(2.5**0.5, rel=1e-15)
        assert not sites.embedding_refused


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ({**REPORT, "embedding": {"refused": "quantised"}}, "quantised"),
        (REPORT, "no worker has the token embedding"),
        (embedding(2.0, 2.0), "the token embedding's standard deviation is 0"),
        (embedding(float("inf")), "the token embedding's standard deviation is nan"),
    ],
)
def test_an_embedding_that_can_not_be_measured_says_why(
    report: dict[str, object], reason: str
) -> None:
    sites = ModelSites.from_reports([report])
    assert (sites.embedding_std, sites.embedding_refused) == (0.0, reason)


@pytest.mark.parametrize("key", ["architecture", "num_layers", "width", "dtype", "runner"])
def test_workers_that_disagree_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"^workers disagree about the model's {key}: "):
        ModelSites.from_reports([REPORT, {**REPORT, key: "other"}])


def test_a_site_is_served_unless_its_layer_or_point_is_missing() -> None:
    sites = ModelSites.from_reports([{**REPORT, "refused": {"resid_mid": "parallel"}}])
    asked = [
        Site(Point.RESID_PRE, 0),
        Site(Point.RESID_POST, 3),
        Site(Point.RESID_MID, 3),
        Site(Point.RESID_PRE, 4),
        Site(Point.RESID_PRE, -1),
    ]
    assert [sites.supports(site) for site in asked] == [
        None,
        None,
        "parallel",
        "layer 4 is not one of the model's 4 layers",
        "layer -1 is not one of the model's 4 layers",
    ]


def test_a_router_is_served_where_it_can_be_read_and_has_a_width_of_its_own() -> None:
    report = {**REPORT, "experts": {1: 8, 2: 16}, "unrouted": {3: "several"}}
    sites = ModelSites.from_reports([report])
    asked = [Site(Point.ROUTER_LOGITS, layer) for layer in range(5)]
    assert [sites.supports(site) for site in asked] == [
        "the layer has no mixture of experts",
        None,
        None,
        "several",
        "layer 4 is not one of the model's 4 layers",
    ]
    assert [sites.layout_of(site) for site in (asked[1], Site(Point.MLP_OUT, 1))] == ["", "pair"]
    assert [sites.width_of(site) for site in (asked[2], Site(Point.MLP_OUT, 2))] == [16, 64]
