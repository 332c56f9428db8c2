"""The pages: every block is run by the tests or says why not, and every link leads somewhere."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

from rheostat_engine.worker.signals import WAITING_STEPS
from rheostat_wire import v1
from rheostat_wire.v1 import errors_pb2

from ...documents import PAGES, ROOT, Block, Page, blocks_of, differences, problems

_LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_is_run_or_says_why_not(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [problem for block in blocks_of(page, text) for problem in problems(block)] == []


def test_what_a_closed_watch_of_summaries_may_lack_is_said_wherever_they_are_described() -> None:
    lacking = f"may lack their last {WAITING_STEPS} tokens"
    for page in ("docs/monitoring.md", "proto/rheostat/v1/monitor_service.proto"):
        assert lacking in re.sub(r"\s+(// )?", " ", (ROOT / page).read_text(encoding="utf-8"))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    fenced = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        for heading in _HEADING.findall(fenced)
    }


def broken(page: str) -> Iterator[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in _LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (
            anchor and anchor not in anchors(target.read_text(encoding="utf-8"))
        ):
            yield link


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: str) -> None:
    assert list(broken(page)) == []


JSON_NAME = re.compile(r"(?!cuda)[a-z]+[0-9]?(?:[A-Z][a-z0-9]+)+")
"""How a field reads in JSON: `requestId`. Names of CUDA's functions look alike."""
_CODE = re.compile(r"`([^`]+)`")


def names(descriptor: Descriptor) -> Iterator[str]:
    """The names of a message's fields in JSON, and those of the messages in it."""
    yield from (field.json_name for field in descriptor.fields)
    for nested in descriptor.nested_types:
        yield from names(nested)


def contract() -> tuple[set[str], set[str]]:
    """Names of fields in JSON, and reasons."""
    fields: set[str] = set()
    modules = [module.name for module in pkgutil.iter_modules(v1.__path__)]
    for module in modules:
        if module.endswith("_pb2"):
            file = importlib.import_module(f"{v1.__name__}.{module}").DESCRIPTOR
            for message in file.message_types_by_name.values():
                fields.update(names(message))
    return fields, set(errors_pb2.Reason.keys())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_fields_and_reasons_of_the_contract_alone(page: str) -> None:
    fields, reasons = contract()
    text = (ROOT / page).read_text(encoding="utf-8")
    fenced = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    words = {word for code in _CODE.findall(fenced) for word in re.findall(r"\w+", code)}
    assert {word for word in words if JSON_NAME.fullmatch(word)} <= fields
    assert {word for word in words if re.fullmatch(r"REASON_[A-Z_]*[A-Z]", word)} <= reasons


def test_the_page_on_the_wire_has_every_reason_beside_its_code() -> None:
    protos = (ROOT / "proto" / "rheostat" / "v1" / "errors.proto").read_text(encoding="utf-8")
    comment = r"// ([A-Z_]+)[,.].*\n(?:^ *//.*\n)* *REASON_(\w+) = "
    page = (ROOT / "docs" / "wire.md").read_text(encoding="utf-8")
    table = page.partition("\n## Errors\n")[2].partition("\n## ")[0]
    listed = [
        (code.strip(" `"), reason)
        for line in table.splitlines()
        if line.startswith("| `")
        for codes, reasons in [line.strip("| ").split(" | ")]
        for code, its_reasons in zip(codes.split(" · "), reasons.split(" · "), strict=True)
        for reason in re.findall(r"`(\w+)`", its_reasons)
    ]
    assert sorted(listed) == sorted(re.findall(comment, protos, re.MULTILINE))


TEXT = """\
Intro.

```python
one()
```

It prints:

```text
1
```

<!-- not run: no GPU -->
```sh
two
```

* a list

    with a paragraph

Words.

    three()

```
four
```

```json
{}
```
"""


def test_blocks_are_found_with_their_lines_languages_and_reasons() -> None:
    found = [(one.line, one.language, one.code, one.reason) for one in blocks_of("p", TEXT)]
    assert found == [
        (4, "python", "one()\n", ""),
        (10, "text", "1\n", ""),
        (15, "sh", "two\n", "no GPU"),
        (24, "indented", "    three()", ""),
        (27, "", "four\n", ""),
        (31, "json", "{}\n", ""),
    ]
    complaints = [len(problems(one)) for one in blocks_of("p", TEXT)]
    assert complaints == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("claimed", "printed", "missing"),
    [
        ("a\nb\n", "x\na\ny\nb\nz\n", []),
        ("b\na\n", "a\nb\n", ["a"]),
        ("norm 9.31, 3 rows", "norm 9.32, 3 rows", []),
        ("norm 9.31", "norm 9.9", ["norm 9.31"]),
        ("3 rows", "5 rows", ["3 rows"]),
        ("run ab12cd34ef56", "run 0123456789abcdef", []),
        ("a line that goes...", "a line that goes on and on", []),
        ("...\nend", "many\nlines\nend", []),
        ("(16, 128)", "(16, 128)", []),
        ("layer 3", "layer 4", ["layer 3"]),
        ("text", "texts", ["text"]),
    ],
)
def test_a_claimed_output_is_compared_with_the_tolerance(claimed, printed, missing) -> None:
    assert differences(claimed, printed) == missing


def block(language: str, code: str, reason: str = "") -> Block:
    return Block("p", 1, language, code, reason)


def test_the_blocks_of_a_page_share_names_functions_and_a_folder(tmp_path: Path) -> None:
    page = Page(tmp_path, {"OLD": "new"}, {"PATH": "/bin:/usr/bin"})
    page.run(block("python", "x = 'OLD'\nopen('file', 'w').write(x)\n"))
    assert page.run(block("python", "print(x)\n")) == "new\n"
    page.run(block("text", "new\n"))
    page.run(block("sh", "say() { cat $1; }\n"))
    assert page.run(block("sh", "say file\n")) == "new"
    page.run(block("sh", "exit 3\n", "it fails"))
    page.run(block("text", "of a block that is not run\n"))
    with pytest.raises(AssertionError, match=r"p:1: NameError: name 'y'"):
        page.run(block("python", "y\n"))
    with pytest.raises(AssertionError, match=r"p:1: exit code 3"):
        page.run(block("sh", "exit 3\ntrue\n"))
    page.run(block("python", "print(1)\n"))
    with pytest.raises(AssertionError, match=r"not printed: \['3'\]"):
        page.run(block("text", "3\n"))


def test_a_block_may_await(tmp_path: Path) -> None:
    page = Page(tmp_path, {}, {})
    code = "import asyncio\nawait asyncio.sleep(0)\nprint('slept')\n"
    assert page.run(block("python", code)) == "slept\n"
