"""What is published and what has to pass before: the wheel as it is built, and CI's own run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

import spillway

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built by what builds it for a release, without a network."""
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    return built_in(ROOT, tmp_path_factory.mktemp("wheel"))


def built_in(sources: Path, folder: Path) -> zipfile.ZipFile:
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(sources)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [file] = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def test_the_wheel_has_all_files_of_the_package_its_types_among_them(wheel: zipfile.ZipFile) -> None:
    package = ROOT / "src" / "spillway"
    ours = {f"spillway/{file.relative_to(package).as_posix()}" for file in package.rglob("*") if file.is_file()}
    built = {name for name in wheel.namelist() if ".dist-info/" not in name}
    hook = "spillway/cli/spillway.pth"
    assert built == {name for name in ours if "__pycache__" not in name} - {hook} | {"spillway.pth"}
    assert wheel.read("spillway/py.typed") == b""
    assert {"spillway/planner/report/assets/page.html", "spillway/planner/report/assets/page.js"} <= built


def test_the_wheel_says_what_it_is_and_what_it_needs(wheel: zipfile.ZipFile) -> None:
    [folder] = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    metadata = Parser().parsestr(wheel.read(f"{folder}/METADATA").decode())
    assert (metadata["Name"], metadata["Version"]) == ("spillway", spillway.__version__)
    requirements = metadata.get_all("Requires-Dist") or []
    always = {re.split(r"[<>=! \[]", each)[0] for each in requirements if "extra ==" not in each}
    assert always == {"torch", "numpy", "psutil", "pydantic", "scipy", "typer", "rich"}
    assert "Typing :: Typed" in (metadata.get_all("Classifier") or [])
    assert f"{folder}/licenses/LICENSE" in wheel.namelist()
    assert "spillway = spillway.cli.app:main" in wheel.read(f"{folder}/entry_points.txt").decode()


