"""``rheostat subscribe`` against a real server: what it prints, keeps and refuses."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rheostat._cli import main, subscribe
from rheostat._subscriptions.events import SubscriptionEvent
from rheostat._subscriptions.subscription import Subscription

from ...server.fakes import ScriptedBackend
from ..rows_server import RowsServer, expected

SITES = ["--points", "resid_post", "--layers", "0-1"]


def subscribed(running: RowsServer, act: Callable[[], object], *line: str) -> int:
    """The exit code of the command, which is given something to show once it stands."""

    def ask() -> None:
        while not running.ask(len):
            time.sleep(0.01)
        act()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        return main(["subscribe", "--target", running.target, *SITES, *line])
    finally:
        asking.join()


def test_every_event_is_a_line(running, capsys):
    assert subscribed(running, lambda: running.generate("a"), "--every", "--limit", "1") == 0
    out = capsys.readouterr().out.splitlines()
    norm = np.mean([np.linalg.norm(row) for row in expected("a", 0, 1).values()])
    assert out == [
        f"a sample 0 resid_post[0] resid_post[1] at 0-4: mean norm {norm:.4g}",
        "a end: 10 rows; length",
    ]
    assert running.ask(len) == 0


def test_requests_are_chosen_by_id_and_by_label_and_tokens_by_phase(running, capsys):
    def ask() -> None:
        running.generate("a", labels={"team": "red", "run": "1"})
        running.generate("b", labels={"team": "red", "run": "2"})

    labels = ["--label", "team=red", "--label", "run=2"]
    assert subscribed(running, ask, *labels, "--where", "generated", "--limit", "1") == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "b sample 0 resid_post[0] resid_post[1] at 3-4",
        "b end",
    ]
    assert subscribed(running, ask, "--request", "a", "--request", "x", "--limit", "1") == 0
    assert "a end: 10 rows" in capsys.readouterr().out


def test_rows_that_are_lost_are_shown(starter, capsys):
    running = starter(ScriptedBackend(lost_positions=frozenset({1, 3})))
    line = ["--every", "--overload", "drop_newest", "--limit", "1"]
    assert subscribed(running, lambda: running.generate("a"), *line) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "a sample 0 lost 4 rows at 1, 3",
        "a end: 6 rows, 4 lost; length",
    ]


def test_rows_are_kept_in_a_file(running, tmp_path, capsys):
    file = tmp_path / "rows.npz"
    line = ["--every", "--limit", "2", "--out", str(file)]
    assert subscribed(running, lambda: [running.generate(n) for n in "ab"], *line) == 0
    kept = np.load(file)
    for name in "ab":
        for layer in (0, 1):
            table = f"{name}/resid_post.{layer}"
            assert kept[f"{table}.rows"].tolist() == list(expected(name, layer).values())
            assert kept[f"{table}.positions"].tolist() == [0, 1, 2, 3, 4]
            assert kept[f"{table}.token_ids"].tolist() == [10, 11, 12, 13, 14]
            assert not kept[f"{table}.samples"].any()
            assert not kept[f"{table}.baseline"].any()
    assert (
        main(["subscribe", "--target", running.target, *SITES, "--every", "--out", str(file)]) == 2
    )
    assert "exists already; --force replaces it" in capsys.readouterr().err


def test_an_interruption_ends_it_at_the_server_and_keeps_what_came(running, tmp_path, monkeypatch):
    def interrupted(subscription: Subscription, *_: object) -> Iterator[SubscriptionEvent]:
        running.generate("a")
        yield next(subscription)
        raise KeyboardInterrupt

    monkeypatch.setattr(subscribe, "until_limit", interrupted)
    file = tmp_path / "rows.npz"
    assert main(
        ["subscribe", "--target", running.target, *SITES, "--every", "--out", str(file)]
    ) == 130  # fmt: skip
    assert running.ask(len) == 0
    assert "a/resid_post.0.rows" in np.load(file)


def test_rows_that_cannot_be_written_fail_in_one_line(running, tmp_path, capsys, monkeypatch):
    def full(file, **_: object) -> None:
        file.write(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    file = tmp_path / "rows.npz"
    file.write_text("mine")
    line = ["--every", "--limit", "1", "--out", str(file), "--force"]
    assert subscribed(running, lambda: running.generate("a"), *line) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"rheostat: cannot write {file}: No space left on device"
    assert (file.read_text(), os.listdir(tmp_path)) == ("mine", [file.name])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ([], "one of the arguments --request --label --every is required"),
        (["--every", "--label", "a=b"], "not allowed with"),
        (["--label", "team"], "'team' is not KEY=VALUE"),
        (["--every", "--limit", "0"], "'0' is not a number of requests"),
        (["--every", "--where", "nowhere"], "'nowhere' is neither prompt, generated, all nor"),
    ],
)
def test_a_wrong_line_exits_with_2(line, told, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["subscribe", "--target", "localhost:1", *SITES, *line])
    assert raised.value.code == 2
    assert told in capsys.readouterr().err


def test_a_file_that_could_not_be_written_at_the_end_is_refused_at_the_start(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "file").touch()

    def refused(file: Path) -> str:
        line = ["subscribe", "--target", "localhost:1", *SITES, "--every", "--out", str(file)]
        assert main(line) == 2
        return capsys.readouterr().err.strip()

    absent = tmp_path / "absent" / "rows.npz"
    assert refused(absent).endswith(
        f"{absent} cannot be written: there is no folder {absent.parent}"
    )
    assert "there is no folder" in refused(tmp_path / "file" / "rows.npz")
    assert refused(tmp_path / "folder.npz").endswith("it is a folder")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert refused(tmp_path / "rows.npz").endswith("it is read-only, or its folder is")
    # Replacing a file needs its folder, here the folder of the file that the link points to.
    real = tmp_path / "real"
    real.mkdir()
    (real / "rows.npz").touch()
    (tmp_path / "link.npz").symlink_to(real / "rows.npz")
    monkeypatch.setattr(os, "access", lambda path, mode: path != real)
    assert refused(tmp_path / "link.npz").endswith("it is read-only, or its folder is")


def test_a_file_of_another_kind_is_refused(capsys):
    assert main(["subscribe", "--target", "localhost:1", *SITES, "--every", "--out", "x.npy"]) == 2
    assert "does not end in .npz" in capsys.readouterr().err
