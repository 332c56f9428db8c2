"""The progress bar of a sweep, in a terminal and in a notebook."""

import io
import types

import grpc
import pytest

import rheostat
from rheostat import _notebook
from rheostat._sweeps import progress
from rheostat._sweeps.progress import Progress, progress_of

from ..conftest import Refusal
from ..notebooks import KERNEL, notebook
from ..sweep_messages import cell, started, summary, texts

PAIR = rheostat.Pair([1, 2, 3], corrupt=[1, 9, 3], answer=[7])
CELLS = [cell(0, -2.0), cell(1, -2.0), cell(2, -2.0), cell(3, -1.0), cell(4, -2.25)]


class Terminal(io.StringIO):
    """Stderr of a terminal."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What the line showed, one after another."""
        return [one.removesuffix("\n") for one in self.getvalue().split("\r\x1b[K")[1:]]


@pytest.fixture
def scripted(server):
    server.on("Tokenize", texts)
    server.on("Sweep", [started(5), *CELLS, summary()])
    return server


@pytest.fixture(autouse=True)
def _unlimited(monkeypatch) -> None:
    monkeypatch.setattr(_notebook, "_INTERVAL", 0.0)
    monkeypatch.setattr(_notebook, "_PAUSE", 0.0)


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=stream))
    monkeypatch.setenv("COLUMNS", "100")
    return stream


@pytest.mark.usefixtures("scripted")
def test_a_terminal_shows_a_bar_that_fills(client, terminal) -> None:
    client.run(lambda engine: engine.sweep(PAIR))
    lines = terminal.lines()
    counts = [int(line.partition("%  ")[2].partition(" of 5 cells")[0]) for line in lines]
    assert counts == [0, 1, 2, 3, 4, 5, 5]
    assert [line.index(".") - line.index("[") - 1 for line in lines[:5]] == [0, 4, 9, 14, 19]
    assert f"sweep [{24 * '#'}] 100%  5 of 5 cells, " in lines[-1]
    assert lines[-1].endswith(" s in all")
    assert terminal.getvalue().count("\n") == 1
    assert terminal.getvalue().endswith("\n")


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("chosen", ["off", "a function"])
def test_who_chooses_otherwise_gets_no_bar(client, terminal, chosen) -> None:
    told: list[tuple[int, int]] = []
    own = False if chosen == "off" else lambda *counts: told.append(counts)
    client.run(lambda engine: engine.sweep(PAIR, progress=own))
    assert terminal.getvalue() == ""
    assert told == ([] if chosen == "off" else [(number, 5) for number in range(6)])


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize("closed", [False, True])
def test_a_log_and_a_closed_stderr_get_no_bar(client, monkeypatch, closed) -> None:
    log = io.StringIO()
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=log))
    if closed:
        log.close()
    client.run(lambda engine: engine.sweep(PAIR))
    assert closed or log.getvalue() == ""


@pytest.mark.usefixtures("scripted")
def test_a_notebook_shows_a_bar_above_the_heatmap(client, monkeypatch, terminal) -> None:
    output = notebook(monkeypatch, KERNEL)
    client.run(lambda engine: engine.sweep(PAIR))
    bars = [one for one in output.shown if isinstance(one, Progress)]
    assert output.shown[0] is bars[0]
    assert len(output.shown) > len(bars)  # the heatmap
    assert [(bar.done, bar.total) for bar in bars] == [*((n, 5) for n in range(6)), (5, 5)]
    assert bars[2]._repr_html_().startswith('<progress value="2" max="5"></progress> 2 of 5 cells')
    assert repr(bars[-1]).startswith(f"sweep [{24 * '#'}] 100%")
    assert terminal.getvalue() == ""


def test_the_line_ends_where_a_sweep_fails_and_the_next_has_one(client, scripted, terminal) -> None:
    refusal = Refusal.of(grpc.StatusCode.FAILED_PRECONDITION, "no", "REASON_NO_CONTRAST")
    scripted.on("Sweep", [started(5), *CELLS[:2], refusal], [started(5), *CELLS, summary()])
    with pytest.raises(rheostat.Refused):
        client.run(lambda engine: engine.sweep(PAIR))
    assert "2 of 5 cells" in terminal.lines()[-1]
    assert terminal.getvalue().endswith("\n")
    client.run(lambda engine: engine.sweep(PAIR))
    assert "5 of 5 cells" in terminal.lines()[-1]


def test_of_sweeps_at_the_same_time_one_has_the_line(terminal) -> None:
    with progress_of(None) as first, progress_of(None) as second:
        assert first is not None
        assert second is None
        first(1, 4)
    with progress_of(None) as third:
        assert third is not None
    assert len(terminal.lines()) == 2


def test_cells_of_a_checkpoint_do_not_count_as_fast(terminal, monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now))
    with progress_of(None) as told:
        assert told is not None
        now += 2.0
        told(900, 1000)
        now += 8.0
        told(920, 1000)
        now += 190.0
        told(1000, 1000)
    assert [line.partition("%  ")[2] for line in terminal.lines()] == [
        "900 of 1000 cells",
        "920 of 1000 cells, 2.0 cells/s, 40 s left",
        "1000 of 1000 cells, 0.5 cells/s",
        "1000 of 1000 cells, 0.5 cells/s, 3:20 in all",
    ]


def test_a_narrow_terminal_never_wraps(terminal, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    with progress_of(None) as told:
        assert told is not None
        told(1, 100_000)
    assert {len(line) for line in terminal.lines()} == {19}


def test_a_sweep_of_no_cells_is_done() -> None:
    assert str(Progress(0, 0, 0.0)) == f"sweep [{24 * '#'}] 100%  0 of 0 cells"
    assert 'max="1"' in Progress(0, 0, 0.0)._repr_html_()


@pytest.mark.parametrize(("seconds", "text"), [(59.4, "59 s"), (61, "1:01"), (3723, "1:02:03")])
def test_times_are_short(seconds: float, text: str) -> None:
    assert str(Progress(1, 1, 0.0, seconds)).endswith(f"{text} in all")
