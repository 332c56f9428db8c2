"""The receipt, from what the engine measured."""

from dataclasses import replace

import numpy as np

from rheostat_engine import Dose, Point, Released, Site
from rheostat_server.delivery.byte_budget import ByteCounter
from rheostat_server.engine.backend import Job
from rheostat_server.generation.receipts import write_receipt
from rheostat_server.generation.sample import Sample
from rheostat_server.requests.sequence import (
    EngineSequence,
    SampleGains,
    SequenceKind,
    SteeringChange,
)
from rheostat_wire.v1 import generation_pb2, receipt_pb2, types_pb2

from ..admissions import admission_context, admitted
from ..fakes import PULLED, SITES, STREAM_NORM, ScriptedBackend
from ..messages import (
    FIRST,
    GENERATED,
    ONES,
    ablate,
    add,
    band,
    capture,
    clamp,
    norm_add,
    request,
    scaled,
    selector,
    site_set,
    tensor,
    token_range,
    window,
)
from ..streams import captured

PRE, POST = types_pb2.POINT_RESID_PRE, types_pb2.POINT_RESID_POST
Sampling = generation_pb2.Sampling
Run = types_pb2.PositionRun


async def receipt(running, **fields: object) -> receipt_pb2.Receipt:
    return (await running.client.generate(request(**fields)))[-1].receipt


def dose(norm: float) -> receipt_pb2.Dose:
    relative = norm / STREAM_NORM
    return receipt_pb2.Dose(norm=norm, relative_mean=relative, relative_max=relative)


async def test_every_op_has_rows_and_doses_as_they_were_measured(running) -> None:
    steer = [
        norm_add(scale=-0.5),
        scaled(1.0),
        ablate(tensor(FIRST), tensor(ONES), where=selector(window(0, 2))),
        clamp(band(low=1.0), sites=site_set(PRE, layers=[0, 1])),
        scaled(0.0, where=selector(GENERATED)),
    ]
    got = await receipt(running, steer=steer)
    ops = [
        receipt_pb2.OP_NORM_ADD,
        receipt_pb2.OP_SCALE,
        receipt_pb2.OP_ABLATE,
        receipt_pb2.OP_CLAMP,
        receipt_pb2.OP_SCALE,
    ]
    assert [one.intervention for one in got.interventions] == [
        receipt_pb2.InterventionRef(origin=receipt_pb2.ORIGIN_REQUEST, index=index, op=op)
        for index, op in enumerate(ops)
    ]
    assert [len(one.digests) for one in got.interventions] == [1, 1, 2, 1, 1]
    post1 = types_pb2.Site(point=POST, layer=1)
    site = receipt_pb2.AppliedSite
    assert [list(one.sites) for one in got.interventions] == [
        [site(site=post1, row_count=4, dose=dose(0.5 * STREAM_NORM))],
        [site(site=post1)],
        [site(site=post1, row_count=2, dose=dose(PULLED))],
        [
            site(site=types_pb2.Site(point=PRE, layer=layer), row_count=4, dose=dose(PULLED))
            for layer in (0, 1)
        ],
        [site(site=post1, row_count=1, dose=dose(PULLED))],
    ]
    assert [list(one.rows) for one in got.interventions] == [
        [receipt_pb2.AppliedRows(positions=[Run(start=0, count=4)])],
        [],
        [receipt_pb2.AppliedRows(positions=[Run(start=0, count=2)])],
        [receipt_pb2.AppliedRows(positions=[Run(start=0, count=4)])],
        [receipt_pb2.AppliedRows(positions=[Run(start=3, count=1)])],
    ]


async def test_rows_of_token_ids_are_those_of_the_tokens_that_came(running) -> None:
    # The engine counts on: 10 11 12 | 13 14 15 16 17 18.
    steer = [
        norm_add(where=selector(token_range(11, 14, 15, 18))),
        norm_add(where=selector(GENERATED, exclude=[token_range(14, 17)])),
    ]
    got = await receipt(running, steer=steer, sampling=Sampling(max_tokens=6))
    rows = [list(one.rows[0].positions) for one in got.interventions]
    assert rows == [
        [Run(start=1, count=1), Run(start=4, count=2)],
        [Run(start=3, count=1), Run(start=5, count=2)],
    ]
    assert [one.sites[0].row_count for one in got.interventions] == [3, 3]


