"""Stored rows, read back: whatever the layout and the format, every bit, in bounded memory."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rheostat
from rheostat.captures import StoredCaptures, StoredTable, open_captures
from rheostat_engine import Point, Site
from rheostat_server.sinks import (
    CaptureAbout,
    Encoding,
    Ending,
    FloatType,
    Layout,
    Outcome,
    RowBlock,
)
from rheostat_server.sinks.filesystem import Filesystem
from rheostat_server.sinks.formats import Format
from rheostat_server.sinks.samples import SITES, blocks, request
from rheostat_server.sinks.wire import split_payload

from .stored_kit import (
    CAPTURE,
    COMPLETE,
    WIDTH,
    expected,
    make_request,
    same,
    three_requests,
    write,
)


@pytest.fixture(params=[(layout, kind) for layout in Layout for kind in Format], ids=str)
def written(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[StoredCaptures, dict[str, list[RowBlock]]]:
    return three_requests(tmp_path, *request.param)


@pytest.mark.parametrize("baseline", [False, True, None])
@pytest.mark.parametrize("sample", [0, 1, None])
def test_the_rows_of_a_request_are_those_that_were_written(
    written, sample: int | None, baseline: bool | None
) -> None:
    store, rows = written
    if (sample, baseline) == (1, True):
        with pytest.raises(rheostat.NotFound):
            store.rows_of("a", "resid_post", 0, sample=1, baseline=True)
        return
    for name, blocks_ in rows.items():
        for number, site in enumerate(SITES):
            batch = store.rows_of(
                name, site.point.value, site.layer, sample=sample, baseline=baseline
            )
            same(batch, expected(blocks_, number, sample, baseline))
            assert batch.requests[0].request_id == name
            assert batch.baseline.all() == (baseline is True)


@pytest.mark.parametrize("size", [1, 3, 14, 1000])
def test_rows_of_a_site_come_in_batches_over_all_requests(written, size: int) -> None:
    store, rows = written
    batches = list(store.rows("mlp_out", 3, batch=size))
    assert {len(batch) for batch in batches[:-1]} <= {size}
    assert sum(len(batch) for batch in batches) == 3 * 14
    found: dict[str, list[np.ndarray]] = {}
    for batch in batches:
        for values, index in zip(batch.values, batch.request_index, strict=True):
            found.setdefault(batch.requests[index].request_id, []).append(values)
    for name, blocks_ in rows.items():
        wanted, _, _ = expected(blocks_, 2, None, False)
        np.testing.assert_array_equal(np.stack(found[name]).view(np.uint32), wanted.view(np.uint32))


def test_requests_say_what_they_are(written) -> None:
    store, _ = written
    assert sorted(one.request_id for one in store) == [".b", "a", "c:1"]
    one = store["c:1"]
    assert (one.tag, one.model, one.labels, one.state) == (
        "t",
        "made-up",
        {"set": "made up"},
        "complete",
    )
    assert (one.prompt_token_ids, one.dropped_rows) == ((5, 6, 7), 0)
    assert one.sites == (("resid_post", 0), ("resid_pre", 1), ("mlp_out", 3))
    assert [table.rows for table in one.tables] == [21, 21, 21]
    assert store.tags == ("t",)
    assert "c:1" in store
    assert "d" not in store
    assert ".." not in store


def test_digests_are_checked_where_asked(written) -> None:
    store, _ = written
    assert store.verify() == 3
    ((part, _), *_) = store["a"].digests
    data = bytearray(part.path.read_bytes())
    data[part.offset + part.length - 1] ^= 1
    part.path.write_bytes(data)
    with pytest.raises(rheostat.DataLoss, match="SHA-256"):
        store.verify()
    with pytest.raises(rheostat.DataLoss):
        store["a"].verify()
    store["c:1"].verify()


def test_a_file_that_is_cut_short_is_refused(written) -> None:
    store, _ = written
    (part, _) = store["c:1"].digests[0]
    part.path.write_bytes(part.path.read_bytes()[: part.offset + part.length - 3])
    with pytest.raises(rheostat.DataLoss):
        store.rows_of("c:1", "resid_post", 0)
    part.path.unlink()
    with pytest.raises(rheostat.DataLoss):
        store.rows_of("c:1", "resid_post", 0)
    with pytest.raises(rheostat.DataLoss):
        store["c:1"].verify()


def test_either_name_of_a_site_finds_its_rows(written) -> None:
    store, rows = written
    same(store.rows_of("a", "resid_pre", 1), expected(rows["a"], 1, None, False))
    with pytest.raises(rheostat.NotFound, match=r"resid_mid\[9\]"):
        store.rows_of("a", "resid_mid", 9)
    capture = CaptureAbout(0, (Site(Point.RESID_PRE, 4),), FloatType.FLOAT32, WIDTH)
    assert [table.layer for table in stored_table(store, capture, "resid_post", 3)] == [4]


def stored_table(
    store: StoredCaptures, capture: CaptureAbout, point: str, layer: int
) -> tuple[StoredTable, ...]:
    other = store.root.with_name(f"{store.root.name}-other")
    sink = Filesystem(other)
    about = make_request("x", Layout.PACKED, capture)
    write(sink, about, list(blocks(about)))
    sink.close()
    return open_captures(other)["x"].tables_at(point, layer)


@pytest.mark.parametrize("kind", [*FloatType])
def test_every_element_type_widens_exactly(kind: FloatType, tmp_path: Path) -> None:
    capture = CaptureAbout(0, SITES[:1], kind, WIDTH)
    about = make_request("a", Layout.PACKED, capture)
    rows = list(blocks(about))
    sink = Filesystem(tmp_path)
    write(sink, about, rows)
    sink.close()
    batch = open_captures(tmp_path).rows_of("a", "resid_post", 0, baseline=None)
    held = np.concatenate([one.parts["rows"][0] for one in rows])
    if kind is FloatType.BFLOAT16:
        bits = held.astype(np.uint32) << 16
        np.testing.assert_array_equal(batch.values.view(np.uint32), bits)
    else:
        np.testing.assert_array_equal(batch.values, held.astype(np.float32))


@pytest.mark.parametrize("encoding", [Encoding.FULL8, Encoding.RP8, Encoding.TOPK8])
@pytest.mark.parametrize("layout", [*Layout])
def test_encoded_rows_are_decoded_as_they_would_be_on_a_stream(
    encoding: Encoding, layout: Layout, tmp_path: Path
) -> None:
    from rheostat._capture.encodings import read_tensor
    from rheostat_server.capture.encodings import Form
    from rheostat_wire.v1 import tensor_pb2

    rows = np.random.default_rng(0).standard_normal((1, 6, 8)).astype(np.float32)
    number = tensor_pb2.Encoding.Value(f"ENCODING_{encoding.name}")
    encode = Form(number, kept=3, seed=9).encode
    tensor = encode(rows, row_type=FloatType.FLOAT32, wanted=FloatType.FLOAT32)
    more = {} if encoding is Encoding.FULL8 else {"kept": 3}
    more |= {"seed": 9} if encoding is Encoding.RP8 else {}
    capture = CaptureAbout(0, SITES[:1], FloatType.FLOAT32, 8, encoding, **more)
    labels = np.arange(6, dtype=np.int32)
    parts = split_payload(tensor.inline, (1, 6), capture)
    sink = Filesystem(tmp_path)
    write(
        sink,
        make_request("a", layout, capture),
        [RowBlock(0, 0, SITES[:1], labels, labels, parts)],
    )
    sink.close()
    wanted = read_tensor(tensor)
    batch = open_captures(tmp_path).rows_of("a", "resid_post", 0)
    np.testing.assert_array_equal(batch.values, wanted.values[0])
    np.testing.assert_array_equal(batch.max_error, wanted.max_error[0])
    assert batch.encoding == wanted.encoding


def test_several_captures_of_a_site_have_to_be_told_apart(tmp_path: Path) -> None:
    sink = Filesystem(tmp_path)
    captures = [CAPTURE, CaptureAbout(1, SITES[:1], FloatType.BFLOAT16, 2)]
    about = request("a", Layout.PACKED, captures)
    write(sink, about, list(blocks(about)))
    sink.close()
    store = open_captures(tmp_path)
    with pytest.raises(rheostat.InvalidRequest, match="captures 0, 1 of a"):
        store.rows_of("a", "resid_post", 0)
    assert store.rows_of("a", "resid_post", 0, capture_index=1).values.shape == (14, 2)
    assert store.rows_of("a", "mlp_out", 3).values.shape == (14, WIDTH)


def test_rows_of_different_widths_are_not_mixed(tmp_path: Path) -> None:
    sink = Filesystem(tmp_path)
    for width, name in enumerate("ab", 2):
        capture = CaptureAbout(0, SITES[:1], FloatType.FLOAT32, width)
        about = make_request(name, Layout.SHARDED, capture)
        write(sink, about, list(blocks(about)))
    sink.close()
    store = open_captures(tmp_path)
    with pytest.raises(rheostat.InvalidRequest, match="a and b"):
        list(store.rows("resid_post", 0))
    assert [batch.values.shape[1] for batch in store.rows("resid_post", 0, batch=14)] == [2, 3]


def test_tags_are_read_one_by_one_or_all(tmp_path: Path) -> None:
    sink = Filesystem(tmp_path)
    for seed, tag in enumerate(("x", "y")):
        about = make_request("same", [*Layout][seed], tag=tag)
        write(sink, about, list(blocks(about, seed)))
    sink.close()
    assert open_captures(tmp_path).tags == ("x", "y")
    assert [one.tag for one in open_captures(tmp_path)] == ["x", "y"]
    assert open_captures(tmp_path, tag="y")["same"].tag == "y"
    (batch,) = open_captures(tmp_path).rows("resid_post", 0)
    assert batch.request_index.tolist() == [0] * 14 + [1] * 14


@pytest.mark.parametrize("layout", Layout)
def test_a_folder_within_a_root_is_told_the_root(tmp_path: Path, layout: Layout) -> None:
    root = tmp_path / "root"
    three_requests(root, layout, Format.NPZ)
    within = [one for one in (root / "t").rglob("*") if one.is_dir()]
    assert within
    for folder in (root / "t", *within):
        with pytest.raises(rheostat.InvalidRequest) as raised:
            open_captures(folder)
        told = f'{folder} is inside a root: write open_captures("{root}", tag="t")'
        assert (raised.value.path, raised.value.message) == ("root", told)


def test_an_empty_root_is_one_and_a_tag_may_be_called_as_a_folder_within(tmp_path: Path) -> None:
    assert list(open_captures(tmp_path)) == []
    sink = Filesystem(tmp_path)
    about = make_request("shards", Layout.PER_FILE, tag="requests")
    write(sink, about, list(blocks(about, 0)))
    sink.close()
    assert [one.request_id for one in open_captures(tmp_path)] == ["shards"]


def test_a_tag_that_is_not_there_is_not_found_and_told_which_are(tmp_path: Path) -> None:
    with pytest.raises(rheostat.NotFound, match=r'no tag "x" in .*; nothing is stored there yet'):
        open_captures(tmp_path, tag="x")
    (tmp_path / "other").mkdir()  # a folder of another program
    with pytest.raises(rheostat.NotFound, match="nothing is stored there yet: is it the root="):
        open_captures(tmp_path, tag="x")
    sink = Filesystem(tmp_path)
    for tag in ("x", "y"):
        write(sink, make_request("a", Layout.PACKED, tag=tag), [])
    with pytest.raises(rheostat.NotFound, match=r'no tag "z" in .*; there are x, y \['):
        open_captures(tmp_path, tag="z")
    for number in range(10):
        write(sink, make_request("a", Layout.PACKED, tag=f"a{number}"), [])
    sink.close()
    with pytest.raises(rheostat.NotFound, match=r"there are a0, .*, a9 and 2 more \["):
        open_captures(tmp_path, tag="z")


def test_a_site_that_nobody_captured_is_not_found_and_told_which_are(tmp_path: Path) -> None:
    store, _ = three_requests(tmp_path, Layout.SHARDED, Format.SAFETENSORS)
    known = ", ".join(f"{site.point}[{site.layer}]" for site in SITES)
    with pytest.raises(rheostat.NotFound) as raised:
        list(store.rows("mlp_out", 99))
    assert raised.value.message.endswith(f"no rows of mlp_out[99]; there are {known}")
    with pytest.raises(rheostat.NotFound) as raised:
        store.rows_of("a", "mlp_out", 99)
    assert raised.value.message.endswith(f"no such rows of mlp_out[99]; there are {known}")
    assert list(store.rows("resid_post", 0, sample=77)) == []


def test_a_store_without_requests_has_no_rows_of_any_site(tmp_path: Path) -> None:
    assert list(open_captures(tmp_path).rows("resid_post", 0)) == []


@pytest.mark.parametrize("tag", ["..", "a/b", ""])
def test_a_tag_that_is_a_path_is_refused(tag: str, tmp_path: Path) -> None:
    with pytest.raises(rheostat.InvalidRequest):
        open_captures(tmp_path, tag=tag)
    with pytest.raises(rheostat.InvalidRequest):
        open_captures(tmp_path / "nowhere")


def test_a_manifest_that_leads_elsewhere_or_says_nothing_is_refused(tmp_path: Path) -> None:
    sink = Filesystem(tmp_path)
    write(sink, make_request("a", Layout.PACKED), [])
    sink.close()
    path = tmp_path / "t/requests/a/manifest.json"
    said = json.loads(path.read_text())
    for change in (
        {"files": [{**said["files"][0], "path": "../../../../etc/passwd"}]},
        {"schema": "rheostat.captured.v9"},
        {"files": 3},
    ):
        path.write_text(json.dumps({**said, **change}))
        with pytest.raises(rheostat.DataLoss):
            list(open_captures(tmp_path))
    path.write_text(json.dumps(said))
    assert [one.state for one in open_captures(tmp_path)] == ["complete"]


@pytest.mark.parametrize("ending", [Ending.PARTIAL, Ending.ABORTED])
def test_a_request_with_rows_missing_says_so(ending: Ending, tmp_path: Path) -> None:
    sink = Filesystem(tmp_path)
    about = make_request("a", Layout.SHARDED)
    write(sink, about, list(blocks(about)), Outcome(ending, 12, ("aborted",)))
    sink.close()
    one = open_captures(tmp_path)["a"]
    assert (one.state, one.dropped_rows, one.finish_reasons) == (ending, 12, ("aborted",))


def test_what_is_written_meanwhile_is_seen_by_the_next_look(tmp_path: Path) -> None:
    sink = Filesystem(tmp_path)
    store = open_captures(tmp_path)
    seen = []
    for number, layout in enumerate(Layout):
        about = make_request(str(number), layout)
        write(sink, about, list(blocks(about)))
        seen.append(len(list(store)))
    assert seen == [1, 2, 3]
    sink.close()


def test_a_large_request_is_read_in_little_memory(tmp_path: Path) -> None:
    wide = CaptureAbout(0, SITES[:1], FloatType.BFLOAT16, 4096)
    sink = Filesystem(tmp_path, buffer_bytes=1 << 20)
    about = make_request("a", Layout.SHARDED, wide)
    recording = sink.open(about)
    zeros = np.zeros((1, 1000, 4096), np.uint16)
    for first in range(0, 20_000, 1000):
        labels = np.arange(first, first + 1000, dtype=np.int32)
        recording.write(RowBlock(0, 0, SITES[:1], labels, labels, {"rows": zeros}))
    recording.finish(COMPLETE)
    sink.close()
    program = (
        "import resource, sys\n"
        "from rheostat.captures import open_captures\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "rows = sum(len(b) for b in open_captures(sys.argv[1]).rows('resid_post', 0, batch=256))\n"
        "print(rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    rows, grown = map(int, done.stdout.split())
    assert rows == 20_000
    assert grown < 64 << 10  # KiB; the file has 160 MiB
