"""What watches read in requests with other prompts than the one by which they were checked."""

from rheostat_wire.v1 import gate_pb2, generation_pb2, types_pb2

from ..conftest import Running, Starter
from ..fakes import ScriptedBackend, sites_with
from ..messages import probe, request, site_set
from ..uploads import refusal_of
from ..watchers import Request, Watcher, opening

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


async def test_a_watch_takes_no_sums_of_rows_that_other_requests_need(starter: Starter) -> None:
    # The scripted engine runs 4 samples.
    running = await starter(ScriptedBackend(sites=sites_with(row_sums=7)))
    two = probe("m", sites=WIDE, rows=gate_pb2.PROBE_ROWS_PROMPT_MEAN)
    call = running.client.monitor.Watch()
    await call.write(Request(open=opening(two)))
    refusal = await refusal_of(call.read())
    assert (refusal.reason, refusal.field) == ("REASON_BANK_FULL", "open.probes")
    assert "reads 2 numbers of mean rows; at most 1" in refusal.message
    watcher = await Watcher.open(running, opening(probe("m", rows=two.rows)))
    await running.client.generate(request(sampling=SAMPLING))
    assert (await watcher.until("ended")).ended.position_count
    await watcher.rest()
