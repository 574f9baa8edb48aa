"""``SPILLWAY_BUDGET`` in the environment: programs and child processes that ``spillway run`` did not start."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from running.scripts import MODELS, RANKS, SOURCE, TRAINING, Ended, Folder, keep_hardware
from spillway.cli.variables import asked

pytestmark = pytest.mark.timeout(300)
STEPS = 7
BUDGET = {"SPILLWAY_BUDGET": "3GiB"}
ATTACHED = "GPT: 4 blocks, budget 3GiB, active"


@dataclass(frozen=True)
class Environment:
    """A virtual environment with Spillway installed as its wheel has it, and a folder of scripts."""

    folder: Folder
    interpreter: str

    def run(self, *command: object, **variables: str) -> Ended:
        inherited = self.folder.environment(TMPDIR=str(self.folder.path / "tmp"), **variables)
        environment = {name: value for name, value in inherited.items() if name != "PYTHONPATH" or name in variables}
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            cwd=self.folder.path,
            env=environment,
            timeout=200,
            stdin=subprocess.DEVNULL,
        )
        left = [each.name for each in (self.folder.path / "tmp").glob("spillway-run-*")]
        assert not left, "folders of process trees are removed"
        return Ended(done.returncode, done.stdout, done.stderr)

    def python(self, *arguments: object, **variables: str) -> Ended:
        return self.run(self.interpreter, *arguments, **variables)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    path = tmp_path_factory.mktemp("startup")
    venv.EnvBuilder(symlinks=True).create(path / "venv")
    interpreter = path / "venv" / "bin" / "python"
    scheme = {"base": str(path / "venv"), "platbase": str(path / "venv")}
    packages = Path(sysconfig.get_path("purelib", "venv", scheme))
    (packages / "_spillway.pth").write_text(f"{SOURCE}\n")
    (packages / "others.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    shutil.copy(SOURCE / "spillway" / "cli" / "spillway.pth", packages)
    folder = Folder(path / "scripts", keep_hardware(path / "cache"))
    folder.write("train.py", TRAINING)
    (folder.path / "tmp").mkdir()
    return Environment(folder, str(interpreter))


@pytest.fixture(scope="module")
def plain(installed: Environment) -> str:
    """What the script says by itself, without a variable."""
    done = installed.python("train.py", STEPS)
    assert (done.code, done.err) == (0, "")
    return done.out


def unmet(done: Ended) -> list[str]:
    return [line for line in done.err.splitlines() if "was not met" in line]


@pytest.mark.parametrize("options", [[], ["-I"]], ids=str)
def test_a_budget_of_the_environment_does_what_run_does(options: list[str], installed: Environment, plain: str) -> None:
    done = installed.python(*options, "train.py", STEPS, **BUDGET)
    assert (done.code, done.out) == (0, plain), done.err
    assert done.err.startswith(f"\nspillway: 1 model attached, {STEPS} optimizer steps\n")
    assert ATTACHED in done.err
    run = installed.python("-m", "spillway", "run", "--budget", "3GiB", "train.py", STEPS)
    assert run.out == plain
    assert run.err.splitlines()[:4] == done.err.splitlines()[:4]


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ([], {"SPILLWAY_BUDGET": "off"}),
        ([], {"SPILLWAY_BUDGET": "off", "SPILLWAY_POLICY": "offload"}),
        ([], {"SPILLWAY_BUDGET": ""}),
        ([], {"SPILLWAY_HOST_BUDGET": "1GiB"}),
    ],
    ids=str,
)
def test_off_and_no_way_leave_a_program_alone(
    options: list[str], variables: dict[str, str], installed: Environment, plain: str
) -> None:
    assert installed.python(*options, "train.py", STEPS, **variables) == Ended(0, plain, "")


def test_python_without_site_reads_no_hook(installed: Environment) -> None:
    done = installed.python("-S", "-c", "import sys; print('spillway' in sys.modules)", **BUDGET)
    assert done == Ended(0, "False\n", "")


def test_without_a_variable_nothing_of_spillway_is_imported_and_with_one_no_torch(installed: Environment) -> None:
    code = "import sys; print(sorted({'spillway', 'torch', 'typer', 'numpy', 'asyncio'} & sys.modules.keys()))"
    assert installed.python("-c", code) == Ended(0, "[]\n", "")
    assert installed.python("-c", code, **BUDGET) == Ended(0, "['spillway']\n", "")


@pytest.mark.parametrize(
    ("name", "value", "way"),
    [
        ("POLICY", "recompute", "recompute"),
        ("RATIO", "0.5", "ratio 0.5"),
        ("BUDGET", "auto", "offload"),
    ],
)
def test_each_way_has_a_variable(name: str, value: str, way: str, installed: Environment) -> None:
    done = installed.python("train.py", 1, **{f"SPILLWAY_{name}": value})
    assert done.code == 0
    assert f"GPT: 4 blocks, {way}\n" in done.err


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"SPILLWAY_BUDGET": "lots"}, "SPILLWAY_BUDGET: got 'lots', expected"),
        ({"SPILLWAY_POLICY": "offloads"}, "SPILLWAY_POLICY: got 'offloads', expected one of"),
        ({"SPILLWAY_RATIO": "x"}, "SPILLWAY_RATIO: got 'x', expected"),
        ({"SPILLWAY_BUDGET": "1GiB", "SPILLWAY_RATIO": "0.5"}, "got SPILLWAY_BUDGET and SPILLWAY_RATIO"),
        ({"SPILLWAY_BUDGET": "1GiB", "SPILLWAY_HOST_BUDGET": "x"}, "SPILLWAY_HOST_BUDGET: got 'x'"),
        ({"SPILLWAY_PLAN": "absent.json"}, "absent.json"),
    ],
    ids=str,
)
def test_a_wrong_value_is_one_sentence_and_2(variables: dict[str, str], told: str, installed: Environment) -> None:
    done = installed.python("-c", "try: import torch\nexcept Exception: print('went on')", **variables)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ") and told in done.err and done.err.count("\n") == 1
    assert installed.python("-c", "print('no torch')", **variables) == Ended(0, "no torch\n", "")


def test_the_users_own_sitecustomize_runs_too(installed: Environment, plain: str) -> None:
    installed.folder.write("custom/sitecustomize.py", "import os; print('custom', flush=True)")
    done = installed.python("train.py", STEPS, PYTHONPATH=str(installed.folder.path / "custom"), **BUDGET)
    assert (done.code, done.out) == (0, f"custom\n{plain}")
    assert ATTACHED in done.err


def test_torch_that_a_sitecustomize_imports_is_managed_too_but_not_in_our_commands(installed: Environment) -> None:
    installed.folder.write("early/sitecustomize.py", "import torch")
    path = {"PYTHONPATH": str(installed.folder.path / "early")}
    done = installed.python("train.py", STEPS, **path, **BUDGET)
    assert done.err.count(ATTACHED) == 1
    done = installed.python("-m", "spillway", "run", "--policy", "keep", "train.py", 1, **path, **BUDGET)
    assert done.err.count("GPT: 4 blocks") == done.err.count("GPT: 4 blocks, keep\n") == 1
    assert not unmet(done)
    assert installed.python("-m", "spillway", "--version", **path, **BUDGET).err == ""


def test_a_look_for_torch_imports_nothing_and_its_loader_is_as_before(installed: Environment) -> None:
    code = """