async def test_cached_positions_are_told_apart_from_computed_ones(starter) -> None:
    running = await starter(ScriptedBackend(cached=2))
    got = await receipt(running, steer=[add(), add(where=selector(window(0, 1)))])
    everywhere, first = got.interventions
    assert list(everywhere.rows) == [
        receipt_pb2.AppliedRows(
            positions=[Run(start=2, count=2)], cached_positions=[Run(start=0, count=2)]
        )
    ]
    assert everywhere.sites[0].row_count == 2
    assert list(first.rows) == [receipt_pb2.AppliedRows(cached_positions=[Run(start=0, count=1)])]
    assert list(first.sites) == [receipt_pb2.AppliedSite(site=types_pb2.Site(point=POST, layer=1))]


async def test_rows_that_were_not_measured_are_counted_without_a_dose(starter) -> None:
    running = await starter(ScriptedBackend(measured=False))
    zero_at_2 = tensor(np.concatenate([FIRST, 0 * FIRST]))
    steer = [scaled(2.0), add(zero_at_2, sites=site_set(POST, layers=[1, 2]))]
    got = await receipt(running, steer=steer)
    site = receipt_pb2.AppliedSite
    assert [list(one.sites) for one in got.interventions] == [
        [site(site=types_pb2.Site(point=POST, layer=1), row_count=4)],
        [
            site(site=types_pb2.Site(point=POST, layer=1), row_count=4),
            site(site=types_pb2.Site(point=POST, layer=2)),
        ],
    ]


async def test_rows_beyond_the_last_token_are_not_counted(starter) -> None:
    # The engine goes on to compute the rows of 14 and 15 at positions 4 and 5.
    running = await starter(ScriptedBackend(overrun=2))
    steer = [norm_add(), norm_add(where=selector(token_range(13, 14)))]
    got = await receipt(running, steer=steer)
    assert [one.sites[0].row_count for one in got.interventions] == [4, 1]
    assert [one.sites[0].dose for one in got.interventions] == [dose(STREAM_NORM)] * 2


async def test_rows_of_tokens_that_never_came_are_not_counted(starter) -> None:
    # The engine goes on to compute the rows of 14 to 17 at positions 4 to 7. Only 13 and 14 come.
    steer = [
        norm_add(where=selector(token_range(13, 15, 17))),
        norm_add(where=selector(token_range(14, 15, 16))),
        norm_add(where=selector(GENERATED, exclude=[token_range(14, 16)])),
    ]
    got = await receipt(await starter(ScriptedBackend(overrun=4)), steer=steer)
    assert [one.sites[0].row_count for one in got.interventions] == [1, 0, 1]
    got = await receipt(await starter(ScriptedBackend(overrun=4, recomputed=1)), steer=steer)
    counts = [one.sites[0].row_count for one in got.interventions]
    assert counts == [3, 2, 3], "which of these rows were computed twice is not known"


async def test_captures_by_token_id_bring_the_rows_of_these_tokens(running) -> None:
    specs = [
        capture(where=selector(token_range(11, 13, 16))),
        capture(where=selector(GENERATED, exclude=[token_range(14)])),
    ]
    events = await running.client.generate(request(captures=specs, sampling=Sampling(max_tokens=5)))
    assert sorted((key[0], key[-1]) for key in captured(events)) == [
        (0, 1),
        (0, 3),
        (0, 6),
        (1, 3),
        (1, 5),
        (1, 6),
    ]
    got = events[-1].receipt
    assert [[site.row_count for site in one.sites] for one in got.captures] == [[3], [3]]


async def test_a_lost_row_of_a_token_that_nobody_selected_is_no_loss(starter) -> None:
    running = await starter(ScriptedBackend(lost_positions=frozenset({4})))
    spec = capture(where=selector(token_range(13)))
    got = await receipt(running, captures=[spec], sampling=Sampling(max_tokens=4))
    assert got.captures[0].sites[0].row_count == 1


AT = Site(Point.RESID_POST, 1).index
"""The site of `add` and its like."""


