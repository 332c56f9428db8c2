"""``rheostat sweep`` on the real engine: its files hold what the client's sweep gives."""

import json
from pathlib import Path

import numpy as np
import pytest

import rheostat
from rheostat._cli import main

from .conftest import Server

pytestmark = pytest.mark.integration

CLEAN = "The Eiffel Tower is in the city of"
CORRUPT = "The Willis Tower is in the city of"


def test_the_command_gives_what_the_client_gives(
    server: Server, engine: rheostat.Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document, saved = tmp_path / "a.json", tmp_path / "a.npz"
    line = ["sweep", CLEAN, "--corrupt", CORRUPT, "--answer", " Paris", "--foil", " Chicago"]
    line += ["--layers", "0,5", "--positions", "1-3,-1", "--keep-runs", "60"]
    files = ["--json", str(document), "--save", str(saved), "--target", server.target]
    assert main([*line, *files]) == 0
    grade = "recovered logit_difference"
    where = rheostat.window(1, 4) | rheostat.positions(-1)
    pair = rheostat.Pair(CLEAN, corrupt=CORRUPT, answer=" Paris", foil=" Chicago")
    expected = engine.sweep(pair, layers=[0, 5], where=where, grades=grade)
    result = rheostat.SweepResult.load(saved)
    assert (result.sites, result.labels) == (expected.sites, expected.labels)
    np.testing.assert_allclose(result.array(), expected.array(), atol=2e-3)
    assert result.array()[1, -1] == pytest.approx(1, abs=2e-3)  # the last row decides
    found = json.loads(document.read_text())
    assert found["grades"][0]["values"] == result.array().tolist()
    table = capsys.readouterr().out.splitlines()
    assert table[0] == grade
    assert table[1].split()[0] == result.columns[0]
    assert table[2].split()[::4] == ["5", "1.00"]
    for run_id in result.run_ids:
        engine.delete_run(run_id)
    assert result.run_ids
