"""Sinks as an operator writes them: name=plugin:key=value,key=value."""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from rheostat_server.sinks.protocol import SinkSettingsError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of sinks and plugins."""

_SIZE = re.compile(r"([0-9]+)(B|KiB|MiB|GiB)?")
_UNITS = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class SinkConfig(NamedTuple):
    """A sink to make."""

    name: str
    """What requests call it."""
    plugin: str
    """The entry point that makes it."""
    settings: Mapping[str, str]
    """What that is told."""


def parse_sink(text: str) -> SinkConfig:
    """A sink from "disk=filesystem:root=/data,layout=packed". A value may hold "=", but no comma.

    Raises:
        SinkSettingsError: it is not of this form.
    """
    name, equals, rest = text.partition("=")
    plugin, _, listed = rest.partition(":")
    if not equals or not NAME.fullmatch(name) or not NAME.fullmatch(plugin):
        raise SinkSettingsError(f'"{text}" is not of the form name=plugin:key=value,key=value')
    settings: dict[str, str] = {}
    for pair in filter(None, listed.split(",")):
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SinkSettingsError(f'"{pair}" of the sink {name} is not of the form key=value')
        if key in settings:
            raise SinkSettingsError(f"the sink {name} sets {key} twice")
        settings[key] = value
    return SinkConfig(name, plugin, settings)


def only_known(settings: Mapping[str, str], known: Collection[str]) -> None:
    """Refuses settings that do not exist.

    Raises:
        SinkSettingsError: one is not known.
    """
    unknown = sorted(set(settings) - set(known))
    if unknown:
        there = f"it has {', '.join(known)}" if known else "it has none"
        raise SinkSettingsError(f"there is no setting {', '.join(unknown)}; {there}")


def size_setting(settings: Mapping[str, str], key: str, default: int) -> int:
    """A number of bytes of at least 1: "1048576", "64MiB".

    Raises:
        SinkSettingsError: it is none.
    """
    if key not in settings:
        return default
    found = _SIZE.fullmatch(settings[key])
    size = int(found[1]) * _UNITS[found[2]] if found else 0
    if size < 1:
        raise SinkSettingsError(f"{key} is a number of bytes like 64MiB, not {settings[key]}")
    return size
