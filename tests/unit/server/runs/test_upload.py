"""PutRun: uploads of runs, over a real channel and without one."""

import asyncio
import random

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import Point, Site
from rheostat_server.errors import RheostatError, StoreFull
from rheostat_server.runs import upload
from rheostat_server.runs.store import RunStore
from rheostat_server.runs.upload import Upload, check_header
from rheostat_server.tasks import uploads
from rheostat_wire.dtypes import narrow
from rheostat_wire.v1 import (
    engine_service_pb2,
    run_pb2,
    tensor_pb2,
    types_pb2,
)
from rheostat_wire.v1 import run_service_pb2 as pb

from ..fakes import INFO, SITES, WIDTH
from ..stored_runs import (
    BF16,
    F16,
    F32,
    LZ4,
    NUMBERS,
    POST,
    PRE,
    PROMPT_TOKENS,
    RAW,
    STORED,
    by_site,
    header,
    nothing_left,
    put,
    read,
    rows,
    site,
    span,
    tensor,
)
from ..streams import settled
from ..uploads import refusal_of

Code = grpc.StatusCode


async def test_an_upload_is_stored_and_read_back(running) -> None:
    run = await put(running, header(labels={"set": "a"}), rows(NUMBERS))
    assert run.lease_expire_time.seconds - run.create_time.seconds in (3599, 3600, 3601)
    assert run.size_bytes > NUMBERS.nbytes
    got = (await running.client.runs.GetRun(pb.GetRunRequest(run_id="up"))).run
    assert got == run
    for name in ("create_time", "lease_expire_time", "size_bytes"):
        run.ClearField(name)
    assert run == run_pb2.Run(
        run_id="up",
        sites=[site(0), site(2)],
        positions=[span(0, 2)],
        prompt_token_ids=PROMPT_TOKENS,
        labels={"set": "a"},
        dtype=F32,
        width=WIDTH,
    )
    (answer,) = await read(running)
    assert list(answer.captured.token_ids) == [10, 11]
    assert by_site([answer]) == {
        (POST, layer, position): NUMBERS[i, position].tolist()
        for i, layer in enumerate((0, 2))
        for position in (0, 1)
    }


async def test_an_upload_without_an_id_is_given_one(running) -> None:
    run = await put(running, header(run_id=""), rows(NUMBERS))
    assert len(run.run_id) == 32
    assert len(await read(running, run.run_id)) == 1


async def test_an_id_in_use_is_refused(running) -> None:
    await put(running, header(), rows(NUMBERS))
    refusal = await refusal_of(put(running, header(), rows(NUMBERS)))
    assert refusal.brief == (Code.ALREADY_EXISTS, "REASON_RUN_EXISTS", "header.run_id")


async def test_positions_behind_the_prompt_need_their_tokens(running) -> None:
    places = [span(1), span(3)]
    message = header(positions=places)
    refusal = await refusal_of(put(running, message, rows(NUMBERS, positions=places)))
    assert refusal.brief == (Code.INVALID_ARGUMENT, "REASON_MISSING_FIELD", "header.token_ids")
    message.header.token_ids.extend([11, 7])
    await put(running, message, rows(NUMBERS, positions=places))
    (answer,) = await read(running, positions={"positions": [3, -2]})
    assert (list(answer.captured.token_ids), list(answer.captured.positions)) == ([11, 7], places)


