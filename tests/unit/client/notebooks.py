"""IPython, as a notebook or a terminal runs it."""

import sys
import types


class Output:
    """A notebook's output."""

    def __init__(self) -> None:
        self.shown: list[object] = []

    def display(self, shown: object, *, display_id: bool) -> "Output":
        assert display_id
        self.shown.append(shown)
        return self

    def update(self, shown: object) -> None:
        self.shown.append(shown)


def notebook(monkeypatch, shell: object) -> Output:
    """IPython as ``shell`` runs it."""
    output = Output()
    ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    ipython.get_ipython = lambda: shell
    ipython.version_info = (9, 0)  # matplotlib asks for it
    display.display = output.display
    for module in (ipython, display):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return output


KERNEL = types.SimpleNamespace(kernel=object())
