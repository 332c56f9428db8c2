"""``rheostat global``: the server-wide steering, which acts on every request."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rheostat._cli._common import (
    CommandError,
    Subparsers,
    add_force,
    add_target,
    check_writable,
    connected,
    writing,
)
from rheostat._cli._listing import add_json, print_json
from rheostat._cli._ops import add_ops, steering


def add(commands: Subparsers) -> None:
    """Register the command and its own subcommands."""
    parser = commands.add_parser(
        "global",
        help="set, get, export and clear the server-wide steering",
        description="Set, get, export and clear the server-wide steering, which acts on every "
        "request.",
        example="rheostat global set --scale joy:0\nrheostat global get\nrheostat global clear",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION")

    setting = actions.add_parser(
        "set",
        help="replace it by these ops, for requests admitted from now on",
        description="Replace the server-wide steering by these ops, for requests admitted from now "
        "on. Rules of the policy stay.",
        example="rheostat global set --scale joy:0 --expected-version 3",
    )
    add_ops(setting)
    setting.set_defaults(run=run_set)

    getting = actions.add_parser(
        "get",
        help="show it with its version",
        description="Show the server-wide steering and its version.",
        example="rheostat global get --json",
    )
    add_json(getting)
    getting.set_defaults(run=run_get)

    exporting = actions.add_parser(
        "export",
        help="save the policy to a file for rheostat serve --policy",
        description="Save the policy to a JSON file: interventions, probes and rules, with the "
        "numbers of their vectors, and the version. A server that is started with rheostat serve "
        "--policy FILE enforces it from the first request on.",
        example="rheostat global export policy.json",
    )
    exporting.add_argument("file", metavar="FILE", type=Path)
    add_force(exporting)
    exporting.set_defaults(run=run_export)

    clearing = actions.add_parser(
        "clear",
        help="remove it",
        description="Remove the server-wide steering, and the rules of the policy.",
        example="rheostat global clear",
    )
    clearing.set_defaults(run=run_clear)

    for action in (setting, clearing):
        action.add_argument(
            "--expected-version",
            type=int,
            metavar="VERSION",
            help="fail if another version is in force (default: replace any)",
        )
    for action in (setting, getting, exporting, clearing):
        add_target(action)


def run_set(args: argparse.Namespace) -> int:
    """Print the new version."""
    if not args.ops:
        raise CommandError("no op is given; to remove all, use: rheostat global clear", 2)
    with connected(args) as engine:
        before = engine.steering.get_global()
        expected = args.expected_version
        if before.rules and expected is None:
            expected = before.version  # fails rather than replace rules that are set meanwhile
        version = engine.steering.set_global(steering(engine, args), expected, rules=before.rules)
    print(f"version {version}")
    return 0


def run_get(args: argparse.Namespace) -> int:
    """Print one line per intervention and rule."""
    with connected(args) as engine:
        steering = engine.steering.get_global()
    if args.json:
        interventions = [str(intervention) for intervention in steering.interventions]
        rules = [rule.name for rule in steering.rules]
        print_json({**vars(steering), "interventions": interventions, "rules": rules})
    else:
        print(steering)
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Write the file, and print the version of the policy."""
    check_writable(args.file, args.force)
    with connected(args) as engine:
        text = engine.steering.export_global()
    with writing(args.file) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(f"{args.file}  version {json.loads(text)['version']}")
    return 0


def run_clear(args: argparse.Namespace) -> int:
    """Print the new version."""
    with connected(args) as engine:
        print(f"version {engine.steering.set_global(None, args.expected_version)}")
    return 0