import importlib.util, sys
first = importlib.util.find_spec("torch")
assert "torch" not in sys.modules and first.origin.endswith("__init__.py")
import torch
assert vars(torch.__spec__.loader).keys() == {"name", "path"}, vars(torch.__spec__.loader)
assert not [each for each in sys.meta_path if "spillway" in type(each).__module__]
"""
    done = installed.python("-c", code, SPILLWAY_POLICY="keep")
    assert done.code == 0, done.err


def test_a_program_that_attaches_nothing_says_so_in_one_line(installed: Environment) -> None:
    done = installed.python("-c", "import torch", **BUDGET)
    assert (done.code, done.out) == (0, "")
    [line] = done.err.split("\n")[1:-1]
    assert line.startswith("spillway: SPILLWAY_BUDGET=3GiB was not met, since nothing was attached: No module was")
    by_hand = installed.folder.write("by_hand.py", TRAINING.replace("loss = model(", "loss = model.forward("))
    done = installed.python(by_hand.name, 2, SPILLWAY_QUIET="1", **BUDGET)
    assert done.code == 0
    assert done.err.count("\n") == 2 and "call model(...)" in done.err
    short = installed.python("train.py", 1, **BUDGET)
    assert "since the script ended before there was a plan (GPT takes" in unmet(short)[0]
    caught = installed.folder.write("caught.py", TRAINING.replace("finally:", "except Exception:"))
    small = installed.python(caught.name, STEPS, SPILLWAY_BUDGET="1MiB")
    assert small.code == 0
    assert unmet(small) == ["spillway: SPILLWAY_BUDGET=1MiB was not met, since no plan fits it"]


def test_a_model_that_the_program_attaches_itself_is_attached_once(installed: Environment, plain: str) -> None:
    text = TRAINING.replace("model = GPT()", "model = GPT()\nimport spillway\nspillway.attach(model, policy='keep')")
    script = installed.folder.write("own.py", text)
    done = installed.python(script.name, STEPS, **BUDGET)
    assert (done.code, done.out) == (0, plain), done.err
    assert "GPT is not attached: is attached by the script itself" in done.err
    assert len(unmet(done)) == 1


def test_a_managed_model_that_the_program_attaches_later_is_its_own(installed: Environment, plain: str) -> None:
    attaches = "        step == 4 and own.append(spillway.attach(model, policy='offload'))\n"
    text = TRAINING.replace("        loss = model(", f"{attaches}        loss = model(")
    text = text.replace("model = GPT()", "import spillway\nown = []\nmodel = GPT()")
    text += "\nassert own[0].passes == 3, own\n"
    script = installed.folder.write("later.py", text)
    done = installed.python(script.name, STEPS, **BUDGET)
    assert (done.code, done.out) == (0, plain), done.err
    assert done.err.count("GPT is not attached: was attached by the script itself, after Spillway") == 1
    assert len(unmet(done)) == 1


LAUNCHER = """
import subprocess, sys
raise SystemExit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)
"""


@pytest.mark.parametrize("imports", ["", "import torch\n"], ids=["without torch", "with torch"])
def test_children_of_a_program_are_managed_and_the_program_is_content(
    imports: str, installed: Environment, plain: str
) -> None:
    launcher = installed.folder.write("launcher.py", imports + LAUNCHER)
    done = installed.python(launcher.name, "train.py", STEPS, **BUDGET)
    assert (done.code, done.out) == (0, plain), done.err
    assert done.err.count("model attached") == done.err.count(ATTACHED) == 1
    assert not unmet(done)


def test_children_of_run_are_managed_and_count(installed: Environment, plain: str) -> None:
    launcher = installed.folder.write("launcher.py", LAUNCHER)
    command = ["-m", "spillway", "run", "--budget", "3GiB", "-o", "children.json", launcher.name]
    done = installed.python(*command, "train.py", STEPS)
    assert (done.code, done.out) == (0, plain), done.err
    assert done.err.count(ATTACHED) == 1
    assert done.err.endswith("\nspillway: 0 models attached, 0 optimizer steps\n  attached in child processes: GPT\n")
    said = json.loads((installed.folder.path / "children.json").read_text())
    [child] = said["children"]
    assert (said["models"], child["models"][0]["kind"], child["steps"]) == ([], "GPT", STEPS)
    # A child of a child, whose launcher is a run of its own with other options.
    inner = ["-m", "spillway", "run", "--quiet", "--policy", "keep", launcher.name]
    done = installed.python(*command, *inner, "train.py", STEPS)
    assert (done.code, done.out) == (0, plain), done.err
    said = json.loads((installed.folder.path / "children.json").read_text())
    assert said["children"][0]["children"][0]["models"][0]["way"] == "keep"
    short = installed.python(*command, "train.py", 1)
    assert short.code == 3
    assert "the script ended before there was a plan (GPT takes" in short.err
    nothing = installed.python(*command, "-c", "import torch")
    assert nothing.code == 3
    assert "in this process or in a managed child." in " ".join(nothing.err.split())


@pytest.mark.parametrize("command", [["profile", "-o", "children-profile.json"], ["bench", "--ways", "baseline"]])
def test_children_of_profile_and_bench_are_left_alone(command: list[str], installed: Environment) -> None:
    text = TRAINING.replace(
        "finally:", 'finally:\n    import subprocess; subprocess.run([sys.executable, "-c", "import torch"])'
    )
    script = installed.folder.write("with_child.py", text)
    done = installed.python("-m", "spillway", *command, script.name, 100, **BUDGET)
    assert done.code == 0, done.err
    assert not unmet(done) and "attached" not in done.err


SPAWNS = (
    MODELS
    + """
