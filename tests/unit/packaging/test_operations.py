"""The page on operating a server: what it says about a proxy covers every rpc that is served."""

import re
from importlib import import_module

from ...documents import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
_SERVICE = re.compile(r"`(\w+Service)`: ((?:`\w+` ?)+)")
_ROLES = ("any", "generate", "observe", "steer_global", "admin")


def roles() -> dict[str, str]:
    """The role of each method, as `Service/Method`, in the table of the section on proxies."""
    section = PAGE.partition("\n## Behind a proxy\n")[2]
    found: dict[str, str] = {}
    for line in section.splitlines():
        role, _, rest = line.strip("| ").partition(" | ")
        if line.startswith("|") and role in _ROLES:
            for service, methods in _SERVICE.findall(rest.partition(" | ")[0]):
                for method in methods.replace("`", "").split():
                    name = f"{service}/{method}"
                    assert name not in found
                    found[name] = role
    return found


def test_a_proxy_is_told_the_role_of_every_method_that_is_served() -> None:
    ignored = (ROOT / "buf.yaml").read_text(encoding="utf-8")
    served = {
        f"{service.name}/{method.name}"
        for path in (ROOT / "proto" / "rheostat" / "v1").glob("*_service.proto")
        if path.relative_to(ROOT).as_posix() not in ignored
        for service in import_module(
            f"rheostat_wire.v1.{path.stem}_pb2"
        ).DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert roles().keys() == served


def test_the_roles_are_those_that_the_protos_name() -> None:
    """A service's comment names its role, and the methods with another one."""
    found, seen = roles(), set()
    for path in (ROOT / "proto" / "rheostat" / "v1").glob("*_service.proto"):
        text = re.sub(r"\n\s*// ?", " ", path.read_text(encoding="utf-8"))
        for comment, service in re.findall(r"Roles?: ([^\n]*?)\s*service (\w+)", text):
            own = re.match(r"\w+", comment)
            assert own is not None
            seen.add(service)
            others = dict(re.findall(r"(\w+): (\w+)", comment))
            for name, role in found.items():
                if name.startswith(f"{service}/"):
                    assert role == others.get(name.partition("/")[2], own[0]), name
    assert seen >= {name.partition("/")[0] for name in found}
