"""No credential of a URL reaches a message, a log, a manifest or a report, whatever its form."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.cli import main
from regress.credential_redaction import redacted, redacted_tree, redacted_url
from regress.dump import DumpReader, Recorder, at, recording, tap
from regress.dump.dump_location import address, location
from regress.dump.dump_manifest import Provenance
from regress.errors import DumpError, RegressError, reason
from regress.report.report_model import Report
from tests.as_subtests import as_subtests

SECRET = "hunter2"
FORMS = [
    f"s3://KEY:{SECRET}@bucket/run",
    f"s3://{SECRET}@bucket/run",
    f"https://user:{SECRET}@host/run",
    f"https://{SECRET}@host/run",
    f"simplecache::s3://KEY:{SECRET}@bucket/run",
    f"filecache::https://user:{SECRET}@host/run",
    f"zip://inner.zip::https://user:{SECRET}@host/run.zip",
    f"s3://KEY:pa/{SECRET}/x@bucket/run",
    f"s3://KEY:{SECRET}/@bucket",
    f"s3://KEY:p@ss{SECRET}@bucket/run",
    f"s3://KEY:{SECRET}%2Fx@bucket",
    f"s3://KEY%3A{SECRET}%40bucket/run",
    f"https://host/run?X-Amz-Signature={SECRET}",
    f"https://host/run?sig={SECRET}&se=2",
    f"https://host/run#access_token={SECRET}",
    f"https://host/run%3Ftoken={SECRET}",
    f"az://container/run;AccountKey={SECRET}",
    f"S3://KEY:{SECRET}@bucket",
    f"s3:/KEY:{SECRET}@bucket/run",
    f"sftp://user:{SECRET}@host:22/run",
    f"ftp://me:{SECRET}@host",
    f"gs://{SECRET}@bucket",
    f"hf://{SECRET}@datasets/x",
    f"abfs://container@account.dfs.core.windows.net/run?{SECRET}",
    f"//user:{SECRET}@host/run",
    f"s3://KEY:{SECRET}::more@bucket",
    f"redis://:{SECRET}@host:1/0",
    f"http://[user:{SECRET}@::1]/run",
    f"s3://KEY:{SECRET}",
    f"dropbox://{SECRET}:@run",
    f"git+https://oauth2:{SECRET}@host/run.git",
    f"s3://K:a'{SECRET}@bucket",
    f"s3://K:a){SECRET}@bucket",
    f"s3:KEY:{SECRET}@bucket/run",
    f"gs:{SECRET}@bucket",
    f"https:user:pa/{SECRET}@host/run",
    f"s3:KEY%3A{SECRET}%40bucket",
    f"simplecache::s3:KEY:{SECRET}@bucket/run",
    f"file::s3://KEY:{SECRET}@bucket/run",
    f"file:///tmp/x::s3://KEY:{SECRET}@bucket/run",
    f"local://x::s3://KEY:{SECRET}@bucket/run",
    f"local::s3:KEY:{SECRET}@bucket/run",
    f"file://x::simplecache::s3:KEY:{SECRET}@bucket/run",
    f"file://user:{SECRET}@host/run",
    f"file:user:{SECRET}@host/run",
    f"tinker://user:{SECRET}@host/weights/x",
    f"tinker://user:{SECRET}",
]
HARMLESS = [
    "s3://bucket/run",
    "memory://run/3",
    "s3://bucket:9000/run",
    "http://localhost:8000/run",
    "file:///home/me@host/run",
    "/home/me@host/run",
    "tinker://s999:train:0/weights/x is not an address",
    "'weaver://s1:train:0/sampler/_x', or another one",
    "file:///tmp/me@host::local:///tmp/you@host",
    "git@github.com:owner/repository",
    "tests/test_a.py::test_b[me@host]",
    '{"at": "me@host", "https": "s3:bucket"}',
    "pytest 'tests/test_a.py::test_golden[dense/base/step0]'",
    "x == y // 2 @ z: a matrix product",
    "what? s3://bucket/run, or s3://other/run; then 127.0.0.1:29500/x",
]


@as_subtests("form", FORMS)
@as_subtests("sentence", ["{}", "cannot open {}: no", "'{}'", "debug.dump_dir={}", "({}, 1)", "error:{}."])
def test_no_form_of_a_url_tells_its_credential(form: str, sentence: str) -> None:
    text = sentence.format(form)
    assert SECRET not in redacted(text)
    assert SECRET not in redacted_url(form)
    assert SECRET not in str(RegressError(text))
    assert SECRET not in reason(ValueError(text))


@as_subtests("text", HARMLESS)
def test_texts_without_credentials_stay(text: str) -> None:
    assert redacted(text) == text


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=("Z", "C")), min_size=6, max_size=20))
def test_any_password_without_spaces_is_removed(password: str) -> None:
    said = redacted(f"cannot read s3://KEY:{password}QQ@bucket/run (x)")
    assert f"{password}QQ" not in said
    assert said.startswith("cannot read s3://")
    assert said.endswith("@bucket/run (x)")


@pytest.mark.parametrize("form", [form for form in FORMS if "://" in form])
def test_nothing_opens_or_repeats_a_url_with_a_credential(form: str, tmp_path: Path) -> None:
    for use in (location, DumpReader, lambda url: Recorder(url, options={"loss": True})):
        with pytest.raises(DumpError) as caught:
            use(form)
        assert SECRET not in repr(caught.value)
    for command in (["dump", "show", form], ["compare", form, str(tmp_path)], ["dump", "check", form]):
        done = CliRunner().invoke(main, command)
        assert done.exit_code in (1, 2)
        assert SECRET not in done.output + done.stderr + str(done.exception)


def test_a_name_in_a_url_is_used_and_not_shown() -> None:
    place = location("memory://bucket/a@b")
    assert address(place) == "memory://bucket/a@b"
    assert str(place) == "memory://***@b"
    assert "a@" not in repr(place)


def test_manifests_hold_no_credentials(tmp_path: Path) -> None:
    config = {"debug": {"dump_dir": FORMS[0]}, "model": {"pad_token": "<pad>"}}
    told = Provenance(
        config=config, environment={"variables": {"WANDB_API_KEY": SECRET, "OMP_NUM_THREADS": "1"}}
    )
    with recording(Recorder(str(tmp_path / "dump"), options={"loss": True}, provenance=told)), at(step=0):
        tap("loss", loss=1.0)
    text = (tmp_path / "dump" / "manifest.json").read_text()
    assert SECRET not in text
    read = DumpReader(tmp_path / "dump").manifest.provenance
    assert read.config["model"] == {"pad_token": "<pad>"}
    assert read.environment["variables"]["OMP_NUM_THREADS"] == "1"


def test_reports_hold_no_credentials() -> None:
    report = Report(
        f"compare {FORMS[4]}", environment={"command": f"regress compare {FORMS[0]} b"}, notes=[FORMS[1]]
    )
    assert SECRET not in json.dumps(report.to_json())


def test_trees_keep_what_is_no_text() -> None:
    assert redacted_tree({"a": [1, None, "x", (2.5,)]}) == {"a": [1, None, "x", [2.5]]}


WORDS = [
    ["{}"],
    ["compare", "a", "b", "--report", "{}"],
    ["compare", "a", "b", "--json", "{}"],
    ["compare", "a", "b", "c", "{}"],
    ["compare", "a", "b", "--num-ranks", "{}"],
    ["compare", "--{}"],
    ["dump", "show", "{}"],
    ["dump", "{}"],
    ["explain", "{}"],
    ["oracle", "a", "--model", "{}"],
    ["replay", "{}"],
    ["replay", "dense", "--golden-dir", "{}"],
    ["replay", "dense", "--keep-dumps", "{}"],
    ["report", "{}"],
    ["report", "run", "--output", "{}"],
    ["doctor", "{}"],
    ["doctor", "{}", "--auto-fix"],
    ["track", "{}"],
    ["golden", "show", "{}"],
    ["golden", "export", "dense", "{}"],
    ["train", "output_dir={}", "max_steps=x"],
    ["train", "--config-path", "{}"],
    ["serve", "--port", "{}"],
]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_nothing_that_the_command_prints_holds_a_credential(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of the command and those of click hold no credential."""
    monkeypatch.chdir(tmp_path)
    for form in (
        f"s3://KEY:{SECRET}@bucket/x",
        f"s3:KEY:{SECRET}@bucket/x",
        f"file:///x::s3://KEY:{SECRET}@b",
    ):
        done = CliRunner().invoke(main, [word.format(form) for word in words])
        assert done.exit_code == 2
        assert SECRET not in done.output
    assert not list(tmp_path.iterdir())


def test_no_traceback_holds_a_credential(tmp_path: Path) -> None:
    code = (
        "import click; from regress.cli import main\n"
        "@main.command()\ndef fails(): raise ValueError('no s3://KEY:hunter2@bucket')\n"
        "main(['fails'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert SECRET not in done.stdout + done.stderr
    assert "ValueError: no s3://***@bucket" in done.stderr


def test_help_is_printed_as_it_is_written() -> None:
    def texts(command: click.Command, path: str) -> Iterator[str]:
        context = click.Context(
            command, info_name=path, help_option_names=main.context_settings["help_option_names"]
        )
        yield command.get_help(context)
        for name, one in command.commands.items() if isinstance(command, click.Group) else ():
            yield from texts(one, f"{path} {name}")

    for text in texts(main, "regress"):
        assert redacted(text) == text