BAD_HEADERS = [
    ({"run_id": "../up"}, "INVALID_VALUE", "run_id"),
    ({"sites": []}, "MISSING_FIELD", "sites"),
    ({"sites": [site(0), site(0)]}, "INVALID_VALUE", "sites[1]"),
    ({"sites": [site(0), site(1, PRE)]}, "INVALID_VALUE", "sites[1]"),
    ({"sites": [types_pb2.Site(point=POST)]}, "MISSING_FIELD", "sites[0].layer"),
    ({"sites": [site(0, 0)]}, "UNKNOWN_ENUM", "sites[0].point"),
    ({"sites": [site(99)]}, "UNKNOWN_LAYER", "sites[0].layer"),
    ({"positions": []}, "MISSING_FIELD", "positions"),
    ({"positions": [span(0, 0)]}, "INVALID_VALUE", "positions[0].count"),
    ({"positions": [span(0, 2), span(1)]}, "INVALID_VALUE", "positions[1].start"),
    ({"positions": [span(0, 2**32 - 1)]}, "INVALID_POSITION", "positions"),
    ({"positions": [span(INFO.model_tokens)]}, "INVALID_POSITION", "positions"),
    ({"prompt_token_ids": {}}, "MISSING_FIELD", "prompt_token_ids.ids"),
    ({"prompt_token_ids": {"ids": [2**31]}}, "UNKNOWN_TOKEN", "prompt_token_ids.ids[0]"),
    ({"prompt_token_ids": {"ids": [1] * 65}}, "PROMPT_TOO_LONG", "prompt_token_ids.ids"),
    ({"token_ids": [10]}, "INVALID_VALUE", "token_ids"),
    ({"token_ids": [10, 12]}, "INVALID_VALUE", "token_ids[1]"),
    ({"token_ids": [10, 2**31]}, "UNKNOWN_TOKEN", "token_ids[1]"),
    ({"dtype": 0}, "UNKNOWN_ENUM", "dtype"),
    ({"dtype": tensor_pb2.DTYPE_INT32}, "INVALID_VALUE", "dtype"),
    ({"lease": {"seconds": 0}}, "INVALID_VALUE", "lease"),
    ({"labels": {"": "a"}}, "INVALID_VALUE", "labels"),
]


@pytest.mark.parametrize(("fields", "reason", "field"), BAD_HEADERS)
async def test_a_malformed_header_is_refused_by_field(running, fields, reason, field) -> None:
    refusal = await refusal_of(put(running, header(**fields), rows(NUMBERS)))
    assert refusal.brief == (Code.INVALID_ARGUMENT, f"REASON_{reason}", f"header.{field}")
    await nothing_left(running)


INF = NUMBERS.copy()
INF[1, 0, 2] = np.inf

BAD_UPLOADS = [
    ([], "TRUNCATED_UPLOAD", "header"),
    ([rows(NUMBERS)], "MISSING_FIELD", "header"),
    ([pb.PutRunRequest()], "MISSING_FIELD", ""),
    ([header(), header()], "INVALID_VALUE", "header"),
    ([header()], "TRUNCATED_UPLOAD", "rows"),
    ([header(), rows(NUMBERS[:1], [site(0)])], "TRUNCATED_UPLOAD", "rows"),
    ([header(), rows(NUMBERS), rows(NUMBERS)], "INVALID_VALUE", "rows"),
    ([header(), rows(NUMBERS, sites=[])], "MISSING_FIELD", "rows.sites"),
    ([header(), rows(NUMBERS, sites=[site(0), site(1)])], "INVALID_VALUE", "rows.sites[1]"),
    ([header(), rows(NUMBERS, sites=[site(0), site(0)])], "INVALID_VALUE", "rows.sites[1]"),
    ([header(), rows(NUMBERS, sites=[site(0, 77)])], "UNKNOWN_ENUM", "rows.sites[0].point"),
    ([header(), rows(NUMBERS, sites=[types_pb2.Site()])], "MISSING_FIELD", "rows.sites[0].layer"),
    ([header(), rows(NUMBERS, positions=[])], "MISSING_FIELD", "rows.positions"),
    ([header(), rows(NUMBERS, positions=[span(1, 2)])], "INVALID_POSITION", "rows.positions"),
    (
        [header(), rows(NUMBERS, positions=[span(0, 2**32 - 1)])],
        "INVALID_POSITION",
        "rows.positions",
    ),
    (
        [header(), rows(NUMBERS, positions=[span(1), span(0)])],
        "INVALID_VALUE",
        "rows.positions[1].start",
    ),
    ([header(), rows(NUMBERS[:, :1])], "VECTOR_SHAPE", "rows.tensor.shape"),
    ([header(), rows(NUMBERS[..., :-1])], "VECTOR_SHAPE", "rows.tensor.shape"),
    ([header(), rows(NUMBERS, shape=[1])], "VECTOR_SHAPE", "rows.tensor.shape"),
    ([header(dtype=F16), rows(NUMBERS)], "INVALID_VALUE", "rows.tensor.dtype"),
    ([header(), rows(NUMBERS, inline=b"x")], "TENSOR_PAYLOAD", "rows.tensor.inline"),
    ([header(), rows(NUMBERS, crc32c=1)], "TENSOR_PAYLOAD", "rows.tensor.crc32c"),
    ([header(), rows(NUMBERS, encoding=LZ4)], "TENSOR_PAYLOAD", "rows.tensor.inline"),
    (
        [header(), rows(NUMBERS, encoding=tensor_pb2.ENCODING_FULL8)],
        "INVALID_VALUE",
        "rows.tensor.encoding",
    ),
    ([header(), rows(INF)], "NON_FINITE", "rows.tensor.inline"),
]


