"""DeriveVectors on a real server, against hooks on Hugging Face's own model."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rheostat
import rheostat.aio
from rheostat import Engine, Site

from .conftest import MODEL, Server

pytestmark = pytest.mark.integration

GLAD = ["I am so happy. My day was", "I love my life. I feel", "What wonderful news! The party was"]
SAD = ["I am so sad. My day was", "I hate my life. I feel", "What terrible news! The party was"]
LAYERS = (0, 3, 5)


@pytest.fixture(scope="module")
def streams() -> dict[str, dict[Site, np.ndarray]]:
    """Per prompt and site, the rows of all tokens, [tokens, width]."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    found: dict[str, dict[Site, np.ndarray]] = {}

    def record(prompt: str, layer: int) -> list[object]:
        block = model.model.layers[layer]
        rows = found.setdefault(prompt, {})

        def before(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            rows[Site(rheostat.Point.RESID_PRE, layer)] = inputs[0][0].numpy()

        def after(_: torch.nn.Module, __: object, output: object) -> None:
            stream = output if isinstance(output, torch.Tensor) else output[0]
            rows[Site(rheostat.Point.RESID_POST, layer)] = stream[0].numpy()

        return [block.register_forward_pre_hook(before), block.register_forward_hook(after)]

    for prompt in (*GLAD, *SAD):
        handles = [handle for layer in LAYERS for handle in record(prompt, layer)]
        with torch.no_grad():
            model(**tokenizer(prompt, return_tensors="pt"))
        for handle in handles:
            handle.remove()
    return found


def difference_of_means(glad: np.ndarray, sad: np.ndarray) -> np.ndarray:
    return glad.mean(axis=0) - sad.mean(axis=0)


def principal_component(glad: np.ndarray, sad: np.ndarray) -> np.ndarray:
    _, _, right = np.linalg.svd(glad - sad, full_matrices=False)
    return right[0] * np.sign((glad - sad).mean(axis=0) @ right[0])


def separation(glad: np.ndarray, sad: np.ndarray, direction: Callable) -> float:
    """Cohen's d of prompts along what is made of the others: each of the three is held out once."""
    scores = []
    for held in range(3):
        others = [np.delete(rows, held, axis=0) for rows in (glad, sad)]
        made = direction(*others)
        middle = np.concatenate(others).mean(axis=0)
        unit = made / np.linalg.norm(made)
        scores.append([(rows[held] - middle) @ unit for rows in (glad, sad)])
    of_glad, of_sad = np.array(scores).T
    pooled = np.sqrt((of_glad.var(ddof=1) + of_sad.var(ddof=1)) / 2)
    return float((of_glad.mean() - of_sad.mean()) / pooled)


@pytest.mark.parametrize("direction", [difference_of_means, principal_component])
@pytest.mark.parametrize("where", [None, "prompt"])
def test_derived_vectors_are_those_of_hugging_faces_stream(
    engine: Engine,
    streams: dict[str, dict[Site, np.ndarray]],
    direction: Callable,
    where: str | None,
) -> None:
    made = engine.vectors.derive(
        GLAD,
        SAD,
        points=["resid_pre", "resid_post"],
        layers=LAYERS,
        where=where,
        method=direction.__name__,
        name="tone",
    )
    chosen = slice(-1, None) if where is None else slice(None)
    assert [row.site for row in made.rows] == [
        Site(point, layer)
        for point in (rheostat.Point.RESID_PRE, rheostat.Point.RESID_POST)
        for layer in LAYERS
    ]
    numbers = np.concatenate(
        [engine.vectors.get(f"tone/{point}").values for point in ("resid_pre", "resid_post")]
    )
    for figures, vector in zip(made.rows, numbers, strict=True):
        glad, sad = (
            np.stack([streams[prompt][figures.site][chosen].mean(axis=0) for prompt in prompts])
            for prompts in (GLAD, SAD)
        )
        norms = [
            np.linalg.norm(streams[prompt][figures.site][chosen], axis=1).mean()
            for prompt in (*GLAD, *SAD)
        ]
        assert figures.stream_norm == pytest.approx(np.mean(norms), rel=1e-4)
        expected = direction(glad, sad)
        assert vector == pytest.approx(expected, abs=1e-4)
        assert figures.norm == pytest.approx(np.linalg.norm(expected), rel=1e-4, abs=1e-6)
        if not expected.any():  # the embedding of last tokens that both sets share
            assert (figures.site, where, figures.separation) == (made.rows[0].site, None, None)
            continue
        assert figures.separation == pytest.approx(separation(glad, sad, direction), rel=1e-3)
    for point in ("resid_pre", "resid_post"):
        engine.vectors.delete(f"tone/{point}")


@pytest.mark.parametrize("layers", ["all", range(6), [0, 1, 2, 3, 4, 5], [2, 3]])
@pytest.mark.parametrize("name", [None, "tone"])
async def test_a_derived_vector_steers_at_its_best_layer_as_one_derived_there(
    engine: Engine, server: Server, layers: str | range | list[int], name: str | None
) -> None:
    derived = engine.vectors.derive(GLAD, SAD, points="resid_post", layers=layers, name=name)
    best = derived.best.site.layer
    there = engine.vectors.derive(GLAD, SAD, points="resid_post", layers=best).vector
    expected = dosed(engine, there * 0.5)
    assert expected != dosed(engine, None)
    assert dosed(engine, derived.vector.at(layers=best) * 0.5) == expected
    async with rheostat.aio.connect(server.target) as awaited:
        made = await awaited.vectors.derive(GLAD, SAD, points="resid_post", layers=layers)
        steering = made.vector.at(layers=best) * 0.5
        out = await awaited.generate("My day was", steering=steering, max_tokens=8, temperature=0)
        assert out.text == expected
    if name is not None:
        named = rheostat.named(name, points="resid_post", layers=best)
        assert dosed(engine, named * 0.5) == expected
        engine.vectors.delete(name)


def dosed(engine: Engine, steering: rheostat.Add | None) -> str:
    """What follows "My day was"."""
    return engine.generate("My day was", steering=steering, max_tokens=8, temperature=0).text


def test_a_name_of_other_layers_is_refused(engine: Engine) -> None:
    engine.vectors.derive(GLAD, SAD, points="resid_post", layers=[1, 4], name="tone")
    tone = rheostat.named("tone", points="resid_post", layers=[2, 3])
    capture = rheostat.Capture("resid_post", [2, 3], projection=tone)
    for options in ({"steering": tone}, {"capture": capture}):
        with pytest.raises(rheostat.InvalidRequest, match=r"layers 1, 4, not .* 2-3") as raised:
            engine.generate("My day was", max_tokens=1, **options)
        assert raised.value.reason == "REASON_VECTOR_SHAPE"
    engine.vectors.delete("tone")
