"""``rheostat serve`` says what it takes and what it does without."""

import re

import pytest

from rheostat._cli import main


def test_every_flag_says_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    flags = re.findall(r"^  (--[a-z-]+)(.*(?:\n    .*)?)$", told, re.MULTILINE)
    assert len(flags) > 20
    assert [flag for flag, help in flags if not re.search(r"\(default: [^)]+\)$", help)] == []
    assert re.search(r"--bank-mib MIB\s.*\(default: 256\)", told)
    assert re.search(r"--resume-window SECONDS\s.*\(default: 60\)", told)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--kv-cache-memory-mib=-4"], "--kv-cache-memory-mib must be 1 to 16777216, not -4"),
        (
            ["--sink", "disk"],
            '--sink: "disk" is not of the form name=plugin:key=value,key=value, as in '
            "disk=filesystem:root=/data/captures",
        ),
        (
            ["--sink", "disk=filesystem:root"],
            '--sink: "root" of the sink disk is not of the form key=value, as in '
            "disk=filesystem:root=/data/captures",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_flag(line, said, capsys):
    assert main(["serve", "demo", *line]) == 2
    assert capsys.readouterr().err == f"rheostat: {said}\n"


def test_a_policy_that_cannot_be_read_has_an_exit_code_of_its_own(capsys, tmp_path):
    path = tmp_path / "policy.json"
    path.write_text('{"policy": {"steer": {}}, "version": 1}')
    assert main(["serve", "demo", "--policy", str(path)]) == 11
    assert capsys.readouterr().err == (
        f"rheostat: --policy {path}: policy.steer: there is no such field, but steering, probes, "
        "rules. Correct the file\n"
    )
