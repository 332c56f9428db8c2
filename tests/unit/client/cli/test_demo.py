"""``rheostat demo`` on a toy model whose every number is known.

The toy's stream has one dimension per word that it knows. Layer 1 adds the rows of all tokens to
the last one's; the last row's largest dimension is the answer. So the subject's own row carries the
fact before layer 1, the last row from layer 1 on, and nothing else ever does.
"""

import asyncio
import math

import numpy as np
import pytest
from grpc_health.v1 import health_pb2

import rheostat
from rheostat._cli import _tone, _trace, main
from rheostat._points import Point
from rheostat_wire.v1 import (
    engine_service_pb2,
    generation_service_pb2,
    steering_service_pb2,
    sweep_pb2,
    sweep_service_pb2,
    types_pb2,
)

LAYERS = 3
ANSWERS = (" so", " Paris", " Chicago", " good", " bad")
MEANINGS = {"Eiffel": 1, "Willis": 2}
MEANINGS |= dict.fromkeys(("happy", "joy.", "love", "wonderful", "best", "great."), 3)
MEANINGS |= dict.fromkeys(("sad.", "sad", "sorrow.", "hate", "terrible", "worst", "bad."), 4)


class Toy:
    """The model, and the rpcs that the demo needs of it."""

    def __init__(self) -> None:
        self.words = ["<s>"]
        self.meanings = MEANINGS
        self.vectors: dict[bytes, np.ndarray] = {}

    def tokenize(self, text: str) -> list[int]:
        ids = [0]
        for word in text.split(" "):
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return ids

    def on_tokenize(self, request, _context):
        text = request.text or " ".join(self.words[token] for token in request.token_ids.ids[1:])
        answer = generation_service_pb2.TokenizeResponse(text=text)
        answer.token_ids.ids.extend(self.tokenize(text))
        answer.starts.append(0)
        answer.ends.append(0)
        start = 0
        for word in text.split(" "):
            answer.starts.append(start)
            answer.ends.append(start + len(word))
            start += len(word) + 1
        return answer

    def on_model(self, _request, _context):
        answer = engine_service_pb2.GetModelResponse(
            model_name="toy", layer_count=LAYERS, vocabulary_size=5
        )
        for point in ("POINT_RESID_PRE", "POINT_RESID_POST"):
            group = answer.sites.add(point=point, layers=range(LAYERS))
            group.capture.served = True
        answer.limits.logprobs = 20
        return answer

    def stream(
        self, ids: list[int], request, patch: dict[tuple[int, int], np.ndarray] | None = None
    ) -> dict[tuple[int, int], np.ndarray]:
        """The stream by (point, layer), every op of the request applied.

        ``patch`` has rows of resid_post by (layer, position).
        """
        x = np.zeros((len(ids), len(ANSWERS)), np.float32)
        x[:, 0] = 0.5
        for position, token in enumerate(ids):
            if self.words[token] in self.meanings:
                x[position, self.meanings[self.words[token]]] = 1
        found = {}
        for layer in range(LAYERS):
            self.steer(x, types_pb2.POINT_RESID_PRE, layer, request)
            found[types_pb2.POINT_RESID_PRE, layer] = x.copy()
            if layer == 1:
                x[-1, 1:] += x[:-1, 1:].sum(axis=0)
            self.steer(x, types_pb2.POINT_RESID_POST, layer, request)
            for (at, position), row in (patch or {}).items():
                if at == layer:
                    x[position] = row
            found[types_pb2.POINT_RESID_POST, layer] = x.copy()
        return found

    def steer(self, x: np.ndarray, point: int, layer: int, request) -> None:
        for one in request.steering.interventions:
            if point in one.sites.points and layer in one.sites.list.layers:
                ref = one.add.vector
                inline = np.frombuffer(ref.inline.inline, "<f4")
                vector = self.vectors[ref.digest] if ref.digest else inline
                rows = slice(None)
                if one.HasField("where"):
                    window = one.where.include[0].positions
                    rows = slice(window.start, window.end)
                x[rows] += one.add.scale * vector

    def on_generate(self, request, _context):
        ids = list(request.token_ids.ids) or self.tokenize(request.text)
        stream = self.stream(ids, request)
        logits = stream[types_pb2.POINT_RESID_POST, LAYERS - 1][-1].astype(float)
        answer = int(logits.argmax())
        logprobs = logits - math.log(np.exp(logits).sum())
        response = generation_service_pb2.GenerateResponse
        yield response(started={"request_id": "r", "prompt_token_ids": {"ids": ids}})
        one = response(tokens={"token_ids": [answer], "text": ANSWERS[answer]})
        at = one.tokens.logprobs.add()
        at.token.token_id, at.token.logprob = answer, logprobs[answer]
        for token, logprob in enumerate(logprobs):
            at.alternatives.add(token_id=token, logprob=logprob)
        yield one
        for spec in request.captures:
            layers = list(spec.sites.list.layers) or range(LAYERS)
            first = len(ids) - 1 if spec.where.include[0].HasField("positions") else 0
            message = response()
            rows = []
            for layer in layers:
                for point in spec.sites.points:
                    message.captured.sites.add(point=point, layer=layer)
                    rows.append(stream[point, layer][first:])
            message.captured.positions.add(start=first, count=len(ids) - first)
            message.captured.token_ids.extend(ids[first:])
            tensor = message.captured.tensor
            tensor.dtype, tensor.encoding = "DTYPE_FLOAT32", "ENCODING_RAW"
            tensor.shape.extend(np.stack(rows).shape)
            tensor.inline = np.stack(rows).astype("<f4").tobytes()
            yield message
        yield response(finished={"reason": "FINISH_REASON_LENGTH"})
        yield response(receipt={"request_id": "r", "generated_token_count": 1})

    def on_derive(self, request, _context):
        """The difference of means of the last tokens' rows at one layer of resid_post."""
        assert list(request.sites.points) == [types_pb2.POINT_RESID_POST]
        (layer,) = request.sites.list.layers
        plain = generation_service_pb2.GenerateRequest()

        def last_row(prompt) -> np.ndarray:
            stream = self.stream(self.tokenize(prompt.text), plain)
            return stream[types_pb2.POINT_RESID_POST, layer][-1]

        positive = np.stack([last_row(prompt) for prompt in request.positive])
        negative = np.stack([last_row(prompt) for prompt in request.negative])
        difference = positive.mean(axis=0) - negative.mean(axis=0)
        digest = b"\xab" * 32
        self.vectors[digest] = difference
        answer = steering_service_pb2.DeriveVectorsResponse()
        derived = answer.derived.vectors.add(
            point="POINT_RESID_POST", digest=digest, name=request.name
        )
        norm = float(np.linalg.norm(difference))
        stream_norm = float(np.linalg.norm([*positive, *negative], axis=1).mean())
        derived.rows.add(layer=layer, norm=norm, stream_norm=stream_norm)
        yield answer

    def on_sweep(self, request, _context):
        """The recovered logit difference of each cell of resid_post."""
        (pair,), (grade,) = request.pairs, request.grades
        assert grade.recovered
        assert grade.token.metric == sweep_pb2.METRIC_LOGIT_DIFFERENCE
        assert list(request.sites.points) == [types_pb2.POINT_RESID_POST]
        clean, corrupt = self.tokenize(pair.prompt.text), self.tokenize(pair.corrupt.text)
        (answer,), (foil,) = pair.answer.alternatives[0].ids, pair.foil.alternatives[0].ids
        plain = generation_service_pb2.GenerateRequest()
        source = self.stream(clean, plain)

        def score(stream: dict[tuple[int, int], np.ndarray]) -> float:
            last = stream[types_pb2.POINT_RESID_POST, LAYERS - 1][-1]
            return float(last[answer] - last[foil])

        reach = score(source), score(self.stream(corrupt, plain))
        response = sweep_service_pb2.SweepResponse
        begun = sweep_pb2.SweepStarted(
            cell_count=LAYERS * len(clean),
            rows=[types_pb2.Site(point=types_pb2.POINT_RESID_POST, layer=n) for n in range(LAYERS)],
            columns=[str(position) for position in range(len(clean))],
        )
        resolved = begun.pairs.add()
        resolved.clean_token_ids.ids.extend(clean)
        resolved.corrupt_token_ids.ids.extend(corrupt)
        yield response(started=begun)
        for index in range(begun.cell_count):
            layer, position = divmod(index, len(clean))
            row = source[types_pb2.POINT_RESID_POST, layer][position]
            patched = score(self.stream(corrupt, plain, {(layer, position): row}))
            value = (patched - reach[1]) / (reach[0] - reach[1])
            yield response(
                cell=sweep_pb2.SweepCell(
                    index=index,
                    row=layer,
                    column=position,
                    values=[value],
                    standard_errors=[0.0],
                    below_noise=value == 0.0,
                )
            )
        noise = sweep_pb2.Noise(sample_count=8)
        each = sweep_pb2.SweepGrade(clean=1.0, corrupt=0.0, noise=noise)
        yield response(summary=sweep_pb2.SweepSummary(grades=[each]))


