"""Hostile calls of causal tracing and gates: sweeps, lenses, stored runs. See `scenarios`."""

import random
from collections.abc import Iterator

from rheostat_bench.abuse import (
    GENERATE,
    MIB,
    POINTS,
    Target,
    add,
    count,
    every_other,
    prompt,
    sampling,
    sites,
)
from rheostat_bench.calls import Call
from rheostat_wire.v1 import (
    gate_pb2,
    generation_service_pb2,
    lens_service_pb2,
    replace_pb2,
    run_service_pb2,
    selector_pb2,
    steering_pb2,
    sweep_pb2,
    sweep_service_pb2,
    tensor_pb2,
    types_pb2,
    vector_pb2,
)

SWEEP = "SweepService/Sweep"
LENS = "LensService/Lens"
ATTRIBUTE = "LensService/Attribute"
CAPTURE_RUN = "RunService/CaptureRun"
PUT_RUN = "RunService/PutRun"
DELETE_RUN = "RunService/DeleteRun"
READ_RUN = "RunService/ReadRun"

_PAIRS = 256
_SWEEP_TOKENS = 1 << 20
_SWEEP_ROWS = 32_768
_SWEEP_REQUESTS = 1 << 22
_SWEEP_CELLS = 65_536
_TOP_K = 100
_LENS_TOKENS = 64
_GATES = 32
_CONDITIONS = 16
_PROBES = 64
_WINDOWS_OF_PROBE = 60
"""Windows of each of `_PROBES` selectors, below the contract's limit for all of a request."""
_BLOCK_SITES = (
    types_pb2.POINT_RESID_PRE,
    types_pb2.POINT_ATTN_OUT,
    types_pb2.POINT_RESID_MID,
    types_pb2.POINT_MLP_OUT,
)
"""Sites of a layer that have one name each."""
_RUN_BYTES = 48 * MIB
"""Bytes of the largest run, which a server with the flags of the benchmarks can store."""
_PIECE_BYTES = 8 * MIB
_RUNS = 8
"""Runs that calls of `torn_run` share."""


def background_sweep(target: Target, rng: random.Random, size: float) -> Call:
    """A sweep with as many pairs and cells as there can be, which gives way to requests."""
    return _sweep(target, rng, size, sweep_pb2.SWEEP_PRIORITY_BACKGROUND)


def hasty_sweep(target: Target, rng: random.Random, size: float) -> Call:
    """Such a sweep whose cells are requests like others, as many at once as there can be."""
    return _sweep(target, rng, size, sweep_pb2.SWEEP_PRIORITY_NORMAL)