def test_the_archive_of_sources_builds_the_same_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build"]
    done = subprocess.run([*command, "-t", "sdist", "-d", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [archive] = tmp_path.glob("*.tar.gz")
    assert archive.name == f"spillway-{spillway.__version__}.tar.gz"
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    folder = tmp_path / archive.name.removesuffix(".tar.gz")
    done = subprocess.run([*command, "-t", "wheel", "-d", str(tmp_path)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [file] = tmp_path.glob("*.whl")
    assert sorted(zipfile.ZipFile(file).namelist()) == sorted(wheel.namelist())


def test_the_version_stands_in_one_place() -> None:
    others = [ROOT / name for name in ("pyproject.toml", "CITATION.cff", "README.md", "mkdocs.yml")]
    found = [path for path in (*others, *(ROOT / "src").rglob("*.py")) if spillway.__version__ in path.read_text()]
    assert found == [ROOT / "src" / "spillway" / "__init__.py"]


def test_issues_ask_for_the_doctor_and_files_of_the_repository_can_be_read() -> None:
    yaml = pytest.importorskip("yaml")
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            assert {"name", "description", "body"} <= set(form)
            assert any("spillway doctor --json" in each["attributes"]["label"] for each in form["body"])
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    [local] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [each["id"] for each in local["hooks"]] == ["ruff", "ruff-format", "mypy", "words"]


def demo_report(*, planned_bytes: int) -> dict[str, Any]:
    """A demo's report, of which the planned way has so many bytes of activations where the baseline has 100."""
    activations = {"baseline": 100, "recompute": 60, "offload": 60, "budget=60%": planned_bytes}
    outcome = {"models": [{"budget": planned_bytes}]}
    rows = [
        {
            "way": way,
            "answer": {
                "error": None,
                "output": "same",
                "activation_bytes": nbytes,
                "peak_bytes": nbytes,
                "seconds": [1.0] * 5,
                "outcome": outcome,
            },
        }
        for way, nbytes in activations.items()
    ]
    return {"rows": rows}


@pytest.mark.skipif(not (shutil.which("git") and shutil.which("bash")), reason="needs git and bash")
@pytest.mark.parametrize("name", ["checkout", "spillway", "a name with spaces"])
def test_ci_runs_what_make_has_in_a_folder_named_as_a_clone(name: str, tmp_path: Path) -> None:
    checkout = tmp_path / name
    (checkout / ".ci").mkdir(parents=True)
    for file in (".ci/run", ".ci/check_demo.py"):
        (checkout / file).write_bytes((ROOT / file).read_bytes())
    for file, text in (("kept", "old"), ("gone", ""), (".gitignore", "/ignored\n")):
        (checkout / file).write_text(text)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], cwd=checkout, check=True)
    subprocess.run([*git, "add", "--all"], cwd=checkout, check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "all"], cwd=checkout, check=True)
    (checkout / "kept").write_text("changed")
    (checkout / "gone").unlink()
    (checkout / "new file").write_text("")
    (checkout / "ignored").write_text("")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool, text in (
        (
            "make",
            'echo "make $* in $(basename "$PWD"): $(cat kept) $(ls | tr "\\n" ,)"; echo "$PWD" >>"$PLACES"\n'
            'if [ "$1" = demo ]; then cp "$REPORT" build/demo.json; fi',
        ),
        # Nothing is installed here.
        ("apt-get", "exit 1"),
    ):
        (tools / tool).write_text(f"#!/bin/sh\n{text}\n")
        (tools / tool).chmod(0o755)
    places, report = tmp_path / "places", tmp_path / "report"
    environment = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PLACES": str(places),
        "REPORT": str(report),
    }

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", ".ci/run"], cwd=checkout, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )

    report.write_text(json.dumps(demo_report(planned_bytes=90)))
    done = run()
    assert done.returncode == 0, done.stderr
    ignored = "ignored," if name == "spillway" else ""
    said = [line for line in done.stdout.splitlines() if not line.startswith(".ci/run:")]
    assert said[-4:] == [
        f"make check in spillway: changed {ignored}kept,new file,",
        f"make demo ARGS=-o build/demo.json in spillway: changed build,{ignored}kept,new file,",
        f"make test in spillway: changed build,{ignored}kept,new file,",
    ]
    first, *others = places.read_text().splitlines()
    assert others == [first, first]
    assert Path(first).exists() == (name == "spillway")
    # A demo that takes too much ends the run before the tests.
    report.write_text(json.dumps(demo_report(planned_bytes=91)))
    done = run()
    assert done.returncode != 0 and "budget=60% takes 91% of the baseline's activation bytes" in done.stderr
    assert "make demo" in done.stdout and "make test" not in done.stdout


def test_the_conda_recipe_needs_what_the_wheel_needs() -> None:
    yaml, jinja2 = pytest.importorskip("yaml"), pytest.importorskip("jinja2")
    text = (ROOT / "packaging" / "conda" / "meta.yaml").read_text()
    recipe = yaml.safe_load(jinja2.Template(text).render(environ={"SPILLWAY_VERSION": "1.2.3"}, PYTHON="python"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert recipe["package"] == {"name": project["name"], "version": "1.2.3"}
    python, *needs = recipe["requirements"]["run"]
    assert python == f"python {project['requires-python']}"
    # Torch has another name there.
    assert [need.replace(" ", "").replace("pytorch", "torch") for need in needs] == project["dependencies"]
    [(name, target)] = project["scripts"].items()
    assert recipe["build"]["entry_points"] == [f"{name} = {target}"]
    assert (recipe["about"]["summary"], recipe["about"]["license"]) == (
        project["description"].partition(":")[0],
        project["license"],
    )


def test_the_dockerfile_copies_what_builds_the_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    lines = (ROOT / "packaging" / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    for name in copied:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / "in" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (tmp_path / "in").mkdir(exist_ok=True)
            shutil.copy(source, tmp_path / "in" / name)
    made = built_in(tmp_path / "in", tmp_path / "out")
    assert {each for each in made.namelist() if ".dist-info/" not in each} == {
        each for each in wheel.namelist() if ".dist-info/" not in each
    }
    [run] = [line for line in lines if line.startswith("RUN")]
    extras = re.findall(r"\[(.*?)\]", run)[0].split(",")
    assert (
        set(extras) <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    )