@pytest.fixture
def toy(server):
    toy = Toy()
    server.on("Check", health_pb2.HealthCheckResponse(status=1))
    server.on("GetModel", toy.on_model)
    server.on("Tokenize", toy.on_tokenize)
    server.on("DeriveVectors", toy.on_derive)
    server.on("Generate", toy.on_generate)
    server.on("Sweep", toy.on_sweep)
    return toy


def test_one_sweep_finds_the_rows_that_carry_the_fact_and_no_others(server, toy):
    told: list[tuple[int, int]] = []

    async def traced() -> tuple[_trace.Fact, rheostat.SweepResult]:
        async with rheostat.aio.connect(server.target) as engine:
            fact = await _trace.find_fact(engine, await engine.model())
            return fact, await _trace.trace(engine, fact, lambda *count: told.append(count))

    fact, result = asyncio.run(traced())
    assert fact.clean == "The Eiffel Tower is in the city of"
    assert fact.corrupt == "The Willis Tower is in the city of"
    assert fact.answers == ("Paris", "Chicago")
    asked = [one for one in server.asked if isinstance(one, sweep_service_pb2.SweepRequest)]
    assert len(asked) == 1
    assert told[-1] == (27, 27)
    assert result.tokens == ("", "The", "Eiffel", "Tower", "is", "in", "the", "city", "of")
    assert result.sites == tuple(rheostat.Site(Point.RESID_POST, layer) for layer in range(3))
    expected = np.zeros((3, 9), np.float32)
    expected[0, 2] = expected[1:, 8] = 1
    assert np.allclose(result.array(), expected, atol=1e-6)
    assert _trace.peaks(result) == [
        "2 'Eiffel': 1.00 at resid_post[0], at least half of it from resid_post[0] to "
        "resid_post[0]",
        "8 'of': 1.00 at resid_post[1], at least half of it from resid_post[1] to resid_post[2]",
    ]


