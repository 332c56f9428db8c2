"""Records the site of each kernel node while a CUDA graph is captured.

Invariant: outside a recording, `note` does nothing. Recordings don't nest.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Recording(Protocol):
    """Receives the sites of captured kernels."""

    def note(self, site: int) -> None:
        """Assigns the last kernel captured on the current CUDA stream to `site`."""


class _Current:
    recording: Recording | None = None


def note(site: int) -> None:
    """Notifies the current recording, if any, that a site's kernel was captured."""
    if _Current.recording is not None:
        _Current.recording.note(site)


@contextmanager
def recording(recorder: Recording) -> Iterator[None]:
    """Makes `recorder` the current recording inside the `with` block."""
    if _Current.recording is not None:
        raise RuntimeError("a CUDA graph is already being recorded")
    _Current.recording = recorder
    try:
        yield
    finally:
        _Current.recording = None
