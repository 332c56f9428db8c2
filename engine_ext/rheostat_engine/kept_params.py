"""Marks sampling parameters as copies of others; see `adapters.checked_params`.

It is importable without vLLM.
"""

KEPT_PARAMS = "_rheostat_kept"
"""The attribute of a copy with the parameters of which it is a copy."""


def mark_copy(params: object, kept: object) -> None:
    """Marks parameters as a copy of others.

    The copy may differ in its seed and its extra arguments alone. The others must not change any
    more.
    """
    setattr(params, KEPT_PARAMS, kept)