def test_the_demo_turns_the_tone_and_draws_the_trace(server, toy, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "132")
    monkeypatch.setattr(_tone, "DOSES", (-2.0, 0.0, 2.0))  # the toy needs more than the demo model
    picture = tmp_path / "trace.png"
    assert main(["demo", "--target", server.target, "--out", str(picture)]) == 0
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    for prompt in _tone.NEUTRAL:
        words = prompt.split()
        assert [*words, "bad", *words, "so", *words, "good"] in lines
    assert "demo/joy = mean(joyful) - mean(gloomy) of resid_post[1], norm 1." in out
    assert "resid_post[2]: float32 [9, 5]" in out
    assert "The fact that makes it Paris is carried by" in out
    assert out.endswith(f"wrote {picture}\n")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [line for line in err.splitlines() if line[0].isdigit()] == [
        "1. tone: making a vector and continuing three prompts with it ...",
        "2. capture: every layer of a prompt with a fact ...",
        "3. causal trace: one row at a time of the corrupt prompt made clean ...",
    ]


def test_a_model_that_knows_no_such_fact_is_told_in_one_line(server, toy, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    toy.meanings = {}
    assert main(["demo", "--target", server.target, "--out", str(tmp_path / "x.png")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "rheostat: no other subject of equal length changes the model's answer"


@pytest.mark.parametrize("name", ["picture", "picture.txt", "none/picture.png", "folder.png"])
def test_a_file_that_can_hold_no_picture_is_refused_before_anything_runs(
    server, tmp_path, capsys, name
):
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    assert main(["demo", "--target", server.target, "--out", str(tmp_path / name)]) == 2
    problems = {"none/picture.png": "there is no folder", "folder.png": "it is a folder"}
    assert problems.get(name, "does not end like a picture") in capsys.readouterr().err
    assert server.asked == []
