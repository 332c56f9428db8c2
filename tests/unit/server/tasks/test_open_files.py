"""Few descriptors are enough for many files, whoever uses them at the same time."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rheostat_server.tasks.open_files import OpenFiles


def opener(path: Path) -> Callable[[], int]:
    return lambda: os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_those_used_longest_ago_are_closed_and_opened_again(tmp_path: Path) -> None:
    before, files = descriptors(), OpenFiles(4)
    for round_ in range(3):
        for number in range(20):
            with files.use(number, opener(tmp_path / f"{number}")) as descriptor:
                os.write(descriptor, str(round_).encode())
            assert descriptors() <= before + 5
    assert {(tmp_path / f"{number}").read_text() for number in range(20)} == {"012"}
    files.close()
    assert descriptors() == before


def test_one_that_stays_open_is_not_opened_again(tmp_path: Path) -> None:
    files, opened = OpenFiles(4), []
    for number in (0, 1, 2, 3, 0, 3, 1):
        with files.use(number, lambda: opened.append(1) or opener(tmp_path / "one")()):
            pass
    assert len(opened) == 4
    files.close()


def test_what_is_in_use_stays_open_however_many_there_are(tmp_path: Path) -> None:
    files = OpenFiles(1)
    with (
        files.use("a", opener(tmp_path / "a")) as a,
        files.use("b", opener(tmp_path / "b")) as b,
        files.use("c", opener(tmp_path / "c")),
    ):
        files.close_file("b")
        for descriptor in (a, b):
            os.write(descriptor, b"there")
    assert len(files) == 1
    assert (tmp_path / "b").read_text() == "there"
    files.close()


def test_a_file_that_cannot_be_opened_holds_nothing(tmp_path: Path) -> None:
    files = OpenFiles(2)
    with pytest.raises(IsADirectoryError), files.use("a", opener(tmp_path)):
        pass
    assert len(files) == 0


def test_threads_never_meet_a_closed_descriptor(tmp_path: Path) -> None:
    files = OpenFiles(2)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            number = rng.randrange(8)
            with files.use(number, opener(tmp_path / f"{number}")) as descriptor:
                os.write(descriptor, b".")
            if rng.random() < 0.1:
                files.close_file(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 8 * 300
    files.close()


def test_a_process_takes_the_descriptors_that_it_may_have() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 700));"
        "from rheostat_server.tasks.open_files import raise_descriptor_limit as r;"
        "print(r(), r(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["700", "700", "700", "700"]
