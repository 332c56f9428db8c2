"""Requests under LoRA adapters, steered or not, over gRPC in one batch."""

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

import rheostat

from ..engine.reference import HfReference
from .adapters import merged
from .conftest import MODEL, Server, command, free_port
from .naive import OPS, compare, everywhere

pytestmark = pytest.mark.integration

PROMPT = "The Eiffel Tower is in the city of"
OPTIONS = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def references(
    adapters: dict[str, Path],
    reference: HfReference,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str | None, HfReference]:
    """Hugging Face's model with each adapter merged into its weights; None: without one."""
    folder = tmp_path_factory.mktemp("merged")
    return {None: reference} | {
        name: HfReference("llama", merged(MODEL, path, folder / name))
        for name, path in adapters.items()
    }


def test_the_model_says_which_adapters_it_has(small: rheostat.Engine) -> None:
    assert small.model().lora_names == ("ada", "bob")


def test_steered_and_plain_requests_with_and_without_adapters_share_a_batch(
    small_server: Server, small: rheostat.Engine, references: dict[str | None, HfReference]
) -> None:
    cases = [
        (lora, [] if name is None else [everywhere(OPS[name], [1, 4])])
        for lora in (None, "ada", "bob")
        for name in (None, *OPS)
    ]

    async def run() -> list[rheostat.Generation]:
        async with rheostat.aio.connect(small_server.target) as client:
            return await asyncio.gather(
                *(
                    client.generate(
                        PROMPT, lora=lora, steering=[one.ours for one in placed], **OPTIONS
                    )
                    for lora, placed in cases
                )
            )

    outs = asyncio.run(run())
    for (lora, placed), out in zip(cases, outs, strict=True):
        compare(references[lora], out, placed)
    plain = [out.logprobs for (_, placed), out in zip(cases, outs, strict=True) if not placed]
    assert plain[0] != plain[1] != plain[2] != plain[0]


def test_log_probabilities_of_prompts_beside_others_are_those_of_their_adapters(
    small_server: Server, small: rheostat.Engine
) -> None:
    """vLLM's own engine dies of them."""
    options = {**OPTIONS, "prompt_logprobs": 2}
    alone = {name: small.generate(PROMPT, lora=name, **options) for name in (None, "ada", "bob")}

    async def run() -> list[rheostat.Generation]:
        async with rheostat.aio.connect(small_server.target) as client:
            plain = [client.generate(PROMPT, lora="bob", **OPTIONS) for _ in range(5)]
            asked = [client.generate(PROMPT, lora=name, **options) for name in alone]
            return (await asyncio.gather(*plain, *asked))[5:]

    found = [readings(out) for out in asyncio.run(run())]
    expected = [readings(out) for out in alone.values()]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
    assert expected[0] != pytest.approx(expected[1], abs=1e-2)


def readings(out: rheostat.Generation) -> list[float]:
    """The log-probability of each token of a prompt but the first."""
    return [one.token.logprob for one in out.prompt_logprobs]


def test_a_baseline_runs_under_the_requests_adapter(
    small: rheostat.Engine, references: dict[str | None, HfReference]
) -> None:
    steering = [everywhere(OPS["add"], [2]).ours]
    out = small.generate(PROMPT, lora="ada", steering=steering, with_baseline=True, **OPTIONS)
    alone = small.generate(PROMPT, lora="ada", **OPTIONS)
    assert out.baseline is not None
    assert out.baseline.token_ids == alone.token_ids
    compare(references["ada"], alone, [])


def test_adapters_do_not_share_what_the_prefix_cache_holds(small: rheostat.Engine) -> None:
    prompt = list(range(100, 400))
    steering = [everywhere(OPS["ablate"], [1]).ours]
    hits = [
        small.generate(
            prompt, lora=lora, steering=steps, **OPTIONS
        ).receipt.cached_prompt_token_count
        for lora, steps in (
            ("ada", steering),
            ("ada", steering),
            ("bob", steering),
            (None, steering),
            ("ada", []),
            ("bob", steering),
        )
    ]
    assert hits == [0, 256, 0, 0, 0, 256]


def test_an_adapter_that_nobody_loaded_is_refused_by_name(small: rheostat.Engine) -> None:
    with pytest.raises(rheostat.NotFound) as caught:
        small.generate(PROMPT, lora="eve", **OPTIONS)
    assert caught.value.reason == "REASON_LORA_NOT_FOUND"
    assert caught.value.resource == rheostat.Resource("lora", "eve")
    assert "ada, bob" in str(caught.value)


def test_an_adapter_that_cannot_be_read_stops_the_start_by_name(
    adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Before the engine loads; `engine/test_lora.py` tests what only vLLM finds out."""
    broken = tmp_path / "broken"
    broken.mkdir()
    shutil.copy(adapters["ada"] / "adapter_config.json", broken)
    named = [f"--lora={name}={path}" for name, path in (*adapters.items(), ("odd", broken))]
    done = subprocess.run(
        command(
            "demo", free_port(), "--enforce-eager", "--max-model-len=512",
            "--kv-cache-memory-mib=64", *named,
        ),
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 4
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("rheostat: ")]
    assert f"the adapter odd: {broken} holds none of adapter_model.safetensors" in line
    assert "EngineCore" not in done.stdout + done.stderr
