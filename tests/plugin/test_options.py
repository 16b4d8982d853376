"""Options and ini keys: what they decide, and what is refused before any test runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TIERS = "semantics, precision, bitwise, all"
FACTORS = "numbers above 0, such as 2 or 0.5"
PASSING = """
    import numpy as np

    def test_it(regress):
        regress.check("x", np.arange(3.0), rtol=1e-3, why="measured")
"""
CI = (
    "--update-golden is refused where CI is set (CI=true), because somebody has to look at a golden before it counts: "
    "update on your own machine, or say --update-golden=force"
)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (
            "--update-golden=everything",
            "--update-golden=everything: 'everything' is not a mode; allowed are drifted, all, force, separated "
            "by commas",
        ),
        (
            "--update-golden=all,",
            "--update-golden=all,: '' is not a mode; allowed are drifted, all, force, separated by commas",
        ),
        (
            "--update-golden=drifted,all",
            "--update-golden=drifted,all: drifted and all exclude each other; choose one",
        ),
        ("--regress-tier=fast", f"--regress-tier=fast is not a tier; allowed are {TIERS}"),
        (
            "--regress-matrix=half",
            "--regress-matrix=half is not an extent; allowed are auto, reduced, default, full",
        ),
        (
            "--regress-tolerance-scale=much",
            f"--regress-tolerance-scale=much is not a factor; allowed are {FACTORS}",
        ),
        (
            "--regress-tolerance-scale=0",
            f"--regress-tolerance-scale=0 is not a factor; allowed are {FACTORS}",
        ),
        (
            "--regress-tolerance-scale=-1",
            f"--regress-tolerance-scale=-1 is not a factor; allowed are {FACTORS}",
        ),
        (
            "--regress-tolerance-scale=nan",
            f"--regress-tolerance-scale=nan is not a factor; allowed are {FACTORS}",
        ),
        (
            "--regress-tolerance-scale=inf",
            f"--regress-tolerance-scale=inf is not a factor; allowed are {FACTORS}",
        ),
        ("--golden-dir=pytest.ini", "--golden-dir=pytest.ini is a file; allowed are paths of folders"),
        ("--golden-dir=", "--golden-dir is empty; allowed are paths of folders"),
        (
            "--regress-report=pytest.ini",
            "--regress-report=pytest.ini is a file; allowed are paths of folders",
        ),
        *(
            (
                f"{option}=s3://KEY:SECRET@bucket/x",
                f"{option}: s3://***@bucket/x is the URL of a store, but a folder of this machine is needed here: "
                "give its path",
            )
            for option in ("--golden-dir", "--regress-report", "--regress-keep-dumps")
        ),
        ("--regress-report=", "--regress-report is empty; allowed are paths of folders"),
        (
            "--regress-keep-dumps=pytest.ini",
            "--regress-keep-dumps=pytest.ini is a file; allowed are paths of folders",
        ),
    ],
)
def test_a_bad_option_is_refused(project: Any, option: str, says: str) -> None:
    project.write("test_it.py", PASSING)
    project.refuses(option, says=says)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("regress_tier = fast", f"regress_tier=fast is not a tier; allowed are {TIERS}"),
        ("regress_tier =", f"regress_tier= is not a tier; allowed are {TIERS}"),
        (
            "regress_tolerance_scale = much",
            f"regress_tolerance_scale=much is not a factor; allowed are {FACTORS}",
        ),
        (
            "regress_tolerance_scale = -2",
            f"regress_tolerance_scale=-2 is not a factor; allowed are {FACTORS}",
        ),
        ("regress_golden_dir =", "regress_golden_dir is empty; allowed are paths of folders, such as golden"),
        (
            "regress_golden_dir = pytest.ini",
            "regress_golden_dir=pytest.ini is a file; allowed are paths of folders",
        ),
        ("regress_report = pytest.ini", "regress_report=pytest.ini is a file; allowed are paths of folders"),
        (
            "regress_keep_dumps = pytest.ini",
            "regress_keep_dumps=pytest.ini is a file; allowed are paths of folders",
        ),
    ],
)
def test_a_bad_ini_value_is_refused_though_no_test_asks_for_it(project: Any, line: str, says: str) -> None:
    project.write("pytest.ini", f"[pytest]\n{line}\n")
    project.write("test_it.py", "def test_it():\n    pass\n")
    project.refuses(says=says)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "regress_tier = 3",
            "FOLDER/pyproject.toml: config option 'regress_tier' expects a string, got int: 3",
        ),
        (
            "regress_tolerance_scale = 2.0",
            "FOLDER/pyproject.toml: config option 'regress_tolerance_scale' expects a string, got float: 2.0",
        ),
    ],
)
def test_a_value_of_another_type_in_toml_is_refused(alone: Any, line: str, says: str) -> None:
    (alone.folder / "pytest.ini").unlink()
    alone.write("pyproject.toml", f"[tool.pytest]\n{line}\n")
    alone.refuses(says=says)


@pytest.mark.parametrize("modes", ["", "=drifted", "=all"])
def test_updating_is_refused_under_ci(project: Any, monkeypatch: pytest.MonkeyPatch, modes: str) -> None:
    monkeypatch.setenv("CI", "true")
    project.write("test_it.py", PASSING)
    project.refuses(f"--update-golden{modes}", says=CI)
    assert project.goldens() == {}


def test_updating_under_ci_can_be_forced(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    project.write("test_it.py", PASSING)
    project.passes("--update-golden=force", count=1)
    project.passes(count=1)


@pytest.mark.parametrize("value", ["", "0", "false", "FALSE", "no"])
def test_ci_may_say_no(alone: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CI", value)
    alone.write("test_it.py", PASSING)
    alone.passes("--update-golden", count=1)


def test_an_option_without_a_value_leaves_the_path_that_follows_alone(project: Any) -> None:
    project.write("one/test_it.py", PASSING)
    project.write("two/test_it2.py", PASSING)
    project.passes("--update-golden", "one/test_it.py", count=1)
    assert len(project.goldens()) == 1
    project.passes("--regress-report", "one", count=1)
    project.passes("--regress-keep-dumps", "--", "one", count=1)
    assert (project.folder / "regress-report/index.html").exists()
    assert not (project.folder / "one/index.html").exists()


def test_an_option_without_a_value_leaves_conftests_above_the_project_alone(alone: Any) -> None:
    (alone.folder / "pytest.ini").unlink()
    alone.write("conftest.py", "raise ValueError('of another project')")
    alone.write("below/pytest.ini", "[pytest]")
    alone.write("below/test_it.py", PASSING)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(alone.folder / "below")
        alone.passes("--update-golden", count=1)


def test_options_start_from_the_current_folder_and_ini_keys_from_their_file(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.write("pytest.ini", "[pytest]\nregress_golden_dir = accepted\n")
    alone.write("tests/test_it.py", PASSING)
    monkeypatch.chdir(alone.folder / "tests")
    alone.passes("--update-golden", count=1)
    (here,) = alone.folder.glob("accepted/checks/*/*.check")
    alone.passes("--update-golden", "--golden-dir=../other", count=1)
    (there,) = alone.folder.glob("other/checks/*/*.check")
    assert here.name == there.name


def test_goldens_of_the_hub_are_read_and_never_written(
    alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that were stored in a project, as a dataset at a tag in the hub's cache."""
    alone.write("test_it.py", PASSING)
    alone.passes("--update-golden", count=1)
    home, commit = tmp_path / "hub" / "datasets--org--checks", "d" * 40
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "v1").write_text(commit)
    (home / "snapshots").mkdir()
    (alone.folder / "golden").rename(home / "snapshots" / commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    alone.run("--golden-dir=hf://datasets/org/checks@v2").stderr.fnmatch_lines(
        ["ERROR: *HF_HUB_OFFLINE is set*"]
    )
    result = alone.run("--golden-dir=hf://datasets/org/checks@v1")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"regress: goldens of hf://datasets/org/checks@{commit}"])
    refused = alone.run("--golden-dir=hf://datasets/org/checks@v1", "--update-golden")
    refused.stderr.fnmatch_lines([f"ERROR: hf://datasets/org/checks@{commit} is only read: *"])


