"""`tools/breaking` guards what is served, and leaves alone what is not served yet."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SERVED = {
    "a field's number": ("generation_service", "string request_id = 1;", "string request_id = 99;"),
    "a field's name": ("vector", "optional float bias = 2;", "optional float offset = 2;"),
    "a field that goes": ("types", "  optional uint32 layer = 2;\n", ""),
    "an rpc that goes": (
        "run_service",
        "  rpc DeleteRun(DeleteRunRequest) returns (DeleteRunResponse);\n",
        "",
    ),
    "an rpc that streams": (
        "run_service",
        "returns (ListRunsResponse)",
        "returns (stream ListRunsResponse)",
    ),
    "an enum's value": ("errors", "REASON_UNKNOWN_FIELD = 18", "REASON_STRANGE_FIELD = 18"),
}
"""Changes of what is served, each with a file and what is replaced there."""

UNSERVED = {
    "matrix": ("Tensor bias = 3;", "Tensor offsets = 9;"),
}
"""A change in every file of what is not served yet."""


@pytest.fixture(scope="module")
def template(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose main branch has the contract of today."""
    folder = tmp_path_factory.mktemp("repository")
    shutil.copytree(root / "proto", folder / "proto")
    shutil.copy(root / "buf.yaml", folder)
    (folder / "tools").mkdir()
    shutil.copy(root / "tools" / "breaking", folder / "tools")
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(folder, "the contract")
    git(folder, "checkout", "--quiet", "-b", "work")
    return folder


@pytest.fixture
def repository(template: Path, tmp_path: Path) -> Path:
    """A branch of it, on which nothing is changed yet."""
    return Path(shutil.copytree(template, tmp_path / "repository"))


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path, subject: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", subject)


def change(repository: Path, name: str, before: str, after: str) -> None:
    path = repository / "proto" / "rheostat" / "v1" / f"{name}.proto"
    text = path.read_text(encoding="utf-8")
    assert before in text, f"{name}.proto has changed: change this test with it"
    path.write_text(text.replace(before, after, 1), encoding="utf-8")


def breaking(repository: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/breaking"]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)


def first_paragraph(path: Path) -> str:
    """Of the comment that a file begins with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next(at for at, line in enumerate(lines) if line in ("//", 'syntax = "proto3";'))
    return " ".join(line.removeprefix("// ") for line in lines[:end])


@pytest.mark.parametrize("what", SERVED)
def test_a_change_of_what_is_served_fails(repository: Path, what: str) -> None:
    name, before, after = SERVED[what]
    change(repository, name, before, after)
    done = breaking(repository)
    assert done.returncode != 0
    assert f"{name}.proto" in done.stdout


def test_changes_of_all_that_is_not_served_yet_pass(repository: Path) -> None:
    for name, (before, after) in UNSERVED.items():
        change(repository, name, before, after)
    done = breaking(repository)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("buf breaking against ")


def test_a_file_that_was_not_served_may_go(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "main")
    name = "proto/rheostat/v1/later.proto"
    (repository / name).write_text(
        'syntax = "proto3";\npackage rheostat.v1;\nmessage Later {}\n', encoding="utf-8"
    )
    config = repository / "buf.yaml"
    before = config.read_text(encoding="utf-8")
    config.write_text(f"{before}    - {name}\n", encoding="utf-8")
    commit(repository, "a file that is not served yet")
    git(repository, "checkout", "--quiet", "-B", "work")
    (repository / name).unlink()
    config.write_text(before, encoding="utf-8")
    done = breaking(repository)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_addition_to_what_is_served_passes(repository: Path) -> None:
    change(
        repository,
        "engine_service",
        "message GetModelRequest {}",
        "message GetModelRequest {\n  // New.\n  bool short = 1;\n}",
    )
    assert breaking(repository).returncode == 0


def test_a_change_that_is_committed_to_main_itself_fails(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "main")
    change(repository, *SERVED["a field's number"])
    commit(repository, "a break")
    assert breaking(repository).returncode != 0


def test_of_several_commits_to_main_an_earlier_one_that_breaks_fails(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "main")
    change(repository, *SERVED["a field's number"])
    commit(repository, "a break")
    change(repository, "run_service", "// RunService:", "// RunService, of runs:")
    commit(repository, "something else")
    done = breaking(repository)
    assert done.returncode != 0
    assert "generation_service.proto" in done.stdout


def test_a_file_that_was_promised_later_is_guarded_from_then_on(repository: Path) -> None:
    """The earlier promise left it alone, and the commit before has its broken form."""
    git(repository, "checkout", "--quiet", "main")
    config = repository / "buf.yaml"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("    - proto/rheostat/v1/matrix.proto\n", ""), encoding="utf-8")
    before, after = UNSERVED["matrix"]
    change(repository, "matrix", before, after)
    commit(repository, "served, and redrawn for it")
    assert breaking(repository).returncode == 0
    change(repository, "matrix", after, before)
    commit(repository, "a break")
    change(repository, "run_service", "// RunService:", "// RunService, of runs:")
    commit(repository, "something else")
    done = breaking(repository)
    assert done.returncode != 0
    assert "matrix.proto" in done.stdout


def test_what_main_has_gained_since_is_not_missed_on_a_branch(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "main")
    change(
        repository,
        "engine_service",
        "message GetModelRequest {}",
        "message GetModelRequest {\n  // New.\n  bool short = 1;\n}",
    )
    commit(repository, "an addition")
    git(repository, "checkout", "--quiet", "work")
    change(repository, "run_service", "// RunService:", "// RunService, of runs:")
    commit(repository, "something else")
    assert breaking(repository).returncode == 0


def test_a_base_from_before_the_promise_is_not_compared_with(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "main")
    config = repository / "buf.yaml"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("- PACKAGE", "- WIRE_JSON"), encoding="utf-8")
    commit(repository, "before the promise")
    config.write_text(text, encoding="utf-8")
    change(repository, *SERVED["a field's number"])
    commit(repository, "the promise")
    done = breaking(repository)
    assert done.returncode == 0
    assert "the contract was reset since" in done.stdout


def test_a_file_may_change_in_the_commit_that_serves_it(repository: Path) -> None:
    config = repository / "buf.yaml"
    served = "proto/rheostat/v1/matrix.proto"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace(f"    - {served}\n", ""), encoding="utf-8")
    before, after = UNSERVED["matrix"]
    change(repository, "matrix", before, after)
    assert breaking(repository).returncode == 0
    commit(repository, "served")
    git(repository, "branch", "--quiet", "--force", "main", "HEAD")
    change(repository, "matrix", after, before)
    assert breaking(repository).returncode != 0


def test_without_a_main_branch_there_is_nothing_to_compare_with(repository: Path) -> None:
    git(repository, "branch", "--quiet", "--delete", "--force", "main")
    done = breaking(repository)
    assert (done.returncode, "no commit of main" in done.stdout) == (0, True)


def test_what_is_left_alone_is_exactly_what_is_marked_as_not_served(root: Path) -> None:
    _, _, rules = (root / "buf.yaml").read_text(encoding="utf-8").partition("breaking:")
    ignored = {line.strip("- ") for line in rules.splitlines() if line.endswith(".proto")}
    marked = {
        path.relative_to(root).as_posix()
        for path in (root / "proto" / "rheostat").rglob("*.proto")
        if "not served yet" in first_paragraph(path).lower()
    }
    assert ignored == marked
    assert {Path(path).stem for path in marked} == UNSERVED.keys()
