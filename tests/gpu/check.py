"""Correctness on a real GPU: the V2 runner, torch.compile and full CUDA graphs.

    python tests/gpu/check.py --out check.json
    python tests/gpu/check.py --out check.json --only points fp8

Starts stock vLLM, ours, and ours eager on a small random model, on a real shape and on a small
mixture of experts. Checks that at most a quarter of the idle requests differs from stock vLLM, and
little (`starts.py`), that steering changes what it should, that an idle request in a mixed batch is
bit-identical to the idle run, that captured rows equal those of an eager run, and that captures may
join requests which run already. With two GPUs a model is split over them (`split.py`).

| part | engine starts | what |
|---|---|---|
| `kernels` | 0 | the compiled kernels against their plain twins, also of gates (`gates.py`), |
| | | and launches without Triton's JIT against launches by it (`launches.py`) |
| `small`, `moe`, `8b` | 3 | all checks of a model; `8b` is a real shape |
| `starts-small`, `starts-moe` | 6 | whether ours and stock give equal bits (`starts.py`) |
| `points` | 2 | points of OLMo-2's and Gemma 3's blocks (`points.py`) |
| `services` | 1 | sweeps, noise and the lens over gRPC, on the demo model (`services.py`) |
| `fp8` | 2 | neighbours of huge doses in a quantised model (`huge.py`) |
| `tp`, `pp` | 3 | split models; gates over two tensor-parallel ranks |
| `runners` | 1 | gates against what the V1 runner did on a CPU (`runners.py`), with `--v1` |

CUDA graphs are captured for all steps, as the server has them, also for steps of prompts.

Every line has a threshold (`verdicts.py`). A part that raises fails as one line, and the others go
on. Prints a line per check and a table last; exits 1 if one fails.
"""

import argparse
import hashlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "integration" / "engine"))

from attach import check_attached
from cases import (
    EVERYWHERE,
    PROMPT,
    VECTOR,
    acts_at,
    agreed,
    difference,
    prompts,
    rows_of,
    same,
    whole,
)
from forms import check_forms
from gates import check_gate_kernels, check_gates
from huge import check_huge
from launches import check_launches
from models import build
from offline import OfflineEngine, Outcome, bfloat16_to_float32
from own_graphs import check_own_graphs
from points import check_points
from routers import check_routers, routed_alike, trimmed
from runners import check_runners
from services import check_services
from split import SPLITS, check_split
from starts import REQUESTS, check_starts, compare_with_stock
from verdicts import (
    APART,
    REORDERED,
    ROUNDED,
    SUMS,
    Lines,
    Verdict,
    at_least,
    at_most,
    conclude,
    each,
    equal,
    judge_op,
    report,
    worst,
    write,
)

from rheostat_bench.shapes import write_shape
from rheostat_engine import OPEN_END, ROUTERS, Act, Capture, Kind, Plan, Point, Site, TokenCondition
from rheostat_engine.plan.points import site_count
from rheostat_server.engine.vllm_engine import graph_sizes

MODELS = {"small": "qwen3", "8b": "qwen3-8b", "moe": "qwen3_moe"}
"""Models by how `--only` calls them: a shape without weights, and small ones with weights."""

STARTS = {"starts-small": "qwen3", "starts-moe": "qwen3_moe"}
"""Models that are started again and again."""


