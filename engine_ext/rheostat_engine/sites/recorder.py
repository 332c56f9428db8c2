"""Which kernel nodes of a CUDA graph belong to which site, noted while the graph is captured.

Invariant: outside of a recording, `note` does nothing; recordings don't nest.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Recording(Protocol):
    """Receives the sites of captured kernels."""

    def note(self, site: int) -> None:
        """The last kernel that was captured on the current stream belongs to `site`."""


class _Current:
    recording: Recording | None = None


def note(site: int) -> None:
    """Notifies the current recording, if there is one, that a site's kernel was captured."""
    if _Current.recording is not None:
        _Current.recording.note(site)


@contextmanager
def recording(recorder: Recording) -> Iterator[None]:
    """Notifies `recorder` in the `with` block."""
    if _Current.recording is not None:
        raise RuntimeError("a CUDA graph is already being recorded")
    _Current.recording = recorder
    try:
        yield
    finally:
        _Current.recording = None
