"""Where a sweep's rows come from, and what a cell can be too much for."""

from rheostat_wire.v1 import replace_pb2, steering_pb2

from ..fakes import LAYERS, sites_with
from ..messages import selector, site_set, window
from ..streams import settled
from .patched import POST, Code, PatchedBackend, order, swept


def zeros(count: int, layer: int) -> steering_pb2.Steering:
    """The last token's row of a layer becomes zeros, again and again."""
    one = steering_pb2.Intervention(
        sites=site_set(POST, layers=[layer]),
        where=selector(window(-1)),
        replace=replace_pb2.Replace(zeros=replace_pb2.ZeroSource()),
    )
    return steering_pb2.Steering(interventions=[one] * count)


async def test_a_cell_that_its_steering_leaves_no_room_for_fails_alone(starter) -> None:
    backend = PatchedBackend()
    backend.sites = sites_with(steps=500)
    running = await starter(backend)
    cells, summary = await swept(running, order(steering=zeros(64, 1)))
    failed = {index for index, cell in cells.items() if cell.HasField("error")}
    assert failed == {1 * 4 + 3}
    (error,) = (cells[index].error for index in failed)
    assert error.code == Code.INVALID_ARGUMENT.value[0]
    assert "65 steps meet at one site" in error.message
    assert len(cells) == LAYERS * 4
    assert [(one.start, one.count) for one in summary.missing] == [(7, 1)]
    await settled(running)
