"""What every result says about where it comes from."""

import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rheostat_bench.machine import circumstances, commit, kv_bytes
from rheostat_bench.shapes import write_shape


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def test_a_result_names_the_commit_and_whether_the_sources_differ_from_it(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    source = tmp_path / "source.py"
    source.write_text("1\n")
    git(tmp_path, "add", "source.py")
    git(tmp_path, "commit", "--quiet", "--message=one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit(tmp_path) == head
    source.write_text("2\n")
    assert commit(tmp_path) == f"{head}-dirty"
    installed = tmp_path / "site-packages"
    installed.mkdir()
    assert commit(installed) is None


def test_a_folder_outside_of_git_has_no_commit(tmp_path: Path) -> None:
    assert commit(tmp_path) is None


def test_a_result_has_the_cores_and_the_time() -> None:
    about = circumstances()
    assert about["cores"] == os.cpu_count()
    taken = datetime.fromisoformat(str(about["time"]))
    assert abs(datetime.now(UTC) - taken) < timedelta(minutes=1)


def test_kv_memory_holds_keys_and_values_of_all_layers(tmp_path: Path) -> None:
    # 36 layers, 8 heads of 128 numbers of 2 bytes each
    assert kv_bytes(write_shape("qwen3-8b", tmp_path), 1000) == 1000 * 147_456
