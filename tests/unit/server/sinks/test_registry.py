"""A server's sinks: found, made, listed, and asked at admission."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rheostat_server import errors
from rheostat_server.sinks import Layout, SinkRefusal, SinkSettingsError, Target
from rheostat_server.sinks.registry import BUILT_IN, GROUP, SinkListing, Sinks, find_plugins
from rheostat_server.sinks.settings import SinkConfig, parse_sink
from rheostat_wire.v1 import capture_pb2

from ..sink_plugins import Broken, failing, with_plugin


def test_the_built_in_plugins_are_entry_points_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][GROUP] == BUILT_IN


def test_every_built_in_plugin_is_found_and_loads() -> None:
    found = find_plugins()
    assert set(BUILT_IN) <= set(found)
    assert all(callable(found[name].load()) for name in BUILT_IN)


def test_two_plugins_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("memory", "their.sinks:make", GROUP)]
    monkeypatch.setattr("rheostat_server.sinks.registry.entry_points", lambda group: points)
    with pytest.raises(errors.SinksFailed, match=r"their\.sinks:make"):
        find_plugins()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("m=memory", SinkConfig("m", "memory", {})),
        ("d=filesystem:root=/a=b,layout=packed",
         SinkConfig("d", "filesystem", {"root": "/a=b", "layout": "packed"})),
    ],
)  # fmt: skip
def test_a_sink_is_written_as_name_plugin_and_settings(text: str, expected: SinkConfig) -> None:
    assert parse_sink(text) == expected


@pytest.mark.parametrize(
    "text", ["", "memory", "=memory", "m=", "m=memory:x", "m=a:k=1,k=2", "a b=m"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(SinkSettingsError):
        parse_sink(text)


def test_sinks_are_listed_by_name(tmp_path: Path) -> None:
    sinks = Sinks([parse_sink("m=memory:limit=1MiB"), parse_sink(f"d=filesystem:root={tmp_path}")])
    assert sinks.listed() == [
        SinkListing("d", "filesystem", (Layout.PACKED, Layout.PER_FILE, Layout.SHARDED),
                {"format": "one of safetensors, npz"}),
        SinkListing("m", "memory", (), {}),
    ]  # fmt: skip
    sinks.close()


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        (["m=memory", "m=logging"], "two sinks are called m: give each its own name"),
        (
            ["m=floppy"],
            "needs a plugin floppy; there are filesystem, logging, memory; a sink is given as in "
            "disk=filesystem:root=/data/captures",
        ),
        (["m=memory:limit=0"], "limit is a number of bytes"),
        (["m=memory:speed=1"], "no setting speed; it has limit"),
        (["l=logging:speed=1"], "no setting speed; it has none"),
        (["d=filesystem"], "root=FOLDER is required.*as in disk=filesystem:root=/data/captures"),
    ],
)
def test_a_sink_that_cannot_be_made_stops_the_start(configs: list[str], words: str) -> None:
    with pytest.raises(errors.SinksFailed, match=words) as caught:
        Sinks([parse_sink(text) for text in configs])
    assert caught.value.exit_code == 7


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (ImportError("no module"), "ImportError: no module"),
        (failing(make=ZeroDivisionError("zero")), "ZeroDivisionError: zero"),
        (lambda name, settings: object(), r"no check\(\)"),
        (type("Flat", (Broken,), {"layouts": ("flat",)}), "layouts are not of type Layout"),
        (type("Mute", (Broken,), {"options": {"a": 1}}), "options are not texts"),
    ],
)
def test_a_broken_plugin_stops_the_start_and_is_named(made: object, words: str) -> None:
    with pytest.raises(errors.SinksFailed, match=f"theirs.*{words}"):
        with_plugin(made)


def test_sinks_that_were_made_are_closed_where_a_later_one_fails(tmp_path: Path) -> None:
    disk = parse_sink(f"d=filesystem:root={tmp_path}")
    with pytest.raises(errors.SinksFailed):
        Sinks([disk, parse_sink("m=floppy")])
    Sinks([disk]).close()


@pytest.fixture
def sinks(tmp_path: Path):
    found = Sinks([parse_sink(f"disk=filesystem:root={tmp_path}"), parse_sink("m=memory")])
    yield found
    found.close()


def wire(**fields: object) -> capture_pb2.SinkTarget:
    return capture_pb2.SinkTarget(**fields)


def test_a_target_has_the_sink_s_defaults(sinks: Sinks) -> None:
    assert sinks.check(wire(sink_name="disk"), "to") == Target("disk", "default", Layout.PACKED, {})
    assert sinks.check(wire(sink_name="m"), "to") == Target("m", "default", None, {})


def test_a_target_has_what_it_says(sinks: Sinks) -> None:
    said = wire(
        sink_name="disk", tag="t.1", layout=capture_pb2.LAYOUT_SHARDED, options={"format": "npz"}
    )
    assert sinks.check(said, "") == Target("disk", "t.1", Layout.SHARDED, {"format": "npz"})


@pytest.mark.parametrize(
    ("said", "error", "field"),
    [
        (wire(sink_name="x"), errors.SinkNotFound, "to.sink_name"),
        (wire(), errors.SinkNotFound, "to.sink_name"),
        (wire(sink_name="disk", tag="../a"), errors.InvalidValue, "to.tag"),
        (wire(sink_name="disk", tag=""), errors.InvalidValue, "to.tag"),
        (wire(sink_name="disk", layout=0), errors.UnknownEnum, "to.layout"),
        (wire(sink_name="disk", layout=9), errors.UnknownEnum, "to.layout"),
        (wire(sink_name="m", layout=1), errors.InvalidValue, "to.layout"),
        (wire(sink_name="m", options={"a": ""}), errors.InvalidValue, "to.options.a"),
        (wire(sink_name="disk", options={"format": "x"}), errors.InvalidValue, "to.options.format"),
        (wire(sink_name="disk", options={str(n): "" for n in range(33)}), errors.InvalidValue,
         "to.options"),
    ],
)  # fmt: skip
def test_a_wrong_target_is_refused_at_its_field(
    sinks: Sinks, said: capture_pb2.SinkTarget, error: type[errors.RheostatError], field: str
) -> None:
    with pytest.raises(error) as caught:
        sinks.check(said, "to")
    assert caught.value.field == field


def test_a_plugin_that_fails_to_check_is_a_defect_and_a_refusal_is_not() -> None:
    with pytest.raises(errors.Defect):
        with_plugin(failing(check=KeyError("x"))).check(wire(sink_name="s"), "to")
    with pytest.raises(errors.InvalidValue, match="not today"):
        with_plugin(failing(check=SinkRefusal("not today"))).check(wire(sink_name="s"), "to")
