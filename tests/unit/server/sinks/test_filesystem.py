"""The filesystem sink: what lies where, what is refused, and what no client can reach."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from rheostat_engine import Point, Site
from rheostat_server.sinks import (
    CaptureAbout,
    Collision,
    Ending,
    FloatType,
    Layout,
    Outcome,
    SinkError,
    SinkRefusal,
    SinkSettingsError,
    State,
    Target,
)
from rheostat_server.sinks.filesystem import Filesystem, make
from rheostat_server.sinks.formats import Format
from rheostat_server.sinks.samples import CAPTURES, blocks, request

from .sink_kit import artifact_bytes, one_row, read_stored, record, same_rows, visible

LAYOUTS = [*Layout]


@pytest.fixture
def sink(tmp_path: Path):
    made = Filesystem(tmp_path)
    yield made
    made.close()


def test_per_file_writes_a_file_per_site_and_a_manifest(sink: Filesystem, tmp_path: Path) -> None:
    artifacts = record(sink, request("a:1", Layout.PER_FILE))
    names = ["resid_post.0.safetensors", "resid_pre.1.safetensors", "mlp_out.3.safetensors"]
    paths = [f"default/requests/a:1/{name}" for name in (*names, "manifest.json")]
    assert [one.path for one in artifacts] == paths
    assert visible(tmp_path) == set(paths)
    assert [one.sites for one in artifacts[:3]] == [
        (Site(Point.RESID_POST, 0),),
        (Site(Point.RESID_PRE, 1),),
        (Site(Point.MLP_OUT, 3),),
    ]


def test_packed_writes_one_file_and_a_manifest(sink: Filesystem, tmp_path: Path) -> None:
    record(sink, request("a", Layout.PACKED))
    assert visible(tmp_path) == {
        "default/requests/a/rows.safetensors",
        "default/requests/a/manifest.json",
    }


def test_sharded_adds_requests_to_one_file(sink: Filesystem, tmp_path: Path) -> None:
    first = record(sink, request("a", Layout.SHARDED))
    second = record(sink, request("b", Layout.SHARDED), seed=1)
    shard = "default/shards/shard-000001"
    assert visible(tmp_path) == {f"{shard}.rows", f"{shard}.jsonl"}
    assert [one.path for one in (*first, *second)] == [f"{shard}.rows"] * 2
    assert [one.whole for one in (*first, *second)] == [False, False]
    assert second[0].offset % 64 == 0
    assert second[0].offset >= first[0].length


def test_a_shard_that_a_crash_left_without_an_index_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "default/shards"
    folder.mkdir(parents=True)
    (folder / "shard-000004.rows").write_text("")
    sink = Filesystem(tmp_path)
    (made,) = record(sink, request("a", Layout.SHARDED))
    assert made.path == "default/shards/shard-000005.rows"
    sink.close()


def test_a_sink_that_is_closed_writes_nothing_more(tmp_path: Path) -> None:
    sink = Filesystem(tmp_path)
    about = request("a", Layout.PACKED)
    recording = sink.open(about)
    recording.write(one_row(about))
    sink.close()
    with pytest.raises(SinkError, match="closed"):
        recording.finish(Outcome(Ending.COMPLETE))
    recording.abandon(OSError("made up"))
    Filesystem(tmp_path).close()
    assert visible(tmp_path) == set()


def test_a_full_shard_is_followed_by_the_next(tmp_path: Path) -> None:
    sink = Filesystem(tmp_path, shard_bytes=1)
    paths = [record(sink, request(name, Layout.SHARDED))[0].path for name in "abc"]
    sink.close()
    assert paths == [f"default/shards/shard-00000{number}.rows" for number in (1, 2, 3)]


def test_a_new_server_begins_a_new_shard_and_finds_the_old_ones(tmp_path: Path) -> None:
    for name in "ab":
        sink = Filesystem(tmp_path)
        record(sink, request(name, Layout.SHARDED))
        sink.close()
    sink = Filesystem(tmp_path)
    assert [sink.artifacts(name)[0].path[-11:] for name in "ab"] == ["000001.rows", "000002.rows"]
    with pytest.raises(Collision):
        sink.open(request("a", Layout.SHARDED))
    sink.close()


def test_any_reader_of_safetensors_reads_the_file(sink: Filesystem, tmp_path: Path) -> None:
    capture = CaptureAbout(0, (Site(Point.RESID_POST, 3),), FloatType.BFLOAT16, 4)
    about = request("a", Layout.PACKED, [capture])
    record(sink, about)
    with safe_open(tmp_path / "default/requests/a/rows.safetensors", framework="np") as file:
        assert sorted(file.keys()) == [
            f"0.resid_post.3.{name}"
            for name in ("baseline", "positions", "rows", "samples", "token_ids")
        ]
        slice_ = file.get_slice("0.resid_post.3.rows")
        assert (slice_.get_dtype(), slice_.get_shape()) == ("BF16", [21, 4])
        assert file.get_tensor("0.resid_post.3.positions").tolist() == [0, 1, 2, 3, 4, 5, 6] * 3
        text = json.loads(file.metadata()["rheostat_captured"])
    assert (text["request_id"], text["tables"][0]["rows"]) == ("a", 21)


def test_numpy_reads_the_npz(sink: Filesystem, tmp_path: Path) -> None:
    record(sink, request("a", Layout.PACKED, CAPTURES[:2], options={"format": "npz"}))
    found = np.load(tmp_path / "default/requests/a/rows.npz")
    assert found["1.resid_post.0.rows"].dtype == np.uint16
    assert found["0.mlp_out.3.rows"].shape == (21, 8)
    text = json.loads(str(found["rheostat_captured"]))
    assert [table["dtype"] for table in text["tables"]] == ["float32"] * 3 + ["bfloat16"] * 2


def test_the_manifest_says_everything(sink: Filesystem, tmp_path: Path) -> None:
    about = request("a", Layout.PACKED, [CAPTURES[5]], tag="t")
    record(sink, about, outcome=Outcome(Ending.PARTIAL, 7, ("stop", "length")))
    folder = tmp_path / "t/requests/a"
    said = json.loads((folder / "manifest.json").read_text())
    finished = said.pop("finished_at")
    data = (folder / "rows.safetensors").read_bytes()
    assert finished > 1.7e9
    assert said == {
        "request_id": "a",
        "schema": "rheostat.captured.v1",
        "tag": "t",
        "sink": "sink",
        "layout": "packed",
        "format": "safetensors",
        "state": "partial",
        "dropped_rows": 7,
        "finish_reasons": ["stop", "length"],
        "model": "made-up",
        "labels": {"set": "made up"},
        "started_at": 1.75e9,
        "prompt_token_ids": [5, 6, 7],
        "files": [
            {
                "path": "rows.safetensors",
                "offset": 0,
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "tables": [
                    {
                        "name": f"6.{point}.{layer}",
                        "capture_index": 6,
                        "point": point,
                        "layer": layer,
                        "rows": 21,
                        "encoding": "topk8",
                        "dtype": "float32",
                        "width": 8,
                        "kept": 2,
                    }
                    for point, layer in (("resid_post", 0), ("resid_pre", 1), ("mlp_out", 3))
                ],
            }
        ],
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_artifacts_are_found_again_after_a_restart(layout: Layout, tmp_path: Path) -> None:
    sink = Filesystem(tmp_path)
    made = [record(sink, request("a", layout, tag=tag), seed) for seed, tag in enumerate("xy")]
    sink.close()
    sink = Filesystem(tmp_path)
    assert sink.artifacts("a") == [*made[0], *made[1]]
    assert [one.state for one in sink.artifacts("a")] == [State.COMPLETE] * len(made[0]) * 2
    sink.close()


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_a_request_that_is_there_is_refused_whatever_its_layout(
    sink: Filesystem, first: Layout, second: Layout
) -> None:
    record(sink, request("a", first))
    with pytest.raises(Collision):
        sink.open(request("a", second))


def test_two_recordings_of_one_request_cannot_go_on_at_once(sink: Filesystem) -> None:
    recording = sink.open(request("a", Layout.PACKED))
    with pytest.raises(Collision):
        sink.open(request("a", Layout.SHARDED))
    recording.abandon(OSError("made up"))
    record(sink, request("a", Layout.SHARDED))


@pytest.mark.parametrize("layout", [Layout.PER_FILE, Layout.PACKED])
def test_what_somebody_else_put_there_meanwhile_is_not_overwritten(
    sink: Filesystem, layout: Layout, tmp_path: Path
) -> None:
    about = request("a", layout)
    recording = sink.open(about)
    recording.write(one_row(about))
    other = tmp_path / "default/requests/a"
    other.mkdir(parents=True)
    (other / "mine").write_text("mine")
    with pytest.raises(Collision):
        recording.finish(Outcome(Ending.COMPLETE))
    recording.abandon(OSError("made up"))
    assert visible(tmp_path) == {"default/requests/a/mine"}


@pytest.mark.parametrize("place", ["default", "default/requests", "default/shards"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_link_is_followed_out_of_the_root(layout: Layout, place: str, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    sink = Filesystem(root)
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    (root / place).symlink_to(outside)
    leads = place == "default" or (place == "default/shards") == (layout is Layout.SHARDED)
    if leads:
        with pytest.raises(SinkError):
            record(sink, request("a", layout))
    assert list(outside.iterdir()) == []
    sink.close()


def test_a_request_s_link_counts_as_taken_and_is_not_read(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    root = tmp_path / "root"
    other = Filesystem(outside)
    record(other, request("a", Layout.PACKED))
    other.close()
    sink = Filesystem(root)
    record(sink, request("b", Layout.PACKED))
    (root / "default/requests/a").symlink_to(outside / "default/requests/a")
    (root / "default/requests/c").symlink_to(tmp_path / "nowhere")
    for name in "ac":
        with pytest.raises(Collision):
            sink.open(request(name, Layout.PACKED))
    assert sink.artifacts("a") == []
    assert sink.artifacts("b") != []
    sink.close()


@pytest.mark.parametrize("tag", ["..", ".", "", "a/b", ".parts", "/etc", "a\0b", "x" * 129])
def test_a_tag_that_is_a_path_is_refused_here_too(sink: Filesystem, tag: str) -> None:
    with pytest.raises(SinkError):
        sink.open(request("a", Layout.PACKED, tag=tag))


@pytest.mark.parametrize("name", ["a/b", "../a", "", "a\0b", "ä", "x" * 129])
def test_an_id_that_is_a_path_is_refused_here_too(sink: Filesystem, name: str) -> None:
    with pytest.raises(SinkError):
        sink.open(request(name, Layout.PACKED))
    assert sink.artifacts(name) == []


def test_a_root_has_one_server(sink: Filesystem, tmp_path: Path) -> None:
    with pytest.raises(SinkSettingsError, match="another server"):
        Filesystem(tmp_path)
    sink.close()
    Filesystem(tmp_path).close()


def test_leftovers_are_removed_at_the_start(tmp_path: Path) -> None:
    parts = tmp_path / ".parts"
    (parts / "x").mkdir(parents=True)
    (parts / "x" / "rows.safetensors").write_text("half")
    (parts / "y").symlink_to(tmp_path)
    Filesystem(tmp_path).close()
    assert list(parts.iterdir()) == []
    assert tmp_path.exists()


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SinkSettingsError):
        Filesystem(tmp_path / "file" / "below")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / ".parts").symlink_to(tmp_path)
    with pytest.raises(SinkSettingsError):
        Filesystem(tmp_path / "root")


def test_rows_that_outgrow_memory_wait_in_a_file(tmp_path: Path) -> None:
    sink = Filesystem(tmp_path, buffer_bytes=8000)
    about = request("a", Layout.PER_FILE)
    recording = sink.open(about)
    sizes = []
    for block in blocks(about):
        recording.write(block)
        sizes.extend(path.stat().st_size for path in tmp_path.rglob("spool"))
    assert len(set(sizes)) > 1
    recording.finish(Outcome(Ending.COMPLETE))
    assert same_rows(read_stored(tmp_path, about), about)
    assert list((tmp_path / ".parts").iterdir()) == []
    assert not any(path.name == "spool" for path in tmp_path.rglob("*"))
    sink.close()


def test_nothing_stays_open_or_on_the_disk_after_a_hundred_requests(tmp_path: Path) -> None:
    sink = Filesystem(tmp_path, buffer_bytes=1)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(100):
        recording = sink.open(about := request(str(number), LAYOUTS[number % 3]))
        recording.write(one_row(about))
        if number % 2:
            recording.abandon(OSError("made up"))
        else:
            recording.finish(Outcome(Ending.COMPLETE))
    # The shard that is open has two files.
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert list((tmp_path / ".parts").iterdir()) == []
    sink.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_artifacts_name_the_bytes_that_their_digests_are_of(
    sink: Filesystem, layout: Layout, tmp_path: Path
) -> None:
    for seed, name in enumerate("abc"):
        for one in record(sink, request(name, layout), seed):
            data = artifact_bytes(tmp_path, one)
            assert hashlib.sha256(data).digest() == one.sha256


def test_files_that_will_be_there_are_announced(sink: Filesystem) -> None:
    recording = sink.open(request("a", Layout.PER_FILE))
    announced = list(recording.pending)
    assert [one.path for one in recording.finish(Outcome(Ending.COMPLETE))] == announced
    assert sink.open(request("b", Layout.SHARDED)).pending == ()


def test_a_format_that_there_is_not_is_refused(sink: Filesystem) -> None:
    with pytest.raises(SinkRefusal, match="safetensors, npz") as caught:
        sink.check(Target("disk", "default", Layout.PACKED, {"format": "pickle"}))
    assert caught.value.field == "options.format"


def test_settings_decide_on_layout_format_and_sizes(tmp_path: Path) -> None:
    settings = {"root": str(tmp_path), "layout": "sharded", "format": "npz", "buffer": "1KiB"}
    sink = make("disk", settings)
    assert list(sink.layouts) == [Layout.SHARDED, Layout.PER_FILE, Layout.PACKED]
    (artifact,) = record(sink, request("a", None))
    assert (artifact.path, artifact.media_type) == (
        "default/shards/shard-000001.rows",
        "application/x-npz",
    )
    sink.close()


@pytest.mark.parametrize(
    "wrong",
    [{}, {"root": ""}, {"layout": "flat"}, {"format": "hdf5"}, {"buffer": "0"}, {"shard": "big"},
     {"depth": "1"}],
)  # fmt: skip
def test_wrong_settings_are_refused(wrong: dict[str, str], tmp_path: Path) -> None:
    root = {} if wrong in ({}, {"root": ""}) else {"root": str(tmp_path)}
    with pytest.raises(SinkSettingsError):
        make("disk", {**root, **wrong})


def test_formats_are_those_of_the_client(tmp_path: Path) -> None:
    for kind in Format:
        sink = Filesystem(tmp_path / kind, kind=kind)
        for layout in LAYOUTS:
            about = request(layout, layout)
            record(sink, about)
            assert same_rows(read_stored(tmp_path / kind, about), about)
        sink.close()