@pytest.mark.parametrize(("messages", "reason", "field"), BAD_UPLOADS)
async def test_a_wrong_upload_is_refused_and_leaves_nothing(
    running, messages, reason, field
) -> None:
    refusal = await refusal_of(put(running, *messages))
    assert refusal.brief == (Code.INVALID_ARGUMENT, f"REASON_{reason}", field)
    await nothing_left(running)
    await put(running, header(), rows(NUMBERS))


async def test_a_missing_row_is_named(running) -> None:
    messages = [header(), rows(NUMBERS[:, :1], positions=[span(0)])]
    messages.append(rows(NUMBERS[:1, 1:], [site(0)], [span(1)]))
    refusal = await refusal_of(put(running, *messages))
    assert "resid_post 2 at position 1" in refusal.message


async def test_a_field_that_is_not_known_is_refused(running) -> None:
    strange = rows(NUMBERS)
    strange.rows.MergeFromString(b"\xfa\x3f\x01a")
    refusal = await refusal_of(put(running, header(), strange))
    assert refusal.brief == (Code.INVALID_ARGUMENT, "REASON_UNKNOWN_FIELD", "rows.#1023")
    await nothing_left(running)


async def test_a_cut_upload_leaves_nothing_and_an_unfinished_one_is_not_a_leak(running) -> None:
    call = running.client.runs.PutRun()
    await call.write(header())
    await call.write(rows(NUMBERS[:1], [site(0)]))
    while running.manager.runs.used_bytes < NUMBERS.nbytes:
        await asyncio.sleep(0.01)
    stats = await running.client.engine.GetStats(engine_service_pb2.GetStatsRequest())
    assert (stats.run_count, stats.leaked_count) == (0, 0)
    assert stats.run_bytes > 0
    for refusal in (
        await refusal_of(running.client.runs.DeleteRun(pb.DeleteRunRequest(run_id="up"))),
        await refusal_of(running.client.runs.GetRun(pb.GetRunRequest(run_id="up"))),
    ):
        assert refusal.reason in ("REASON_RUN_IN_USE", "REASON_RUN_NOT_FOUND")
    call.cancel()
    await nothing_left(running)
    await put(running, header(), rows(NUMBERS))


async def test_a_silent_upload_ends_by_itself(running, monkeypatch) -> None:
    monkeypatch.setattr(uploads, "UPLOAD_GRACE_SECONDS", 0.2)
    call = running.client.runs.PutRun()
    await call.write(header())
    refusal = await refusal_of(call)
    assert refusal.brief == (Code.INVALID_ARGUMENT, "REASON_TRUNCATED_UPLOAD", "rows")
    await nothing_left(running)


async def test_an_upload_that_never_fits_is_refused_at_its_header(starter) -> None:
    running = await starter(runs_bytes=NUMBERS.nbytes - 1)
    refusal = await refusal_of(put(running, header()))
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_STORE_FULL", "header.run_id")


