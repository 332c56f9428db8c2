"""A sweep is shown while it runs: to the caller's function, or in a notebook."""

import sys
import types

import numpy as np
import pytest

import rheostat
from rheostat import _notebook

from ..notebooks import KERNEL, notebook
from ..sweep_messages import cell, started, summary, texts

PAIR = rheostat.Pair([1, 2, 3], corrupt=[1, 9, 3], answer=[7])
CELLS = [cell(0, -2.0), cell(1, -2.0), cell(2, -2.0), cell(3, -1.0), cell(4, -2.25)]


@pytest.fixture
def scripted(server):
    server.on("Tokenize", texts)
    server.on("Sweep", [started(5), *CELLS, summary()])
    return server


@pytest.fixture
def unlimited(monkeypatch):
    """Without pauses."""
    monkeypatch.setattr(_notebook, "_INTERVAL", 0.0)
    monkeypatch.setattr(_notebook, "_PAUSE", 0.0)


@pytest.mark.usefixtures("scripted", "unlimited")
def test_the_cells_so_far_are_shown_and_at_the_end_the_whole(client):
    seen: list[rheostat.SweepResult] = []
    result = client.run(lambda engine: engine.sweep(PAIR, watch=seen.append))
    assert [int((~np.isnan(one.values)).sum()) for one in seen] == [0, 1, 2, 3, 4, 5, 5]
    assert seen[-1] is result
    assert result.tokens == ("a", "b", "c")
    *_, before, _ = seen
    assert (before.base(), np.isnan(before.noise[0].mean)) == (-2.0, True)  # the median
    assert np.isnan([before.clean[0], before.corrupt[0]]).all()
    assert before.top(1)[0].value == -1.0
    assert seen[0].base() == 0.0
    assert seen[0].top() == []
    assert result.base() == -2.0


@pytest.mark.parametrize(("took", "pause"), [(0.01, 0.4), (3.0, 12.0)])
def test_a_slow_function_is_called_less_often(monkeypatch, took, pause):
    now = 1000.0
    calls: list[float] = []
    monkeypatch.setattr(_notebook, "time", types.SimpleNamespace(monotonic=lambda: now))

    def show(_: object) -> None:
        nonlocal now
        calls.append(now)
        now += took

    watcher = _notebook.Watcher(show)
    watcher.offer(object)
    ended = now
    for later in (0.0, pause - 0.01, pause + 0.01):
        now = ended + later
        watcher.offer(object)
    assert calls == [1000.0, ended + pause + 0.01]


@pytest.mark.usefixtures("scripted", "unlimited")
def test_a_notebook_replaces_the_heatmap(client, monkeypatch):
    pytest.importorskip("matplotlib")
    output = notebook(monkeypatch, KERNEL)
    client.run(lambda engine: engine.sweep(PAIR, progress=False))
    assert len(output.shown) == 7
    assert all(one._repr_png_().startswith(b"\x89PNG") for one in output.shown)
    assert output.shown[-1]._repr_html_() is None
    assert "SweepResult(logprob: 5 of 2 x 3 cells" in repr(output.shown[-1])


@pytest.mark.usefixtures("scripted", "unlimited")
def test_a_notebook_without_matplotlib_shows_text(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    output = notebook(monkeypatch, KERNEL)
    client.run(lambda engine: engine.sweep(PAIR, progress=False))
    assert output.shown[-1]._repr_png_() is None
    assert "resid_post[1] at 0" in output.shown[-1]._repr_html_()


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("shell", [None, types.SimpleNamespace()], ids=["no shell", "a terminal"])
def test_outside_of_a_notebook_nothing_is_shown(client, monkeypatch, shell):
    output = notebook(monkeypatch, shell)
    client.run(lambda engine: engine.sweep(PAIR))
    assert output.shown == []


@pytest.mark.usefixtures("scripted")
def test_a_notebook_shows_nothing_if_told_so(client, monkeypatch):
    output = notebook(monkeypatch, KERNEL)
    client.run(lambda engine: engine.sweep(PAIR, watch=False, progress=False))
    assert output.shown == []
    seen = []
    client.run(lambda engine: engine.sweep(PAIR, watch=seen.append, progress=False))
    assert (output.shown, bool(seen)) == ([], True)


@pytest.mark.usefixtures("scripted")
def test_an_error_of_the_function_ends_the_sweep(client):
    def show(_: rheostat.SweepResult) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        client.run(lambda engine: engine.sweep(PAIR, watch=show))