def test_steering_that_was_changed_is_told_by_update() -> None:
    before = admitted(request(steer=[add(), norm_add()], sampling=Sampling(max_tokens=8)))
    after = admitted(request(steer=[scaled(1.0), scaled(2.0)])).interventions
    after = tuple(
        type(one)(receipt_pb2.ORIGIN_UPDATE, one.index, one.op, one.selection, update_id=7)
        for one in after
    )
    sequence = EngineSequence(
        Job(before.plan, before.prompt.token_ids, before.sampling, 0), SequenceKind.OWN, 0
    )
    sequence.steering_changes.append(SteeringChange(7, 5, after, 0))
    sample = Sample(before, sequence, 0.0, ByteCounter())
    sample.tokens = [13, 14, 15, 16]
    sample.released = Released(
        request_id="r",
        doses=(Dose(0, AT, 5, 10, 2.5, 0.5), Dose(1, AT, 5, 5, 5, 1), Dose(2, AT, 1, 3, 1, 1)),
        measured=True,
        captured={},
        lost_rows=0,
        preemptions=0,
        computed=(1, 6),
    )
    got = write_receipt(before, [sample], {}, {})
    ref = receipt_pb2.InterventionRef
    assert [one.intervention for one in got.interventions] == [
        ref(origin=receipt_pb2.ORIGIN_REQUEST, index=0, op=receipt_pb2.OP_ADD),
        ref(origin=receipt_pb2.ORIGIN_REQUEST, index=1, op=receipt_pb2.OP_NORM_ADD),
        ref(origin=receipt_pb2.ORIGIN_UPDATE, index=0, op=receipt_pb2.OP_SCALE, update_id=7),
        ref(origin=receipt_pb2.ORIGIN_UPDATE, index=1, op=receipt_pb2.OP_SCALE, update_id=7),
    ]
    assert [one.sites[0].row_count for one in got.interventions] == [5, 5, 0, 1]
    assert [one.sites[0].dose.norm for one in got.interventions] == [2, 1, 0, 3]
    runs = [Run(start=1, count=4)]
    cached = [Run(start=0, count=1)]
    rows = receipt_pb2.AppliedRows
    assert [list(one.rows) for one in got.interventions] == [
        [rows(positions=runs, cached_positions=cached)],
        [rows(positions=runs, cached_positions=cached)],
        [],
        [rows(positions=[Run(start=5, count=1)])],
    ]


def test_rows_beyond_the_end_are_counted_by_their_gains_though_tokens_still_waited() -> None:
    asked = admitted(request(steer=[add()], sampling=Sampling(max_tokens=40)))
    sequence = EngineSequence(
        Job(asked.plan, asked.prompt.token_ids, asked.sampling, 0), SequenceKind.OWN, 0
    )
    sample = Sample(asked, sequence, 0.0, ByteCounter())
    sample.tokens = [13, 14]
    end = 4
    waiting = 16  # the server ended the sample while as many tokens waited for later ones
    source = asked.interventions[0].source
    sequence.note_gains(SampleGains(end, source, (0.0,)))
    for position in range(end + 1, end + 1 + waiting):
        sequence.note_gains(SampleGains(position, source, (2.0,)))
    sample.released = Released(
        request_id="r",
        doses=(Dose(0, AT, end + waiting, 10, 2.5, 0.5),),
        measured=True,
        captured={},
        lost_rows=0,
        preemptions=0,
        computed=(0, end + 1 + waiting),
    )
    got = write_receipt(asked, [sample], {}, {})
    assert got.interventions[0].sites[0].row_count == end


def test_doses_that_are_no_numbers_are_the_largest_number_at_few_and_at_many_sites() -> None:
    model = replace(SITES, num_layers=12)
    dose = (4, np.nan, np.inf, np.nan)
    for layers in (range(2), range(12)):
        sites = site_set(POST, layers=layers)
        asked = admitted(request(steer=[scaled(2.0, sites=sites)]), admission_context(model))
        sequence = EngineSequence(
            Job(asked.plan, asked.prompt.token_ids, asked.sampling, 0), SequenceKind.OWN, 0
        )
        sample = Sample(asked, sequence, 0.0, ByteCounter())
        sample.tokens = [13, 14]
        sample.released = Released(
            request_id="r",
            doses=tuple(Dose(0, Site(Point.RESID_POST, layer).index, *dose) for layer in layers),
            measured=True,
            captured={},
            lost_rows=0,
            preemptions=0,
            computed=(0, 4),
        )
        got = write_receipt(asked, [sample], {}, {})
        most = float(np.finfo(np.float32).max)
        assert [one.dose for one in got.interventions[0].sites] == [
            receipt_pb2.Dose(norm=most, relative_mean=most, relative_max=most)
        ] * len(layers)