async def test_memory_is_reserved_for_rows_that_come(starter, monkeypatch) -> None:
    monkeypatch.setattr(upload, "_BLOCK", 1)
    running = await starter(runs_bytes=4192 + 4190 - NUMBERS.nbytes // 2)
    await put(running, header(run_id="kept"), rows(NUMBERS))
    first = rows(NUMBERS[:, :1], positions=[span(0)])
    second = rows(NUMBERS[:, 1:], positions=[span(1)])
    refusal = await refusal_of(put(running, header(), first))
    assert refusal.reason == "REASON_TRUNCATED_UPLOAD"
    refusal = await refusal_of(put(running, header(), first, second))
    assert refusal.brief[:2] == (Code.RESOURCE_EXHAUSTED, "REASON_STORE_FULL")
    assert (await settled(running)).run_count == 1


async def test_a_piece_of_too_many_bytes_is_refused(running, monkeypatch) -> None:
    monkeypatch.setattr(upload, "TENSOR_MESSAGE_BYTES", NUMBERS.nbytes - 1)
    refusal = await refusal_of(put(running, header(), rows(NUMBERS)))
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_MESSAGE_TOO_LARGE", "rows.tensor")


@st.composite
def cut(draw) -> tuple[pb.RunHeader, list[pb.RunRows], np.ndarray]:
    """A header, its rows in pieces of any shape and order, and the rows, [sites, positions, W]."""
    layers = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
    places = draw(st.lists(st.integers(0, 30), min_size=1, max_size=9, unique=True))
    places.sort()
    dtype = draw(st.sampled_from([F32, F16, BF16]))
    chance = random.Random(draw(st.integers(0, 2**32)))
    values = np.array(
        [chance.uniform(-9, 9) for _ in range(len(layers) * len(places) * WIDTH)], np.float32
    ).reshape(len(layers), len(places), WIDTH)
    pieces = []
    waiting = [(list(range(len(layers))), list(range(len(places))))]
    while waiting:
        some, at = waiting.pop(chance.randrange(len(waiting)))
        kind = chance.randrange(3)
        if kind == 1 and len(some) > 1:
            chance.shuffle(some)
            waiting += [(some[:1], at), (some[1:], at)]
        elif kind == 2 and len(at) > 1:
            chosen = sorted(chance.sample(at, chance.randrange(1, len(at))))
            waiting += [(some, chosen), (some, [one for one in at if one not in chosen])]
        else:
            encoding = chance.choice([RAW, LZ4])
            part = tensor(values[np.ix_(some, at)], dtype, encoding)
            sites = [site(layers[one]) for one in some]
            positions = [span(places[one]) for one in at]
            pieces.append(pb.RunRows(sites=sites, positions=positions, tensor=part))
    message = pb.RunHeader(
        run_id="up",
        sites=[site(layer) for layer in layers],
        positions=[span(place) for place in places],
        token_ids=places,
        prompt_token_ids=types_pb2.TokenIds(ids=[0]),
        dtype=dtype,
    )
    return message, pieces, values


@given(cut(), st.integers(1, 400), st.booleans())
def test_pieces_of_any_shape_and_order_make_the_same_run(parts, block, lose) -> None:
    message, pieces, values = parts
    store = RunStore(1 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload, "_BLOCK", block)
        checked = check_header(message, SITES, INFO)
        draft = store.begin(
            checked.target,
            checked.about,
            checked.prompt_token_ids,
            {},
            "",
            lossless=True,
            upload=True,
        )
        coming = Upload(checked, draft)
        if lose:
            pieces.pop()
        for piece in pieces:
            coming.add(piece)
        if lose:
            with pytest.raises(RheostatError, match="did not come"):
                coming.finish()
            draft.drop()
            assert (store.used_bytes, store.unfinished) == (0, 0)
            return
        coming.finish()
        assert draft.keep()
    run = store.hold("up", "")
    wanted = narrow(values, STORED[message.dtype])
    for number, place in enumerate(message.sites):
        got = run.rows(Site(Point.RESID_POST, place.layer))
        assert np.array_equal(got, wanted[number])
    at = np.arange(0, len(run.positions), 2)
    backwards = list(range(len(run.sites)))[::-1]
    some = np.stack([run.rows(run.sites[one])[at] for one in backwards])
    assert np.array_equal(run.read(backwards, at), some)


def test_an_upload_of_a_dropped_run_reserves_nothing() -> None:
    store = RunStore(1 << 20)
    checked = check_header(header().header, SITES, INFO)
    draft = store.begin(checked.target, checked.about, [1], {}, "", lossless=True, upload=True)
    coming = Upload(checked, draft)
    draft.drop()
    coming.add(rows(NUMBERS).rows)
    coming.finish()
    assert (store.used_bytes, draft.keep()) == (0, None)


def test_a_full_store_refuses_rows() -> None:
    store = RunStore(4150)
    checked = check_header(header().header, SITES, INFO)
    draft = store.begin(checked.target, checked.about, [1], {}, "", lossless=True, upload=True)
    with pytest.raises(StoreFull):
        Upload(checked, draft).add(rows(NUMBERS).rows)
