"""Gates under vLLM's V1 runner on a CPU, and under its V2 runner on a GPU.

    python tests/gpu/runners.py .gpu/v1                                       # on a CPU
    python tests/gpu/check.py --out check.json --only runners --v1 .gpu/v1    # on a GPU

No device runs both, so the V1 runner's outcomes and the model lie in a folder. The devices' kernels
round in different orders, as two GPUs do.
"""

import argparse
import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "integration" / "engine"))

from cases import PROMPT, VECTOR, prompts
from gate_runs import GatedRequests, compare_gated, gated_requests
from models import VOCAB, build
from offline import OfflineEngine, Outcome
from verdicts import Lines, equal

from rheostat_engine import Point, Site

MODEL = "qwen3"
COUNT = 24
SAMPLING = {"max_tokens": 24, "logprobs": 3}
OUTCOMES = "outcomes.pickle"


def start(folder: Path, scratch: Path, options: dict[str, Any]) -> OfflineEngine:
    """Starts the folder's model, with vectors."""
    engine = OfflineEngine(build(MODEL, folder), f"ipc://{scratch}/runners", **options)
    assert engine.sites is not None
    vector = np.random.default_rng(1).normal(size=(2, engine.sites.width)).astype(np.float32)
    engine.load({VECTOR: vector})
    return engine


def record(folder: Path) -> None:
    """Runs gated requests on a CPU, and writes them and their outcomes."""
    options: dict[str, Any] = {"device": "cpu", "enforce_eager": True, "dtype": "bfloat16"}
    options |= {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "max_model_len": 512}
    given = prompts(COUNT, PROMPT[0][1], VOCAB)
    with tempfile.TemporaryDirectory() as scratch:
        engine = start(folder, Path(scratch), options)
        assert engine.sites is not None
        assert engine.sites.runner == "V1"
        layers = engine.sites.num_layers
        places = (Point.RESID_PRE, layers // 4), (Point.RESID_PRE, layers // 2)
        sites = [Site(*place).index for place in (*places, (Point.RESID_POST, layers - 1))]
        requests = gated_requests(engine, given, *sites, SAMPLING)
        outcomes = engine.run(given, requests.plans, **SAMPLING)
        engine.close()
    (folder / OUTCOMES).write_bytes(pickle.dumps((requests, outcomes)))


def check_runners(folder: Path, scratch: Path, options: dict[str, Any]) -> Lines:
    """The V2 runner's outcomes against those that `record` wrote."""
    recorded: tuple[GatedRequests, list[Outcome]] = pickle.loads(
        (folder / OUTCOMES).read_bytes()  # written by this module
    )
    requests, outcomes = recorded
    engine = start(folder, scratch, options)
    assert engine.sites is not None
    found = engine.run(requests.prompts, requests.plans, **SAMPLING)
    runner = engine.sites.runner
    engine.close()
    lines = compare_gated(requests, outcomes, found)
    return {"runner": equal(runner, "V2")} | {f"gates: {name}": one for name, one in lines.items()}


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    target = parser.parse_args().folder
    target.mkdir(parents=True, exist_ok=True)
    record(target)
