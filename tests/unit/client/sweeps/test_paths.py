"""Path patching: what is refused before a call, and which rows each pass replaces."""

import pytest

import rheostat
from rheostat._responses.explanations import Explanation, ResolvedIntervention, Selection
from rheostat._sweeps.paths import Paths

PAIR = rheostat.Pair("a", corrupt="b", answer=[7], foil=[8])
ATTN, MLP = rheostat.Point.ATTN_OUT, rheostat.Point.MLP_OUT


def paths(sender: object, receiver: object = "logits", **options: object) -> Paths:
    return Paths(PAIR, sender, receiver, options)


def resolved(sender: object, receiver: object = "logits", **options: object) -> Paths:
    """Paths in a model of four layers, at positions 1 and 3 of a prompt of five tokens."""
    made = paths(sender, receiver, **options)
    at = Selection((range(1, 2), range(3, 4)))
    one = ResolvedIntervention("request", 0, "replace", (), at, (), {})
    made.resolve(Explanation((1, 2, 3, 4, 5), (one,), (), (), 0, 0), 4)
    return made


@pytest.mark.parametrize("receiver", ["logits", ("mlp_out", 3)])
@pytest.mark.parametrize(
    "head", [("attn_out", 1, 4), ("hook_z", 1), ("blocks.1.attn.hook_q", 1), ("heads", 0)]
)
def test_heads_are_refused_by_name_with_what_to_do_instead(head: object, receiver: object) -> None:
    with pytest.raises(rheostat.InvalidRequest, match=r"heads are not served.*Take attn_out") as e:
        paths(head, receiver)
    assert (e.value.path, e.value.reason) == ("sender", "REASON_NOT_SUPPORTED")
    with pytest.raises(rheostat.InvalidRequest, match="heads are not served") as e:
        paths(("mlp_out", 0), [("mlp_out", 2), head])
    assert e.value.path == "receiver"


@pytest.mark.parametrize(
    ("sender", "receiver", "options", "text"),
    [
        (("resid_post", 1), "logits", {}, r"engine\.sweep"),
        ("attn_out", "logits", {}, r'as \("attn_out", 3\)'),
        ([], "logits", {}, "at least one branch"),
        ([("attn_out", 1)] * 2, "logits", {}, "named twice"),
        (("mlp_out", 2), ("attn_out", 2), {}, "no path leads"),
        (("mlp_out", 2), "attn_out", {}, 'or "logits"'),
        ([("mlp_out", 1), ("mlp_out", 2)], ("mlp_out", 2), {}, "sender too"),
        (("mlp_out", 2), "logits", {"direction": "back"}, "denoise"),
    ],
)
def test_malformed_paths_are_refused(sender, receiver, options, text) -> None:
    with pytest.raises(rheostat.InvalidRequest, match=text):
        paths(sender, receiver, **options)


def test_a_frozen_head_is_refused() -> None:
    with pytest.raises(rheostat.InvalidRequest, match="heads are not served"):
        resolved(("attn_out", 0), freeze="hook_z")


@pytest.mark.parametrize(
    "corrupt", [rheostat.Zeros(), rheostat.from_run("r"), rheostat.Noise(std=1)]
)
def test_a_pair_has_two_prompts_and_an_answer_of_one_token(corrupt: object) -> None:
    with pytest.raises(rheostat.InvalidRequest, match="second prompt"):
        Paths(rheostat.Pair("a", corrupt, answer=[7]), ("attn_out", 0), "logits", {})
    with pytest.raises(rheostat.InvalidRequest, match="answer is required"):
        Paths(rheostat.Pair("a", "b"), ("attn_out", 0), "logits", {})
    made = Paths(rheostat.Pair("a", "b", answer=" Par is"), ("attn_out", 0), "logits", {})
    with pytest.raises(rheostat.InvalidRequest, match="has 2 tokens") as e:
        made.ask({" Par is": (5, 6)})
    assert e.value.path == "pair.answer"


def test_everything_between_sender_and_receiver_is_frozen() -> None:
    made = resolved(("attn_out", 1), ("mlp_out", 2))
    assert made.frozen == ((MLP, 1), (ATTN, 2))
    assert resolved(("attn_out", 2)).frozen == ((MLP, 2), (ATTN, 3), (MLP, 3))
    assert resolved(("attn_out", 1), freeze="attn_out").frozen == ((ATTN, 2), (ATTN, 3))
    assert resolved(("attn_out", 1), freeze=()).frozen == ()
    assert resolved(("attn_out", 1), freeze=[("mlp_out", 0), ("mlp_out", 3)]).frozen == ((MLP, 3),)


def test_a_receiver_is_free_in_its_own_pass_and_frozen_in_later_ones() -> None:
    made = resolved(("mlp_out", 0), [("mlp_out", 2), ("attn_out", 1)])
    runs: list[str] = []
    passes = []
    for prompt, sites, steering in made.captures(runs):
        runs.append(f"run{len(runs)}")
        passes.append(
            (prompt, sites, [(one.source.run_id, one.points, one.layers) for one in steering])
        )
    assert passes == [
        ("a", ([MLP], [0]), []),
        ("b", ([ATTN, MLP], [1, 2]), []),
        ("b", ([ATTN], [1]), [("run0", (MLP,), (0,))]),
        (
            "b",
            ([MLP], [2]),
            [("run0", (MLP,), (0,)), ("run1", (ATTN,), (1, 2)), ("run1", (MLP,), (1,))],
        ),
    ]
    *plain, (prompt, last) = made.reads(runs)
    assert plain == [("b", []), ("a", [])]
    assert prompt == "b"
    assert [(one.source.run_id, one.points, one.layers) for one in last] == [
        ("run2", (ATTN,), (1,)),
        ("run3", (MLP,), (2,)),
    ]


def test_a_later_sender_is_frozen_where_its_rows_are_not_exchanged() -> None:
    made = resolved([("attn_out", 1), ("attn_out", 2)], freeze="attn_out")
    *_, (_, last) = made.reads(["source", "base"])
    assert [(one.source.run_id, one.layers, one.where) for one in last] == [
        ("source", (1, 2), rheostat.positions(1, 3)),
        ("base", (3,), rheostat.positions(1, 2, 3, 4)),
        ("base", (2,), rheostat.positions(2, 4)),
    ]
