"""Correctness on a real GPU: the V2 runner, torch.compile and full CUDA graphs.

    python tests/gpu/check.py --out check.json

Starts stock vLLM and ours on a small random model and on a real shape, and checks that steering
changes what it should, that an idle request in a mixed batch is bit-identical to stock vLLM's, and
that captured rows equal those of an eager run. Prints a line per check; exits 1 if one fails.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "integration" / "engine"))

from models import build
from offline import OfflineEngine, Outcome, bfloat16_to_float32

from rheostat_engine import OPEN_END, Addition, Capture, Plan
from rheostat_server.bench.shapes import write_shape

EVERYWHERE = ((0, OPEN_END),)
VECTOR = hashlib.sha256(b"check").digest()


def prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Different prompts of random tokens, always the same ones."""
    rng = np.random.default_rng(7)
    return rng.integers(3, vocabulary, (count, length)).tolist()


def same(one: Outcome, other: Outcome) -> bool:
    """Whether tokens and log-probabilities are equal in every bit."""
    return one.token_ids == other.token_ids and one.logprobs == other.logprobs


def check_model(
    model: Path, vocabulary: int, scratch: Path, options: dict[str, Any]
) -> dict[str, Any]:
    """All checks on one model."""
    batch = prompts(24, 40, vocabulary)
    sampling = {"max_tokens": 24, "logprobs": 3}
    results: dict[str, Any] = {}
    stock = OfflineEngine(model, "", sited=False, device="cuda", **options)
    plain = stock.run(batch, **sampling)
    again = stock.run(batch, **sampling)
    stock.close()
    ours = OfflineEngine(model, f"ipc://{scratch}/a", device="cuda", **options)
    assert ours.sites is not None
    width, layers = ours.sites.width, ours.sites.num_layers
    results["runner"] = ours.sites.runner
    results["stock equals itself"] = all(map(same, plain, again))
    idle = ours.run(batch, **sampling)
    results["idle requests bit-identical to stock"] = f"{sum(map(same, plain, idle))}/24"
    vector = np.random.default_rng(1).normal(size=(1, width)).astype(np.float32)
    ours.load({VECTOR: vector})
    middle = layers - layers % 2
    for name, sites in {
        "one site": (middle,),
        "resid_mid": (middle + 1,),
        "every site": tuple(range(2 * layers + 1)),
    }.items():
        rows = tuple((s, 0) for s in sites)
        steer = Plan("", (Addition(VECTOR, rows, 1.0, EVERYWHERE),))
        zero = Plan("", (Addition(VECTOR, rows, 0.0, EVERYWHERE),))
        plans = [steer if i % 4 == 0 else zero if i % 4 == 1 else None for i in range(24)]
        mixed = ours.run(batch, plans, **sampling)
        mates = [i for i in range(24) if i % 4]
        results[f"mates of requests steered at {name} bit-identical to stock"] = (
            f"{sum(same(plain[i], mixed[i]) for i in mates)}/{len(mates)}"
        )
        results[f"requests steered at {name} that changed"] = (
            f"{sum(not same(plain[i], mixed[i]) for i in range(0, 24, 4))}/6"
        )
    everything = Plan("", (), (Capture(tuple(range(2 * layers + 1)), EVERYWHERE),))
    some = [everything if i < 2 else None for i in range(24)]
    compiled = ours.run(batch, some, **sampling)
    results["captured requests and mates bit-identical to stock"] = (
        f"{sum(map(same, plain, compiled))}/24"
    )
    results["rows lost"] = ours.stats()["lost_rows"]
    results["steps"] = ours.stats()["steps"]
    results["bank rows left"] = ours.stats()["bank_rows_used"]
    ours.close()
    eager = OfflineEngine(model, f"ipc://{scratch}/b", device="cuda", enforce_eager=True, **options)
    reference = eager.run(batch, some, **sampling)
    eager.close()
    worst = 0.0
    counted = True
    for one, other in zip(compiled[:2], reference[:2], strict=True):
        upto = 40 + next(
            (
                i
                for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True))
                if a != b
            ),
            23,
        )
        for site in range(2 * layers + 1):
            counted &= sorted(one.rows[site]) == list(range(63)) and one.duplicates == 0
            mine = np.stack([bfloat16_to_float32(one.rows[site][p]) for p in range(upto)])
            theirs = np.stack([bfloat16_to_float32(other.rows[site][p]) for p in range(upto)])
            worst = max(worst, float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)))
    results["every position captured once"] = counted
    results["captured rows, worst relative difference to eager"] = worst
    return results


def main() -> None:
    """Runs the checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=["small", "8b"])
    arguments = parser.parse_args()
    results = {}
    shared = {"dtype": "bfloat16", "max_num_seqs": 32, "max_num_batched_tokens": 2048}
    shared |= {"gpu_memory_utilization": 0.5, "max_model_len": 512, "block_size": 32}
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.only != "8b":
            small = build("qwen3", Path(scratch))
            results["small"] = check_model(small, 128, Path(scratch), shared)
        if arguments.only != "small":
            shape = write_shape("qwen3-8b", Path(scratch))
            options = {**shared, "load_format": "dummy", "capture_bytes": 512 << 20}
            results["qwen3-8b"] = check_model(shape, 1000, Path(scratch), options)
    arguments.out.write_text(json.dumps(results, indent=1))
    for model, lines in results.items():
        for line, value in lines.items():
            print(f"{model:10} {line}: {value}")


if __name__ == "__main__":
    main()
