"""The logit lens and the attribution of logits on a real server, against Hugging Face's model."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rheostat
from rheostat import Engine, Point

from .conftest import MODEL

pytestmark = pytest.mark.integration

PROMPT = "I am so happy. My day was"
NATS = 2e-4
"""Of log-probabilities; float32 here and there."""


@pytest.fixture(scope="module")
def reference() -> tuple[list[int], np.ndarray]:
    """The prompt's tokens, and the lens of every layer's stream: [layers, tokens, vocabulary]."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    inputs = tokenizer(PROMPT, return_tensors="pt")
    streams: list[torch.Tensor] = []

    def record(_: torch.nn.Module, __: object, output: object) -> None:
        streams.append(output if isinstance(output, torch.Tensor) else output[0])

    hooks = [layer.register_forward_hook(record) for layer in model.model.layers]
    with torch.no_grad():
        model(**inputs)
        logits = model.lm_head(model.model.norm(torch.cat(streams)))
    for hook in hooks:
        hook.remove()
    return inputs.input_ids[0].tolist(), torch.log_softmax(logits, -1).numpy()


def test_the_lens_is_hugging_faces_at_every_layer_and_token(
    engine: Engine, reference: tuple[list[int], np.ndarray]
) -> None:
    ids, expected = reference
    tokens = [3, 20, 300]
    read = engine.lens(PROMPT, where="prompt", top_k=4, tokens=tokens)
    assert read.prompt_token_ids == tuple(ids)
    assert (len(read.sites), read.positions) == (len(expected), tuple(range(len(ids))))
    assert read.at("resid_post", 1) == 1
    assert np.abs(read.logprobs - expected[:, :, tokens]).max() < NATS
    best = -np.sort(-expected, axis=-1)[..., :4]
    assert np.abs(read.top_logprobs - best).max() < NATS
    ranks = 1 + (expected[:, :, None] > expected[:, :, tokens, None]).sum(-1)
    assert (np.abs(read.ranks - ranks) <= 1).all()  # neighbours may be equal to rounding
    answer = engine.generate(PROMPT, max_tokens=1, temperature=0, logprobs=4)
    last = dict(zip(read.top_token_ids[-1, -1].tolist(), read.top_logprobs[-1, -1], strict=True))
    entries = answer.logprobs[0].alternatives
    assert {entry.token_id for entry in entries} == set(last)
    for entry in entries:
        assert abs(entry.logprob - last[entry.token_id]) < NATS
        assert read.texts[entry.token_id] == entry.text
    assert len(read.prompt_texts) == len(ids)
    assert len(read.rows()) >= len(expected) * len(ids) * 4


def test_the_lens_of_a_run_is_that_of_its_prompt(
    engine: Engine, reference: tuple[list[int], np.ndarray]
) -> None:
    """Also behind the prompt, where the run has rows of generated tokens."""
    ids, expected = reference
    answer = engine.generate(
        PROMPT,
        max_tokens=3,
        temperature=0,
        capture=rheostat.Capture("resid_post", to=rheostat.Run()),
    )
    run_id = answer.receipt.captures[0].run_id
    try:
        read = engine.lens(run=run_id, top_k=1, tokens=[3, 20, 300])
        assert read.prompt_token_ids == tuple(ids)
        assert read.positions == tuple(range(len(ids) + 2))
        of_prompt = read.logprobs[:, : len(ids)]
        assert np.abs(of_prompt - expected[:, :, [3, 20, 300]]).max() < NATS
        assert read.top_token_ids[-1, -3:, 0].tolist() == list(answer.token_ids)
        last = engine.lens(run=run_id, points="resid_post", layers=1, positions=-1, tokens=[20])
        assert last.positions == (len(ids) - 1,)
        assert abs(float(last.logprobs[0, 0, 0]) - expected[1, -1, 20]) < NATS
    finally:
        engine.delete_run(run_id)


@pytest.mark.parametrize("minus", [None, 20])
def test_contributions_add_up_to_the_logit(engine: Engine, minus: int | None) -> None:
    token = int(engine.lens(PROMPT, layers=[0], top_k=1).top_token_ids[0, 0, 0])
    made = engine.attribute(PROMPT, token, minus=minus)
    layers = engine.model().layer_count
    assert len(made.sites) == 1 + 2 * layers
    assert abs(made.contributions.sum() + made.bias - made.logit) < 1e-3
    assert made.logit == pytest.approx(made.contributions.sum() + made.bias + made.remainder)
    read = engine.lens(
        PROMPT, layers=[layers - 1], tokens=[token, *([] if minus is None else [minus])]
    )
    logits = read.logits[0, 0]
    assert made.logit == pytest.approx(logits[0] - (0 if minus is None else logits[1]), abs=1e-4)


def test_rows_are_projected_on_a_tokens_direction_and_steered_along_it(engine: Engine) -> None:
    made = engine.attribute(PROMPT, 20, minus=3)
    direction = rheostat.token_direction(20, minus=3)
    capture = rheostat.Capture(
        ["attn_out", "mlp_out"], "all", where=rheostat.positions(-1), projection=direction
    )
    answer = engine.generate(PROMPT, max_tokens=1, temperature=0, capture=capture)
    numbers = answer.activations
    for site in made.sites[1:]:
        value = float(np.ravel(numbers[site.point, site.layer])[0])
        assert made.scale * value == pytest.approx(made[site], abs=1e-3)
    last = engine.model().layer_count - 1
    steering = 2.0 * rheostat.token_direction(20, minus=3, points="resid_post", layers=[last])
    before = engine.lens(PROMPT, layers=[last], tokens=[20, 3])
    after = engine.lens(PROMPT, layers=[last], tokens=[20, 3], steering=steering)
    assert after.logits[0, 0, 0] - after.logits[0, 0, 1] > (
        before.logits[0, 0, 0] - before.logits[0, 0, 1]
    )
    assert Point.RESID_POST in {site.point for site in after.sites}


def test_a_direction_of_no_token_is_refused(engine: Engine) -> None:
    with pytest.raises(rheostat.InvalidRequest) as raised:
        engine.attribute(PROMPT, 10**6)
    assert raised.value.path == "direction.token_id"
