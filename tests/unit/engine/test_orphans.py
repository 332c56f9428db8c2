"""An engine whose server is gone ends."""

import multiprocessing
import os
import signal
import threading

import pytest

from rheostat_engine.adapters import orphans


def test_a_process_that_is_nobodys_child_watches_nobody() -> None:
    before = threading.active_count()
    assert multiprocessing.parent_process() is None
    orphans.end_with_parent()
    assert threading.active_count() == before


def test_once_the_parent_is_another_the_process_is_told_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[int, int]] = []
    parents = iter([7, 7, 1])
    monkeypatch.setattr(orphans.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(orphans.os, "kill", lambda pid, number: told.append((pid, number)))
    monkeypatch.setattr(orphans, "_LOOK", 0.0)
    orphans._watch(7)
    assert told == [(os.getpid(), signal.SIGTERM)]
