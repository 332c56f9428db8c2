"""The asyncio client: the methods of `rheostat.connect`, awaited. `_client.calls` builds the calls.

A client belongs to the event loop in which it makes its first call. ``tools/generate`` writes the
synchronous client, ``_client/engine.py``, from this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal, Never, Self, Unpack

from rheostat._arrays import Element
from rheostat._capture.activations import Activations
from rheostat._capture.artifacts import Artifact, SinkInfo
from rheostat._client import calls, lens_calls, run_calls
from rheostat._client.aio_conditions import Conditions
from rheostat._client.aio_steering import Steering
from rheostat._client.aio_streams import Session, Stream, list_all, run_download
from rheostat._client.aio_vectors import Vectors
from rheostat._client.requests import GenerateOptions, check_options, generate_request
from rheostat._client.run_calls import CapturedRun, ExactEncoding, RowsBySite
from rheostat._connection import readiness
from rheostat._connection.aio_connection import Connection, sleep
from rheostat._connection.channel import UNARY_TIMEOUT, default_target
from rheostat._errors import DeadlineExceeded, Refused, RheostatError, Unavailable
from rheostat._fields import checks_arguments
from rheostat._points import LayersLike, PointsLike
from rheostat._prompts import Prompt
from rheostat._responses.explanations import Explanation, Tokenized
from rheostat._responses.lens import Attribution, LensResult
from rheostat._responses.model import ModelInfo, Stats
from rheostat._responses.results import Generation
from rheostat._runs import RunInfo
from rheostat._selectors import SelectorLike
from rheostat._steering.steering import SteeringLike
from rheostat._subscriptions import requests as subscribe_requests
from rheostat._subscriptions.aio_subscription import Subscription
from rheostat._subscriptions.events import Cursor
from rheostat._subscriptions.requests import ResumeOptions, SubscribeOptions
from rheostat._sweeps.accumulator import OnCell, SweepAccumulator
from rheostat._sweeps.checkpoint import Checkpoint
from rheostat._sweeps.grades import GradeLike, named_grades
from rheostat._sweeps.pairs import Pair, answer_texts, checked_pairs
from rheostat._sweeps.paths import PASS_LEASE, Branches, PathOptions, PathPatch, Paths
from rheostat._sweeps.progress import ProgressLike, progress_of
from rheostat._sweeps.requests import SweepOptions, sweep_request
from rheostat._sweeps.result import SweepResult
from rheostat._sweeps.watching import WatchLike, watcher_of
from rheostat._watches import requests as watch_requests
from rheostat._watches.aio_watch import Watch
from rheostat._watches.requests import WatchOptions

__all__ = ["Engine", "Session", "Steering", "Stream", "Subscription", "Vectors", "Watch", "connect"]

RESUMPTIONS = 3
"""Attempts in a row to resume a broken sweep without getting a further cell."""

RESUME_AFTER = 1.0
"""Seconds before such an attempt."""

_NAME = "aio.Engine"


class Engine:
    """A connection to a Rheostat server. All its errors are `RheostatError`.

    Use it as a context manager or close it. It connects with the first call.
    """

    vectors: Vectors
    conditions: Conditions
    steering: Steering

    def __init__(self, target: str, *, timeout: float | None = UNARY_TIMEOUT) -> None:
        self._connection = Connection(target, timeout)
        self.vectors = Vectors(self._connection)
        self.conditions = Conditions(self._connection)
        self.steering = Steering(self._connection)

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Run a request to its end. ``options`` are those of `GenerateOptions`.

        The server chooses options that you omit. By default it samples at temperature 1 until an
        end token or the end of the context, so give ``max_tokens``, and ``temperature=0`` for
        greedy decoding. ``timeout`` is in seconds; None waits without limit.
        """
        check_options("generate", options)
        async with self.stream(prompt, timeout=timeout, **options) as stream:
            return await stream.result()

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Run a request and read its events as they come. Options as for `generate`."""
        check_options("stream", options)
        call = calls.generate(prompt, **options)
        responses = self._connection.download(call, timeout)
        return Stream(responses, call.accumulator())

    def session(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Session:
        """Run a request whose steering can change while it runs. Options as for `generate`."""
        check_options("session", options)
        return Session(self._connection, generate_request(prompt, **options), timeout)

    def subscribe(self, *by_position: Never, **options: Unpack[SubscribeOptions]) -> Subscription:
        """Subscribe to captured rows of other clients' requests, or of other calls of this client.

        ``options`` are those of `SubscribeOptions`. Requests that begin later are captured from
        their first token, running requests from their next step. A request that has ended is not
        captured; a subscription to its id waits for a new request of that id.

        The returned subscription is open. In `rheostat.aio` it opens when it is entered with
        ``async with``, and the event loop must run when the method is called.
        """
        check_options("subscribe", options, SubscribeOptions, by_position=by_position)
        return Subscription(self._connection, subscribe_requests.opening(**options))

    def resume(self, cursor: Cursor, **options: Unpack[ResumeOptions]) -> Subscription:
        """Continue a subscription that its client left, or whose client ended.

        Iterating continues with the event after ``cursor``. Raises NotFound if the server has ended
        the subscription, and OutOfRange if that event was acknowledged before;
        ``metadata["oldest"]`` is then the number of the first event that can still be read.
        """
        check_options("resume", options, ResumeOptions)
        return Subscription(self._connection, subscribe_requests.resuming(cursor, **options))

    def watch(self, *by_position: Never, **options: Unpack[WatchOptions]) -> Watch:
        """Read other clients' requests with probes while they run, and stop or steer them.

        ``options`` are those of `WatchOptions`. Requests that are admitted later are read from
        their first token; running requests are not read (`Watch.missed`). Their clients get the
        same answers as without the watch, unless it stops or steers them.

        The returned watch is open. In `rheostat.aio` it opens when it is entered with ``async
        with``, and the event loop must run when the method is called.
        """
        check_options("watch", options, WatchOptions, by_position=by_position)
        return Watch(self._connection, watch_requests.opening(**options))

    async def explain(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Explanation:
        """What `generate` would do: sites, positions and doses. The model does not run."""
        check_options("explain", options)
        return await self._connection.unary(calls.explain(prompt, **options), timeout)

    @checks_arguments
    async def lens(
        self,
        prompt: Prompt | None = None,
        *,
        run: str | RunInfo | None = None,
        points: PointsLike | None = None,
        layers: LayersLike = "all",
        where: SelectorLike = None,
        positions: int | Iterable[int] | None = None,
        top_k: int | None = None,
        tokens: Sequence[int] = (),
        steering: SteeringLike = None,
        lora: str | None = None,
        timeout: float | None = None,
    ) -> LensResult:
        """The logit lens: next-token predictions from rows of a prompt, or of a stored run.

        The model's final norm and unembedding are applied to the rows at the points (default:
        ``resid_post``) and layers, on the tokens ``where`` (default: the last prompt token). With a
        ``run`` its stored rows are used, by default all of them; ``positions`` are as in
        `read_run`. The result has the ``top_k`` most likely tokens of each row (default: 5), and
        log-probabilities and ranks of up to 64 ``tokens``. At ``resid_post`` of the last layer they
        are the model's own. ``steering`` and ``lora`` act while the prompt runs; the unembedding is
        the base model's. ``timeout`` is in seconds; None waits without limit.
        """
        call = lens_calls.lens(
            prompt,
            run=run,
            points=points,
            layers=layers,
            where=where,
            positions=positions,
            top_k=top_k,
            tokens=tokens,
            steering=steering,
            lora=lora,
        )
        return await run_download(self._connection, call, timeout)

    async def attribute(
        self,
        prompt: Prompt,
        token: int,
        *,
        minus: int | None = None,
        steering: SteeringLike = None,
        lora: str | None = None,
        timeout: float | None = None,
    ) -> Attribution:
        """Direct logit attribution: what each part of the model adds to the next token's logit.

        The logit of ``token`` after the prompt, minus that of ``minus`` if given, is written as the
        sum of what the embedding, every ``attn_out`` and every ``mlp_out`` add to it in one forward
        pass. The final norm's scale is that of this pass. Raises Refused for a model whose logits
        are not linear in its final row, for instance because it caps them.
        """
        call = lens_calls.attribute(prompt, token, minus=minus, steering=steering, lora=lora)
        return await self._connection.unary(call, timeout)

    async def sweep(
        self,
        pairs: Pair | Sequence[Pair],
        *by_position: Never,
        points: PointsLike = "resid_post",
        layers: LayersLike = "all",
        grades: GradeLike | Iterable[GradeLike] | None = None,
        progress: ProgressLike = None,
        on_cell: OnCell | None = None,
        watch: WatchLike = None,
        checkpoint: str | Path | None = None,
        timeout: float | None = None,
        **options: Unpack[SweepOptions],
    ) -> SweepResult:
        """Activation patching over a grid: a row for each site, a column for each position.

        In each cell, rows of one prompt of a pair replace those of the other at the row's site and
        the column's positions. The ``grades`` measure the effect on the next token: "logprob" of
        the answer, its "probability" or "rank", the "logit_difference" to the foil, or "kl", the
        divergence from the clean prompt's distribution in nats. "recovered logprob" and so on are
        relative: 0 is the corrupt prompt's value, 1 the clean prompt's. A `ProbeGrade` measures the
        effect on a probe. Grades are averaged over the pairs. Default: "logit_difference" if the
        pairs have a foil, else "logprob". ``options`` are those of `SweepOptions`.

        ``progress`` is called with the number of cells that are done, and of all cells; by default,
        a terminal and a notebook show a progress bar, unless ``progress=False``. ``on_cell`` is
        called with each `Cell` as it comes. ``watch`` is called a few times a second with a
        `SweepResult` of the cells so far, and at the end with the complete result; by default, a
        notebook draws it as a heatmap, unless ``watch=False``. A call that breaks is repeated for
        the missing cells.

        ``checkpoint`` is a file to which each cell is added as it comes. If the file exists, only
        the cells that it lacks are run, so a program that was killed goes on when it is started
        again. ``zoom``, ``baselines``, ``concurrency``, ``priority`` and ``keep_runs`` may differ
        from those of the earlier call.

        Raises InvalidRequest for malformed pairs, and for a checkpoint of another sweep or model;
        OSError if the checkpoint can't be read or written; Refused with REASON_NO_CONTRAST if a
        recovered grade is not defined, because both prompts have the same. Method: Meng et al.,
        "Locating and Editing Factual Associations in GPT" (2022); Zhang and Nanda, "Towards Best
        Practices of Activation Patching" (2023).
        """
        chosen = checked_pairs(pairs)
        also = ("points", "layers", "grades")
        check_options("sweep", options, SweepOptions, by_position=by_position, also=also)
        named = named_grades(grades, chosen)
        tokens = {}
        for text in answer_texts(chosen):
            tokens[text] = (await self.tokenize(text, special_tokens=False)).token_ids
        request = sweep_request(
            chosen, tokens, points=points, layers=layers, grades=named, options=options
        )
        watcher = watcher_of(watch)
        with ExitStack() as stack:
            file = None
            if checkpoint is not None:
                model = await self.model()
                file = stack.enter_context(Checkpoint(checkpoint, request, model.name))
            found = SweepAccumulator(
                named,
                pair_values=request.pair_values,
                progress=stack.enter_context(progress_of(progress)),
                on_cell=on_cell,
                watcher=watcher,
                checkpoint=file,
            )
            failures = 0
            while True:
                found.leave_out(request)
                before = found.count
                try:
                    await run_download(self._connection, calls.sweep(request, found), timeout)
                    break
                except Unavailable:
                    failures = 1 if found.count > before else failures + 1
                    if failures > RESUMPTIONS:
                        raise
                await sleep(RESUME_AFTER)
        if not request.group_labels:
            with suppress(Refused):  # a server without a tokenizer
                pieces = (await self.tokenize(found.clean_token_ids)).pieces
                found.tokens = tuple(pieces[int(column)] for column in found.columns)
        result = found.result()
        if watcher is not None:
            watcher.show(result)
        return result

    async def path_patch(
        self,
        pair: Pair,
        sender: Branches,
        receiver: Branches | Literal["logits"] = "logits",
        **options: Unpack[PathOptions],
    ) -> PathPatch:
        """The effect of the paths from some branches to others, or directly to the logits.

        Branches are ("attn_out", layer) and ("mlp_out", layer), one or a list. One prompt of the
        pair runs with the senders' rows of the other, while the branches in between are frozen at
        its own rows. Without receivers, the logits of this run are read. Otherwise the receivers'
        outputs are put into a last run, which computes everything else. ``options`` are those of
        `PathOptions`.

        Raises InvalidRequest for heads, which are not served, and if no path leads to a receiver;
        Refused with REASON_RUN_INCOMPLETE if a position has no partner in the other prompt. Method:
        Wang et al., "Interpretability in the Wild" (2022); Goldowsky-Dill et al., "Localizing Model
        Behavior with Path Patching" (2023).
        """
        check_options("path_patch", options, PathOptions)
        paths = Paths(pair, sender, receiver, options)
        tokens = {}
        for text in answer_texts([pair]):
            tokens[text] = (await self.tokenize(text, special_tokens=False)).token_ids
        asked = paths.ask(tokens)
        count, lora = (await self.model()).layer_count, options.get("lora")
        where = await self.explain(paths.base, steering=paths.probe(), lora=lora, max_tokens=1)
        paths.resolve(where, count)
        runs: list[str] = []
        try:
            for prompt, sites, steering in paths.captures(runs):
                made = await self.capture_run(
                    prompt, *sites, steering=steering, lora=lora, lease=PASS_LEASE
                )
                runs.append(made.id)
            reads = [
                await self.lens(
                    prompt, layers=count - 1, top_k=0, tokens=asked, steering=steering, lora=lora
                )
                for prompt, steering in paths.reads(runs)
            ]
        finally:
            for run_id in runs:
                with suppress(RheostatError):
                    await self.delete_run(run_id)
        return paths.result(*reads)

    async def tokenize(self, prompt: Prompt, *, special_tokens: bool = True) -> Tokenized:
        """The tokens of a text or of messages, or the text of token ids.

        Without ``special_tokens`` a text is tokenised as the continuation of another.

        Raises InvalidRequest if the prompt is empty.
        """
        return await self._connection.unary(calls.tokenize(prompt, special_tokens=special_tokens))

    async def wait_until_ready(self, timeout: float | None = readiness.READY_TIMEOUT) -> None:
        """Wait until the server has loaded its model and its health is SERVING.

        Raises DeadlineExceeded after ``timeout`` seconds (None waits without limit), and
        Unavailable if no server answers for 10 seconds in a row.
        """
        wait = readiness.Wait(self._connection.target, timeout)
        while True:
            try:
                health = await self._connection.unary(calls.health(), wait.check_timeout())
            except (Unavailable, DeadlineExceeded) as error:
                wait.unanswered(error)
            else:
                if wait.ready(health):
                    return
            await sleep(readiness.POLL)

    async def model(self) -> ModelInfo:
        """The model, its sites, and the ops and captures that each site supports."""
        return await self._connection.unary(calls.model())

    async def sinks(self) -> list[SinkInfo]:
        """The server's sinks, by name."""
        return await list_all(self._connection, calls.sinks())

    async def artifacts(self, request_id: str, *, sink_name: str = "") -> list[Artifact]:
        """The files that the sinks, or one sink, wrote for a request. Raises NotFound if none."""
        return await list_all(self._connection, calls.artifacts(request_id, sink_name))

    async def runs(self) -> list[RunInfo]:
        """The runs that the server has stored, oldest first; `Capture(to=Run())` stores a run."""
        return await list_all(self._connection, run_calls.list_runs())

    async def run(self, run_id: str) -> RunInfo:
        """A stored run, without its rows. Raises NotFound if there is none."""
        return await self._connection.unary(run_calls.get_run(run_id))

    @checks_arguments
    async def capture_run(
        self,
        prompt: Prompt,
        points: PointsLike,
        layers: LayersLike = "all",
        *,
        where: SelectorLike = None,
        steering: SteeringLike = None,
        run_id: str | None = None,
        lease: float | None = None,
        lora: str | None = None,
        labels: Mapping[str, str] | None = None,
        dtype: Element | None = None,
        timeout: float | None = None,
    ) -> CapturedRun:
        """Run a prompt once and store its rows on the server, and return the run.

        The rows are those of every combination of points and layers, on the tokens ``where`` of the
        prompt (default: all), under ``steering`` (default: none but the server-wide). ``run_id`` is
        an id that no other run has; by default the server makes one. ``lease`` is in seconds, 1 to
        86400 (default: 3600), ``dtype`` the rows' type (default: the model's). ``timeout`` is in
        seconds; None is the limit of the connection.

        Raises AlreadyExists if the id is in use, ResourceExhausted with REASON_STORE_FULL if the
        rows do not fit, InvalidRequest if ``where`` selects no token of the prompt or generated
        tokens, NotFound for an unknown adapter.
        """
        call = run_calls.capture_run(
            prompt,
            points=points,
            layers=layers,
            where=where,
            steering=steering,
            run_id=run_id,
            lease=lease,
            lora=lora,
            labels=labels,
            dtype=dtype,
        )
        return await self._connection.unary(call, timeout)

    @checks_arguments
    async def read_run(
        self,
        run: str | RunInfo,
        points: PointsLike | None = None,
        layers: LayersLike = "all",
        *,
        positions: int | Iterable[int] | None = None,
        encoding: ExactEncoding = "raw",
        timeout: float | None = None,
    ) -> Activations:
        """The rows of a run, or of its id: ``rows["resid_post", 3]`` is float32 [positions, width].

        ``points`` and ``layers`` choose sites (default: all of the run's; "all" layers are those of
        the model), ``positions`` choose positions, negative ones from the end of the run's prompt.
        The numbers are exact; "lz4_planes" only compresses the transfer. While rows are sent, the
        run can't be deleted.

        Raises NotFound if there is no such run, Refused with REASON_RUN_INCOMPLETE if it lacks a
        site or a position, InvalidRequest for repeated positions.
        """
        call = run_calls.read_rows(
            run, points=points, layers=layers, positions=positions, encoding=encoding
        )
        return await run_download(self._connection, call, self._connection.limit(timeout))

    async def put_run(
        self,
        rows: RowsBySite,
        *,
        prompt_token_ids: Sequence[int],
        positions: Iterable[int] | None = None,
        token_ids: Iterable[int] | None = None,
        run_id: str | None = None,
        lease: float | None = None,
        labels: Mapping[str, str] | None = None,
        dtype: Element | None = None,
        timeout: float | None = None,
    ) -> RunInfo:
        """Store rows as a run, and return the run.

        ``rows`` maps (point, layer) to an array [positions, width], or is an `Activations`, for
        instance of `read_run`. All sites have the same positions: ``positions``, ascending; by
        default those of the activations, or 0, 1, 2, ... ``token_ids`` are the input tokens at
        them, required for positions behind the prompt. float32, float16 and bfloat16 are kept,
        other numbers are rounded to float32. ``dtype`` converts; ``dtype="bfloat16"`` reads uint16
        as bits. ``run_id`` and ``lease`` are those of `capture_run`.

        Raises InvalidRequest for rows of another shape, for elements that are not finite, for sites
        and layers that the model lacks or that come twice, and for positions and tokens that do not
        fit the prompt or the model; AlreadyExists if the id is in use; ResourceExhausted with
        REASON_STORE_FULL if the rows do not fit.
        """
        call = run_calls.put_run(
            rows,
            prompt_token_ids=prompt_token_ids,
            positions=positions,
            token_ids=token_ids,
            run_id=run_id,
            lease=lease,
            labels=labels,
            dtype=dtype,
        )
        return await self._connection.upload(call, timeout)

    async def delete_run(self, run_id: str) -> int:
        """Delete a run, even if leased; return its bytes. Raises Refused if it is in use."""
        return await self._connection.unary(run_calls.delete_run(run_id))

    async def renew_lease(self, run_id: str, seconds: float) -> RunInfo:
        """Keep a run for ``seconds`` from now, 1 to 86400. A lease never becomes shorter."""
        return await self._connection.unary(run_calls.renew_lease(run_id, seconds))

    async def stats(self) -> Stats:
        """The server's counters."""
        return await self._connection.unary(calls.stats())

    async def close(self) -> None:
        """End the connection and every call on it."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{_NAME}({self._connection.target!r})"


def connect(target: str | None = None, *, timeout: float | None = UNARY_TIMEOUT) -> Engine:
    """A client of the server at ``target``, "host:port". Raises InvalidRequest for another form.

    ``target`` defaults to the environment variable ``RHEOSTAT_TARGET``, then "localhost:50051".

    ``timeout``, in seconds, limits calls that run no prompt, for instance those that put and get
    vectors. None sets no limit. Calls that run prompts have their own ``timeout``.
    """
    return Engine(default_target() if target is None else target, timeout=timeout)
