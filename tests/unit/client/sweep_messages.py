"""Messages of a sweep of 2 layers and 3 columns, for a scripted server."""

from rheostat_wire.v1 import generation_service_pb2, sweep_pb2, sweep_service_pb2, types_pb2

POST = types_pb2.POINT_RESID_POST


def cell(index: int, *values: float, **fields: object) -> sweep_service_pb2.SweepResponse:
    row, column = divmod(index, 3)
    message = sweep_pb2.SweepCell(index=index, row=row, column=column, values=values, **fields)
    message.standard_errors.extend(0.5 for _ in values)
    return sweep_service_pb2.SweepResponse(cell=message)


def started(cells: int = 6, columns=("0", "1", "2")) -> sweep_service_pb2.SweepResponse:
    pair = sweep_pb2.ResolvedPair(
        clean_token_ids=types_pb2.TokenIds(ids=[1, 2, 3]),
        corrupt_token_ids=types_pb2.TokenIds(ids=[1, 9, 3]),
    )
    return sweep_service_pb2.SweepResponse(
        started=sweep_pb2.SweepStarted(
            cell_count=cells,
            rows=[types_pb2.Site(point=POST, layer=layer) for layer in range(2)],
            columns=columns,
            pairs=[pair],
        )
    )


def summary(grades: int = 1) -> sweep_service_pb2.SweepResponse:
    noise = sweep_pb2.Noise(mean=-2.0, std=0.1, max=0.2, sample_count=8)
    each = sweep_pb2.SweepGrade(clean=-1.0, corrupt=-2.0, noise=noise)
    return sweep_service_pb2.SweepResponse(
        summary=sweep_pb2.SweepSummary(grades=[each] * grades, computed_token_count=99)
    )


def texts(request: generation_service_pb2.TokenizeRequest, _: object) -> object:
    ids = list(request.token_ids.ids) or [ord(c) for c in request.text]
    return generation_service_pb2.TokenizeResponse(
        token_ids=types_pb2.TokenIds(ids=ids),
        text="abc",
        starts=range(len(ids)),
        ends=range(1, len(ids) + 1),
    )