import multiprocessing

def train(steps):
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.randint(64, (2, 16))).backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=train, args=(7,))
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""
)


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_children_of_multiprocessing_are_managed(method: str, installed: Environment) -> None:
    script = installed.folder.write("spawns.py", SPAWNS)
    done = installed.python(script.name, method, **BUDGET)
    assert done.code == 0, done.err
    assert done.err.count(ATTACHED) == 1
    assert not unmet(done)
    run = installed.python("-m", "spillway", "run", "--budget", "3GiB", script.name, method)
    assert run.code == 0, run.err
    assert "attached in child processes: GPT" in run.err


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("module", "variables"),
    [
        pytest.param([], BUDGET, id="environment"),
        pytest.param(["-m", "spillway", "run", "--budget", "3GiB"], {}, id="run"),
        pytest.param(["-m", "spillway", "run", "--budget", "3GiB"], {"SPILLWAY_BUDGET": "2GiB"}, id="both"),
    ],
)
def test_ranks_under_torchrun(module: list[str], variables: dict[str, str], installed: Environment) -> None:
    installed.folder.write("ranks.py", RANKS)
    if not (installed.folder.path / "losses.0.plain").exists():
        assert installed.python(*TORCHRUN, "ranks.py", "plain").code == 0
    done = installed.python(*TORCHRUN, *module, "ranks.py", "managed", **variables)
    assert done.code == 0, done.err
    for rank in (0, 1):
        losses = [(installed.folder.path / f"losses.{rank}.{which}").read_text() for which in ("plain", "managed")]
        assert losses[0] == losses[1]
    assert done.err.count(ATTACHED) == done.err.count("model attached") == 1
    assert not unmet(done)


