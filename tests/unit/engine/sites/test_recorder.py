"""Notes of captured kernels reach the recording that is on, and no other."""

import pytest

from rheostat_engine.sites.recorder import note, recording


class Notes:
    def __init__(self) -> None:
        self.sites: list[int] = []

    def note(self, site: int) -> None:
        self.sites.append(site)


def test_notes_go_to_the_recording_that_is_on() -> None:
    one, other = Notes(), Notes()
    note(1)
    with recording(one):
        note(2)
        note(3)
    note(4)
    with recording(other):
        note(5)
    assert (one.sites, other.sites) == ([2, 3], [5])


def test_recordings_do_not_nest_and_end_whatever_happens() -> None:
    notes = Notes()
    message = "^a CUDA graph is already being recorded$"
    with recording(notes), pytest.raises(RuntimeError, match=message), recording(Notes()):
        pass
    with recording(notes):
        note(1)
    assert notes.sites == [1]