def check_kernels() -> Lines:
    """The compiled kernel against its plain twin, on random programs."""
    from rheostat_engine.plan.gate_table import Floats, Ints
    from rheostat_engine.plan.gates import MAX_TERMS
    from rheostat_engine.sites.kernels import launch_site
    from rheostat_engine.sites.reference import run_site
    from rheostat_engine.worker.state.buffers import GateBuffers, SiteBuffers
    from rheostat_engine.worker.steering.programs import FLOATS, INTS

    results: dict[str, Verdict] = {}
    tokens, width = 97, 2560
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        for carried, gain in ((None, 1.0), (None, 0.22), (dtype, 1.0), (torch.float32, 1.0)):
            ints = torch.zeros(64, INTS, dtype=torch.int32)
            for step in range(1, 64):
                ends = step % 4 == 0
                last = Kind.ADD_LAST if step % 8 else Kind.REPLACE
                kind, following = (last, 0) if ends else (step % 3 + 1, step + 1)
                mask, write = step // 4 % 3 * ends, 0
                if kind == Kind.PULL:  # how it reads, and along which direction it moves
                    mask, write = step % 3 | (0, 1, 3)[step // 3 % 3] << 4, step % 5
                numbers = [kind, step % 7 + 1, following, step % 2, mask, 0, write]
                ints[step] = torch.tensor(numbers)
            ints[63, 2] = 0
            floats = torch.randn(64, FLOATS)
            floats[::4, 2] = floats[::4, 2].abs().clamp(max=1.0)
            floats[:, 0], floats[:, 1] = floats[:, :2].min(1).values, floats[:, :2].max(1).values
            made = SiteBuffers(
                code=torch.randint(-62, 8, (tokens,), dtype=torch.int32),
                cap_row=torch.where(torch.arange(tokens) % 3 == 0, torch.arange(tokens), 0).int(),
                dose_slot=torch.randint(0, 40, (tokens,), dtype=torch.int32),
                rows=torch.randn(8, width, dtype=dtype) * (torch.arange(8) > 0).to(dtype)[:, None],
                directions=torch.nn.functional.normalize(torch.randn(8, width)),
                ints=ints,
                floats=floats,
                gates=GateBuffers.allocate(
                    tokens,
                    0,
                    torch.zeros(1, len(Ints), MAX_TERMS, dtype=torch.int32),
                    torch.zeros(1, len(Floats), MAX_TERMS),
                ),
                doses=torch.zeros(64, 4),
                ring=torch.zeros(tokens, width, dtype=dtype),
            )
            h = torch.randn(tokens, width, dtype=dtype)
            rest = None if carried is None else torch.randn(tokens, width, dtype=carried)
            gates = GateBuffers(*(one.cuda() for one in made.gates))
            tensors = made._asdict() | {"gates": None}
            cuda = {name: one.cuda() for name, one in tensors.items() if one is not None}
            ours = SiteBuffers(**cuda, gates=gates)
            h2, rest2 = h.cuda(), None if rest is None else rest.cuda()
            run_site(h, rest, made, gain)
            launch_site(h2, rest2, ours, gain)
            limit = SUMS if dtype is torch.float32 else ROUNDED
            title = f"{dtype} carried {carried} gain {gain}: worst difference of"
            pairs = {"h": (h, h2), "ring": (made.ring, ours.ring)}
            if rest is not None and rest2 is not None:
                pairs["residual"] = (rest, rest2)
            for name, (one, other) in pairs.items():
                difference = worst(one.float().numpy(), other.float().cpu().numpy())
                results[f"{title} {name}"] = at_most(difference, limit)
            # Doses are float32 sums over tokens, of equal bits in either dtype.
            names = ("rows", "norms", "shares", "largest share")
            doses = (made.doses.numpy().T, ours.doses.cpu().numpy().T)
            for name, one, other in zip(names, *doses, strict=True):
                results[f"{title} {name}"] = at_most(worst(one, other), 10 * SUMS)
    return results | check_gate_kernels()


def expected(act: Act, vector: Any, x: Any) -> Any:
    """What an act makes of rows of the stream, in float64."""
    rows = vector[list(act.rows[0][1])].astype(np.float64)
    if act.kind in (Kind.ADD, Kind.ADD_LAST):
        return x + act.scale * rows[0]
    units = np.linalg.qr(rows.T)[0].T
    units *= np.sign((units * rows).sum(1, keepdims=True))
    if act.kind is Kind.NORM_ADD:
        return x + act.scale * np.linalg.norm(x, axis=1, keepdims=True) * units[0]
    for unit, band in zip(units, act.bands, strict=True):
        along = x @ unit
        x = x + np.outer(band.strength * (along.clip(band.low, band.high) - along), unit)
    return x


def check_ops(
    engine: OfflineEngine, vector: Any, site: int, batch: list[list[int]], sampling: dict[str, Any]
) -> Lines:
    """Every op in a mixed batch against numpy, its doses, and token ids against positions.

    What the ops are given is captured of a mate in the same batch: another batch rounds otherwise.
    """
    results: dict[str, Verdict] = {}
    watch = Capture((site,), PROMPT)
    last = Act(Kind.ADD_LAST, (VECTOR,), ((site, (1,)),), PROMPT, 0.5)
    acts = {**acts_at(site), "add last": last}
    plans = [Plan("", (), (watch,)), *(Plan("", (act,), (watch,)) for act in acts.values())]
    before, *mixed = engine.run([batch[0]] * len(plans), plans, **sampling)
    x = bfloat16_to_float32(before.stream(site)).astype(np.float64)
    for (name, act), outcome in zip(acts.items(), mixed, strict=True):
        assert outcome.released is not None
        got = bfloat16_to_float32(outcome.stream(site)).astype(np.float64)
        want = expected(act, vector, x)
        results |= judge_op(name, x, got, want, outcome.released.doses)
    results |= check_replacing(engine, site, batch, sampling)
    plain = engine.run(batch[:1], [None], **sampling)[0]
    token = plain.token_ids[2]
    rule = Act(
        Kind.ADD,
        (VECTOR,),
        ((site, (0,)),),
        (),
        5.0,
        conditions=(TokenCondition(((40, OPEN_END),), (token,), True),),
    )
    (ruled,) = engine.run(batch[:1], [Plan("", (rule,))], **sampling)
    assert ruled.released is not None
    held = [dose.rows for dose in ruled.released.doses]
    count = ruled.token_ids[:-1].count(token)
    results["generated tokens with an id"] = at_least(count, 1)
    results["rows steered by that id"] = equal(held, [count])
    return results


def check_replacing(
    engine: OfflineEngine, site: int, batch: list[list[int]], sampling: dict[str, Any]
) -> Lines:
    """Rows replaced by another prompt's, and by their own, in batches of equal shape."""
    watch = Capture((site,), PROMPT)
    positions = range(PROMPT[0][0], min(PROMPT[0][1], *map(len, batch[:2])))

    def replaced(rows: Any) -> Outcome:
        values = np.ascontiguousarray(rows, np.float32)
        digest = hashlib.sha256(values.tobytes()).digest()
        engine.load({digest: values})
        acts = tuple(
            Act(Kind.REPLACE, (digest,), ((site, (row,)),), ((position, position + 1),))
            for row, position in enumerate(positions)
        )
        return engine.run([batch[0]] * 2, [plan, Plan("", acts, (watch,))], **sampling)[1]

    plan = Plan("", (), (watch,))
    _, before = engine.run([batch[0]] * 2, [plan] * 2, **sampling)
    (other,) = engine.run([batch[1]], [plan], **sampling)

    def rows_at_positions(outcome: Outcome) -> Any:
        return bfloat16_to_float32(outcome.stream(site))[: len(positions)]

    wanted = rows_at_positions(other)
    patched, unchanged = replaced(wanted), replaced(rows_at_positions(before))
    got = rows_at_positions(patched)
    return {
        "elements of replaced rows that differ": equal(int((got != wanted).sum()), 0),
        "tokens after rows were replaced by their own": equal(
            unchanged.token_ids, before.token_ids
        ),
        "log-probabilities then": equal(unchanged.logprobs == before.logprobs, True),
    }


def check_raw(engine: OfflineEngine, prompt: list[int]) -> Lines:
    """Log-probabilities of tokens that alone are allowed: those of the model, and no others."""
    (plain,) = engine.run([prompt], max_tokens=1, logprobs=-1)
    order = np.argsort(plain.logits())
    tokens = [int(order[place]) for place in (-1, -2, len(order) // 2, 0)]
    found = [
        engine.run([prompt], max_tokens=1, logprobs=1, allowed_token_ids=[token])[0]
        for token in tokens
    ]
    differences = [
        abs(one.logprobs[0][token] - plain.logprobs[0][token])
        for one, token in zip(found, tokens, strict=True)
    ]
    return {
        "tokens that alone are allowed": equal(
            [one.token_ids for one in found], [[t] for t in tokens]
        ),
        "their log-probabilities, from the model's own": at_most(max(differences), SUMS),
    }


def check_eager(
    compiled: list[Outcome],
    reference: list[Outcome],
    sites: tuple[int, ...],
    experts: dict[int, int],
) -> Lines:
    """Rows of compiled runs against eager ones, as far as they read and choose the same."""
    ends = [
        routed_alike(one, other, experts, agreed(one, other))
        for one, other in zip(compiled, reference, strict=True)
    ]
    line = "positions compared with eager"
    results = {line: at_least(sum(ends), PROMPT[0][1])}
    if not results[line].ok:
        return results

    def rows(run: list[Outcome], site: int) -> Any:
        some = zip(run, ends, strict=True)
        return np.concatenate([rows_of(outcome, site, end) for outcome, end in some if end])

    differences = [difference(rows(compiled, site), rows(reference, site)) for site in sites]
    results["captured rows, worst relative difference to eager"] = at_most(
        np.max(differences), REORDERED
    )
    return results


def check_model(
    model: Path, vocabulary: int, scratch: Path, options: dict[str, Any]
) -> Iterator[Lines]:
    """All checks on one model: every line so far, again and again."""
    batch = prompts(24, 40, vocabulary)
    sampling = {"max_tokens": 24, "logprobs": 3}
    results: dict[str, Verdict] = {}
    patient = {"max_tokens": 200, "logprobs": 3}
    with_weights = "load_format" not in options
    stock = OfflineEngine(model, "", sited=False, **options)
    started = stock.run(batch, **sampling)
    again = stock.run(batch, **sampling)
    stock.close()
    ours = OfflineEngine(model, f"ipc://{scratch}/a", **options)
    assert ours.sites is not None
    width, layers = ours.sites.width, ours.sites.num_layers
    results["runner"] = equal(ours.sites.runner, "V2")
    results["points that are not served"] = equal(sorted(ours.sites.refused), [])
    results["routers that are not served"] = equal(dict(ours.sites.unrouted), {})
    pinned = options["device"] == "cuda"
    results["staging memory is pinned"] = equal(ours.stats()["pinned"], pinned)
    results["stock equals itself"] = each([*map(same, started, again)])
    plain = ours.run(batch, **sampling)
    results["an idle run equals itself"] = each([*map(same, plain, ours.run(batch, **sampling))])
    results |= compare_with_stock(started, plain)
    yield results
    vector = np.random.default_rng(1).normal(size=(2, width)).astype(np.float32)
    ours.load({VECTOR: vector})
    sites_of = {point: Site(point, layers // 2).index for point in Point}
    middle, stream = sites_of[Point.RESID_PRE], tuple(range(site_count(layers)))
    experts = dict(ours.sites.experts)
    every = (*stream, *(ROUTERS + layer for layer in experts))
    for name, sites in {
        "one site": (middle,),
        **{point: (sites_of[point],) for point in (Point.ATTN_OUT, Point.RESID_MID, Point.MLP_OUT)},
        "every site": stream,
    }.items():
        rows = tuple((s, (0,)) for s in sites)
        steer = Plan("", (Act(Kind.ADD, (VECTOR,), rows, EVERYWHERE),))
        zero = Plan("", (Act(Kind.ADD, (VECTOR,), rows, EVERYWHERE, 0.0),))
        plans = [steer if i % 4 == 0 else zero if i % 4 == 1 else None for i in range(24)]
        mixed = ours.run(batch, plans, **sampling)
        mates = [i for i in range(24) if i % 4]
        results[f"mates of requests steered at {name} bit-identical to idle ones"] = each(
            [same(plain[i], mixed[i]) for i in mates]
        )
        results[f"requests steered at {name} that changed"] = each(
            [not same(plain[i], mixed[i]) for i in range(0, 24, 4)]
        )
    yield results
    made = ours.stats()["own_graphs"]
    ours.run(batch, plans, **patient)
    made = ours.stats()["own_graphs"] - made
    results["graphs made for sites that stayed active"] = at_least(made, 1)
    alone = ours.run(batch, plans, **sampling)
    results["mates bit-identical to idle ones once the sites have a graph of their own"] = each(
        [same(plain[i], alone[i]) for i in mates]
    )
    results["steered alike with and without a graph of their own"] = each(
        [same(mixed[i], alone[i]) for i in range(0, 24, 4)]
    )
    yield results
    if with_weights:  # the small models show it, in a shorter time
        results |= check_own_graphs(ours, batch, patient)
        yield results
    results |= check_ops(ours, vector, middle, batch, sampling)
    branch = check_ops(ours, vector, sites_of[Point.MLP_OUT], batch, sampling)
    results |= {f"mlp_out: {name}": verdict for name, verdict in branch.items()}
    yield results
    results |= check_raw(ours, batch[0])
    yield results
    read = Site(Point.RESID_PRE, layers // 4).index  # in front of `middle` in small models too
    found = guarded(
        "gates", lambda: check_gates(ours, plain, batch, read, middle, vector, sampling)
    )
    results |= {f"gate {name}": verdict for name, verdict in found.items()}
    yield results
    results |= check_forms(ours, VECTOR, vector, middle, batch[0], sampling)
    yield results
    everything = Plan("", (), (Capture(every, EVERYWHERE),))
    count = 6 if experts else 2
    some = [everything if i < count else None for i in range(24)]
    compiled = [trimmed(one, experts) for one in ours.run(batch, some, **sampling)]
    results["captured requests and mates bit-identical to idle ones"] = each(
        [*map(same, plain, compiled)]
    )
    results |= check_routers(model, experts, compiled[:count])
    yield results
    results |= check_attached(ours, plain, batch, middle, every, sampling)
    stats = ours.stats()
    results["rows lost"] = equal(stats["lost_rows"], 0)
    for name, steps in stats["steps"].items():
        results[f"{name} steps"] = at_least(steps, 1)
    for name in ("requests", *(name for name in stats if name.endswith("_used"))):
        results[f"{name} at the end"] = equal(stats[name], 0)
    yield results
    at = {"the first block": Site(Point.RESID_PRE, 0).index, "a middle block": middle}
    results |= guarded("huge doses", lambda: check_huge(ours, plain, batch, at, sampling))
    yield results
    ours.close()
    eager = OfflineEngine(model, f"ipc://{scratch}/b", **{**options, "enforce_eager": True})
    reference = [trimmed(one, experts) for one in eager.run(batch, some, **sampling)]
    eager.close()
    results["captured requests of which every position was captured once"] = each(
        [whole(one, every) for one in compiled[:count]]
    )
    apart = [
        difference(rows[1:], rows[:-1])
        for rows in (rows_of(compiled[0], site, PROMPT[0][1]) for site in every)
    ]
    results |= check_eager(compiled[:count], reference[:count], every, experts)
    results["captured rows, least relative distance of two tokens"] = at_least(min(apart), APART)
    yield results


def check_quantised(model: Path, vocabulary: int, scratch: Path, options: dict[str, Any]) -> Lines:
    """Neighbours of huge doses where activations are quantised to fp8 in each step."""
    batch = prompts(24, 40, vocabulary)
    sampling = {"max_tokens": 24, "logprobs": 3}
    options = {**options, "quantization": "fp8_per_tensor"}
    stock = OfflineEngine(model, "", sited=False, **options)
    started = stock.run(batch, **sampling)
    stock.close()
    ours = OfflineEngine(model, f"ipc://{scratch}/fp8", **options)
    assert ours.sites is not None
    plain = ours.run(batch, **sampling)
    results = {
        "points that are not served": equal(sorted(ours.sites.refused), []),
        "an idle run equals itself": each([*map(same, plain, ours.run(batch, **sampling))]),
        "idle requests bit-identical to this start of stock": report(
            each([*map(same, started, plain)]).value
        ),
    }
    vector = np.random.default_rng(1).normal(size=(2, ours.sites.width)).astype(np.float32)
    ours.load({VECTOR: vector})
    layer = ours.sites.num_layers // 2
    at = {
        "the first block": Site(Point.RESID_PRE, 0).index,
        "what attention adds": Site(Point.ATTN_OUT, layer).index,
        "the MLP's input": Site(Point.RESID_MID, layer).index,
    }
    found = {**results, **check_huge(ours, plain, batch, at, sampling)}
    ours.close()
    return found


def start(
    model: Path, scratch: Path, options: dict[str, Any], sited: bool, eager: bool
) -> OfflineEngine:
    """Starts ours, or stock vLLM."""
    channel = f"ipc://{scratch}/{model.name}-starts" if sited else ""
    return OfflineEngine(model, channel, sited=sited, **{**options, "enforce_eager": eager})


def check_blocks(scratch: Path, options: dict[str, Any]) -> Lines:
    """Points of blocks that norm what they add, in bfloat16."""
    results: dict[str, Verdict] = {}
    for name in ("olmo2", "gemma3"):
        eager = {**options, "enforce_eager": True}
        engine = OfflineEngine(build(name, scratch), f"ipc://{scratch}/{name}-channel", **eager)
        lines = check_points(engine, prompts(8, 40, 128), {"max_tokens": 8, "logprobs": 3})
        engine.close()
        results |= {f"{name}: {line}": verdict for line, verdict in lines.items()}
    return results


def guarded(name: str, check: Callable[[], Lines]) -> Lines:
    """What a check finds; if it raises, one line that says so, so that others can still run."""
    try:
        return check()
    except Exception as error:  # vLLM raises all kinds
        traceback.print_exc()
        said = f"{type(error).__name__}: {error}"[:300]
        return {f"{name} ran to its end": equal(said, "no exception")}


class Checks:
    """Runs parts one after another and keeps what they found, also of a part that raises."""

    def __init__(self, out: Path) -> None:
        """Nothing has run.

        Args:
            out: where the lines are written after each step, as JSON.
        """
        self.results: dict[str, Lines] = {}
        self.seconds: dict[str, float] = {}
        self._out = out

    def run(self, name: str, check: Callable[[], Iterator[Lines] | Lines]) -> None:
        """Runs a part: its lines at once, or all lines so far again and again."""
        begun = time.monotonic()
        print(f"--- {name}", flush=True)

        def follow() -> Lines:
            found = check()
            for lines in [found] if isinstance(found, dict) else found:
                self.results[name] = lines
                write(self.results, self._out)
            return {}

        failure = guarded("the part", follow)
        self.results[name] = {**self.results.get(name, {}), **failure}
        self.seconds[name] = time.monotonic() - begun
        write(self.results, self._out)


def main() -> None:
    """Runs the checks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parts = ["kernels", *MODELS, *STARTS, "points", "services", "fp8", "runners", *SPLITS]
    parser.add_argument("--only", choices=parts, nargs="+", default=parts)
    parser.add_argument("--v1", type=Path, help="what runners.py wrote on a CPU")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each start")
    arguments = parser.parse_args()
    only = arguments.only
    checks = Checks(arguments.out)
    shared: dict[str, Any] = {"device": "cuda", "enforce_eager": False}
    shared |= {"dtype": "bfloat16", "max_num_seqs": 32, "max_num_batched_tokens": 2048}
    shared |= {"gpu_memory_utilization": 0.4, "max_model_len": 512, "block_size": 32}
    shared["cudagraph_capture_sizes"] = graph_sizes(2048)
    shared["kv_cache_memory_bytes"] = 16 << 30  # nothing is profiled, so two may share a GPU
    with tempfile.TemporaryDirectory() as made:
        scratch = Path(made)
        if "kernels" in only:
            checks.run("kernels", check_kernels)
            checks.run("launches", check_launches)
        if "points" in only:
            checks.run("points", lambda: check_blocks(scratch, shared))
        if "services" in only:
            flags = ["--dtype=bfloat16", "--kv-cache-memory-mib=4096", "--front-ends=0"]
            log = arguments.out.with_suffix(".services.log")
            checks.run("services", lambda: check_services(log, flags))
        if "fp8" in only:
            small = build("qwen3", scratch)
            checks.run("fp8", lambda: check_quantised(small, 128, scratch, shared))
        if "runners" in only and arguments.v1 is None:
            print("the V1 runner's outcomes are needed; this is left out")
        elif "runners" in only:
            checks.run("runners", lambda: check_runners(arguments.v1, scratch, shared))
        for name in (name for name in MODELS if name in only):
            if name == "8b":
                model, vocabulary = write_shape("qwen3-8b", scratch), 1000
                options = {**shared, "load_format": "dummy", "capture_bytes": 512 << 20}
            else:
                model, vocabulary, options = build(MODELS[name], scratch), 128, shared
            checks.run(name, partial(check_model, model, vocabulary, scratch, options))
        for name in (name for name in STARTS if name in only):
            begin = partial(start, build(STARTS[name], scratch), scratch, shared)
            checks.run(name, partial(check_starts, begin, prompts(arguments.requests, 40, 128)))
        splits = [name for name in SPLITS if name in only]
        if splits and torch.cuda.device_count() < 2:
            print("two GPUs are needed to split a model; this is left out")
        elif splits:
            model = build("qwen3", scratch)
            checks.run("split", lambda: check_split(splits, model, 128, scratch, shared))
    sys.exit(conclude(checks.results, arguments.out, checks.seconds))


if __name__ == "__main__":
    main()
