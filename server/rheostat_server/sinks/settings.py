"""Parses the settings of a sink: name=plugin:key=value,key=value."""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from rheostat_server.sinks.protocol import SinkSettingsError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of sinks and plugins."""

EXAMPLE = "disk=filesystem:root=/data/captures"
"""A sink as `parse_sink` reads it, for errors."""

_SIZE = re.compile(r"([0-9]+)(B|KiB|MiB|GiB)?")
_UNITS = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class SinkConfig(NamedTuple):
    """The configuration of a sink."""

    name: str
    """Its name in requests."""
    plugin: str
    """The name of its entry point."""
    settings: Mapping[str, str]
    """The settings for the plugin."""


def parse_sink(text: str) -> SinkConfig:
    """Parses "disk=filesystem:root=/data,layout=packed". Values may contain "=", but no comma.

    Raises:
        SinkSettingsError: the text has another form.
    """
    name, equals, rest = text.partition("=")
    plugin, _, listed = rest.partition(":")
    if not equals or not NAME.fullmatch(name) or not NAME.fullmatch(plugin):
        raise SinkSettingsError(
            f'"{text}" is not of the form name=plugin:key=value,key=value, as in {EXAMPLE}'
        )
    settings: dict[str, str] = {}
    for pair in filter(None, listed.split(",")):
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SinkSettingsError(
                f'"{pair}" of the sink {name} is not of the form key=value, as in {EXAMPLE}'
            )
        if key in settings:
            raise SinkSettingsError(f"the sink {name} sets {key} twice")
        settings[key] = value
    return SinkConfig(name, plugin, settings)


def only_known(settings: Mapping[str, str], known: Collection[str]) -> None:
    """Refuses settings that do not exist.

    Raises:
        SinkSettingsError: a setting does not exist.
    """
    unknown = sorted(set(settings) - set(known))
    if unknown:
        existing = ", ".join(known) or "none"
        raise SinkSettingsError(f"there is no setting {', '.join(unknown)}; it has {existing}")


def size_setting(settings: Mapping[str, str], key: str, default: int) -> int:
    """A number of bytes of at least 1: "1048576", "64MiB".

    Raises:
        SinkSettingsError: it is not a number of bytes.
    """
    if key not in settings:
        return default
    match = _SIZE.fullmatch(settings[key])
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if size < 1:
        raise SinkSettingsError(f"{key} is a number of bytes like 64MiB, not {settings[key]}")
    return size
