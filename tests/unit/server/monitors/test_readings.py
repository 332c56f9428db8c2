"""What watches read in requests with other prompts than the one by which they were checked."""

from rheostat_wire.v1 import gate_pb2, generation_pb2, types_pb2

from ..conftest import Running
from ..messages import probe, request, site_set
from ..watchers import Watcher, opening

SAMPLING = generation_pb2.Sampling(max_tokens=4)
WIDE = site_set(types_pb2.POINT_RESID_POST, layers=[0, 1])


async def test_a_watch_reads_the_mean_of_each_prompt(running: Running) -> None:
    mean = probe("m", rows=gate_pb2.PROBE_ROWS_PROMPT_MEAN)
    watcher = await Watcher.open(running, opening(mean))
    mine = probe("mine", sites=WIDE, rows=gate_pb2.PROBE_ROWS_PROMPT_MEAN)
    mine.signals = True
    await running.client.generate(request(sampling=SAMPLING, probes=[mine]))
    acts = running.backend.jobs[-1].plan.acts
    assert [(act.reading.mean_at, act.spans) for act in acts] == [(2, ((0, 3),))] * 2
    await watcher.rest()