@pytest.mark.parametrize(
    ("module", "variables"),
    [
        pytest.param([], BUDGET, id="environment"),
        pytest.param(["-m", "spillway", "run", "--budget", "3GiB"], {}, id="run"),
        pytest.param(["-m", "spillway", "run", "--budget", "3GiB"], {"SPILLWAY_BUDGET": "2GiB"}, id="both"),
    ],
)
def test_accelerate_launch(module: list[str], variables: dict[str, str], installed: Environment, plain: str) -> None:
    pytest.importorskip("accelerate")
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--mixed_precision", "no"]
    cache = {"HF_HOME": str(installed.folder.path / "hf"), "ACCELERATE_USE_CPU": "true"}
    done = installed.python(*launch, *module, "train.py", STEPS, **cache, **variables)
    assert (done.code, done.out) == (0, plain), done.err
    assert done.err.count(ATTACHED) == done.err.count("model attached") == 1
    assert not unmet(done)


def test_only_a_way_asks() -> None:
    assert asked({"SPILLWAY_BUDGET": "1GiB", "SPILLWAY_ALLOW": "keep"}) == {"budget": "1GiB", "allow": "keep"}
    assert asked({"SPILLWAY_ALLOW": "keep"}) == asked({"SPILLWAY_BUDGET": ""}) == asked({}) == {}
    assert asked({"SPILLWAY_BUDGET": "off", "SPILLWAY_PLAN": "plan.json"}) == {}