def _sweep(
    target: Target, rng: random.Random, size: float, priority: sweep_pb2.SweepPriority.ValueType
) -> Call:
    """A sweep whose cells are read for a moment, or not at all, or that is cancelled at once."""
    pairs = count(size, _PAIRS)
    length = count(size * rng.choice([1.0, 0.1]), min(target.context - 8, 2000), 4)
    length = max(4, min(length, _SWEEP_TOKENS // (2 * pairs)))
    columns = max(1, min(length, _SWEEP_REQUESTS // (2 * target.layers * pairs)))
    columns = min(columns, _SWEEP_CELLS // target.layers)
    request = sweep_service_pb2.SweepRequest(
        sites=sites(types_pb2.POINT_RESID_POST),
        where=selector_pb2.Selector(
            include=[selector_pb2.Range(positions=selector_pb2.Window(start=0, end=columns))]
        ),
        grades=[
            sweep_pb2.Grade(token=sweep_pb2.TokenGrade(metric=metric))
            for metric in (sweep_pb2.METRIC_LOGPROB, sweep_pb2.METRIC_RANK)
        ],
        priority=priority,
        pair_values=True,
    )
    if priority == sweep_pb2.SWEEP_PRIORITY_NORMAL:
        request.max_concurrent_cells = 64
    kind = rng.choice(["corrupt", "noise", "zeros"])
    if kind == "zeros":
        request.direction = sweep_pb2.SWEEP_DIRECTION_NOISE
    for _ in range(pairs):
        pair = request.pairs.add()
        pair.prompt.token_ids.CopyFrom(prompt(rng, target, length))
        pair.answer.alternatives.add(ids=[rng.randrange(5, target.vocabulary)])
        if kind == "corrupt":
            pair.corrupt.token_ids.CopyFrom(prompt(rng, target, length))
        elif kind == "noise":
            pair.noise.noise.embedding_std = 3.0
            pair.noise.sites.CopyFrom(sites(types_pb2.POINT_RESID_PRE, layers=[0]))
            most = max(1, _SWEEP_ROWS // (2 * pairs))
            pair.noise.where.include.add().positions.end = min(columns, most)
            pair.noise.noise_count = 2
        else:
            pair.zeros.SetInParent()
    reads, holds = rng.choice([(0, 0.05), (1, 4.0 * size), (count(size, 200, 2), 0.0)])
    if priority == sweep_pb2.SWEEP_PRIORITY_BACKGROUND and not holds:
        # Its cells may wait for minutes, because others always generate.
        reads, holds = 1, 2.0
    return Call(SWEEP, (request.SerializeToString(),), reads=reads, holds=holds)


def lens(target: Target, rng: random.Random, size: float) -> Call:
    """A lens of a long prompt at all layers with all that can be read of a row, often unread."""
    length = count(size * rng.choice([1.0, 0.1]), min(target.context - 8, 6000), 4)
    ids = prompt(rng, target, length)
    if rng.random() < 0.2:
        taken = lens_service_pb2.AttributeRequest(
            prompt=types_pb2.Prompt(token_ids=ids),
            direction=vector_pb2.TokenDirection(token_id=5, minus_token_id=6),
        )
        return Call(ATTRIBUTE, (taken.SerializeToString(),))
    request = lens_service_pb2.LensRequest(
        prompt=types_pb2.Prompt(token_ids=ids),
        sites=sites(types_pb2.POINT_RESID_POST),
        where=selector_pb2.Selector(
            include=[selector_pb2.Range(positions=selector_pb2.Window(start=0, end=length))]
        ),
        top_k=min(_TOP_K, target.vocabulary),
        token_ids=rng.sample(range(target.vocabulary), min(_LENS_TOKENS, target.vocabulary)),
    )
    reads, holds = rng.choice([(None, 0.0), (0, 0.05), (1, 2.0 * size)])
    return Call(LENS, (request.SerializeToString(),), reads=reads, holds=holds)


def gates(target: Target, rng: random.Random, size: float) -> Call:
    """64 samples with 32 gates that 256 readings open, cancelled after a while."""
    windows = count(size * rng.choice([1.0, 0.1]), _WINDOWS_OF_PROBE)
    request = generation_service_pb2.GenerateRequest(
        token_ids=prompt(rng, target, count(size, 200, 8)),
        sampling=sampling(10 + 2 * windows, count(size, 64)),
    )
    layer = rng.randrange(target.layers - 1)
    probes = count(size, _PROBES, 4)
    for number in range(probes):
        vector = add(rng, target, None).add.vector
        request.probes.add(
            name=f"probe-{number}",
            sites=sites(*_BLOCK_SITES, layers=[layer]),
            read=vector_pb2.Readout(vector=vector),
            where=every_other(number % 7, windows),
        )
    wanted = list(range(probes))
    for number in range(max(count(size, _GATES), -(-probes // _CONDITIONS))):
        act = add(rng, target, None)
        act.sites.CopyFrom(sites(types_pb2.POINT_RESID_POST, layers=[target.layers - 1]))
        for place in range(_CONDITIONS):
            probe = wanted[(number * _CONDITIONS + place) % probes]
            act.gate.conditions.add(
                probe_name=f"probe-{probe}",
                pool=rng.choice([gate_pb2.POOL_LAST, gate_pb2.POOL_MEAN, gate_pb2.POOL_MAX]),
                combine_sites=rng.choice([gate_pb2.COMBINE_ANY, gate_pb2.COMBINE_VOTE]),
                above=rng.gauss(0.0, 0.1),
                for_tokens=rng.choice([1, 3]),
            )
        act.gate.combine = gate_pb2.COMBINE_VOTE
        act.gate.sigmoid.sharpness = 4.0
        act.gate.hold.tokens = rng.choice([1, 1 << 20])
        request.steering.interventions.append(act)
    return Call(GENERATE, (request.SerializeToString(),), reads=2, holds=1.0 * size)


def _run_header(target: Target, rng: random.Random, size: float) -> run_service_pb2.RunHeader:
    most = min(target.context - 8, _RUN_BYTES // (8 * target.width * target.layers))
    positions = count(size, most, 2)
    run = run_service_pb2.RunHeader(
        run_id=f"put-{rng.getrandbits(64)}",
        sites=[
            types_pb2.Site(point=point, layer=layer)
            for layer in range(target.layers)
            for point in (types_pb2.POINT_RESID_POST, types_pb2.POINT_ATTN_OUT)
        ],
        positions=[types_pb2.PositionRun(start=0, count=positions)],
        prompt_token_ids=prompt(rng, target, positions),
        dtype=tensor_pb2.DTYPE_FLOAT32,
    )
    run.lease.FromSeconds(1)
    return run


def idle_run(target: Target, rng: random.Random, size: float) -> Call:
    """The upload of a run of the largest size, which stops after a piece, or before the first."""
    header = _run_header(target, rng, size)
    messages = [run_service_pb2.PutRunRequest(header=header)]
    if rng.random() < 0.5:
        messages.append(next(_pieces(target, rng, header, 1)))
    sent = tuple(message.SerializeToString() for message in messages)
    return Call(PUT_RUN, sent, reads=0, holds=4.0 * size, half_closes=False)


def large_run(target: Target, rng: random.Random, size: float) -> Call:
    """A whole upload of a run: in large pieces or very small ones, or with a piece too many."""
    header = _run_header(target, rng, size)
    row = 4 * target.width * len(header.sites)
    at_once = rng.choice([max(1, _PIECE_BYTES // row), 8])
    messages = [run_service_pb2.PutRunRequest(header=header)]
    messages += _pieces(target, rng, header, at_once)
    if rng.random() < 0.2:
        messages.append(messages[-1])
    return Call(PUT_RUN, tuple(message.SerializeToString() for message in messages))


def _pieces(
    target: Target, rng: random.Random, header: run_service_pb2.RunHeader, at_once: int
) -> Iterator[run_service_pb2.PutRunRequest]:
    """All rows of a run, so many positions at a time."""
    (positions,) = header.positions
    for start in range(0, positions.count, at_once):
        number = min(at_once, positions.count - start)
        row = rng.randbytes(2) + b"\x00\x2f" + bytes(4 * target.width - 4)
        rows = run_service_pb2.RunRows(
            sites=header.sites,
            positions=[types_pb2.PositionRun(start=start, count=number)],
            tensor=tensor_pb2.Tensor(
                dtype=tensor_pb2.DTYPE_FLOAT32,
                shape=[len(header.sites), number, target.width],
                encoding=tensor_pb2.ENCODING_RAW,
                inline=row * (len(header.sites) * number),
            ),
        )
        yield run_service_pb2.PutRunRequest(rows=rows)


def torn_run(target: Target, rng: random.Random, size: float) -> Call:
    """A run that is stored, read, put into requests and sweeps, and deleted meanwhile."""
    run_id = f"torn-{rng.randrange(_RUNS)}"
    length = count(size, min(target.context - 8, 400), 4)
    which = rng.choice(["store", "store", "delete", "delete", "read", "sweep", *["replace"] * 4])
    # All runs have the same prompt, so that the rows of each fit all others.
    ids = prompt(random.Random(length), target, length)
    if which == "store":
        stored = run_service_pb2.CaptureRunRequest(
            run_id=run_id, prompt=types_pb2.Prompt(token_ids=ids), sites=sites(*POINTS[:3])
        )
        stored.lease.FromSeconds(1)
        return Call(CAPTURE_RUN, (stored.SerializeToString(),))
    if which == "delete":
        deleted = run_service_pb2.DeleteRunRequest(run_id=run_id)
        return Call(DELETE_RUN, (deleted.SerializeToString(),))
    if which == "read":
        read = run_service_pb2.ReadRunRequest(run_id=run_id)
        return Call(READ_RUN, (read.SerializeToString(),), reads=1, holds=2.0 * size)
    if which == "sweep":
        grid = sweep_service_pb2.SweepRequest(
            sites=sites(types_pb2.POINT_RESID_POST),
            grades=[sweep_pb2.Grade(token=sweep_pb2.TokenGrade(metric=sweep_pb2.METRIC_LOGPROB))],
        )
        pair = grid.pairs.add(run_id=run_id)
        pair.prompt.token_ids.CopyFrom(ids)
        pair.answer.alternatives.add(ids=[5])
        return Call(SWEEP, (grid.SerializeToString(),), reads=count(size, 100, 2))
    request = generation_service_pb2.GenerateRequest(
        token_ids=ids, sampling=sampling(rng.randrange(2, 16), count(size, 16))
    )
    most = max(1, min(length, 16_000 // target.layers))
    op = replace_pb2.Replace(run=replace_pb2.RunSource(run_id=run_id))
    request.steering.interventions.append(
        steering_pb2.Intervention(
            sites=sites(types_pb2.POINT_RESID_POST),
            where=selector_pb2.Selector(
                include=[selector_pb2.Range(positions=selector_pb2.Window(start=0, end=most))]
            ),
            replace=op,
        )
    )
    return Call(GENERATE, (request.SerializeToString(),))