@pytest.mark.parametrize("given", ["option", "ini"])
def test_the_tolerance_scale_is_a_factor_on_every_tolerance(alone: Any, given: str) -> None:
    alone.write("test_it.py", PASSING)
    alone.passes("--update-golden", count=1)
    alone.write("test_it.py", PASSING.replace("np.arange(3.0)", "np.arange(3.0) + 0.01"))
    alone.run().assert_outcomes(failed=1)
    if given == "option":
        alone.passes("--regress-tolerance-scale=10", count=1)
    else:
        alone.write("pytest.ini", "[pytest]\nregress_tolerance_scale = 10\n")
        alone.passes(count=1)
        alone.run("--regress-tolerance-scale=1").assert_outcomes(failed=1)  # the command line counts more


def test_the_public_options_are_these(alone: Any) -> None:
    known = alone.run("--help").stdout.str()
    group = known.split("numerical regression (regress):")[1].split("\n\n")[0]
    options = [word for line in group.splitlines() for word in line.split()[:1] if word.startswith("-")]
    assert options == [
        "--update-golden=[MODES]",
        "--golden-dir=DIR",
        "--regress-tier=TIER",
        "--regress-matrix=EXTENT",
        "--regress-tolerance-scale=X",
        "--regress-report=[DIR]",
        "--regress-keep-dumps=[DIR]",
        "--regress-set=KEY=VALUE",
        "--regress-model=MODEL",
        "--regress-allow-code",
    ]
    keys = [line.split()[0] for line in known.splitlines() if line.startswith("  regress_")]
    assert keys == [
        f"regress_{key}"
        for key in ("set", "golden_dir", "tier", "matrix", "tolerance_scale", "report", "keep_dumps")
    ]


def test_the_report_names_the_closest_call_of_every_check(project: Any) -> None:
    project.write("test_it.py", PASSING)
    project.passes("--update-golden", count=1)
    project.write("test_it.py", PASSING.replace("np.arange(3.0)", "np.arange(3.0) * 1.0001"))
    result = project.passes("--regress-report=out", count=1)
    result.stdout.fnmatch_lines(
        ["*headroom*", "*x*0.1*10 x*0.0002*0.002*", f"written: {project.folder / 'out'}*"]
    )
    assert sorted(path.name for path in Path(project.folder / "out").iterdir()) == [
        "index.html",
        "report.json",
        "report.txt",
    ]
