"""``SPILLWAY_BUDGET`` in the environment: programs and child processes that ``spillway run`` did not start."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from running.scripts import MODELS, RANKS, SOURCE, TRAINING, Ended, Folder, Server, keep_hardware
from spillway.cli import asked
from spillway.cli.running.options import NOTHING_TO_STREAM

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
def plain(installed: Environment, server: Server) -> str:
    """What the script says by itself, without a variable."""
    done = server.run(installed.folder.path, SCRIPT, "train.py", STEPS)
    assert (done.code, done.err) == (0, "")
    return done.out


SCRIPT = """
import runpy, sys
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def armed(installed: Environment, server: Server, *arguments: object, **variables: str) -> Ended:
    """A script in a process that has imported torch before its hook runs, as one of a ``sitecustomize`` may have."""
    code = f"import spillway.cli.startup\nspillway.cli.startup.arm()\n{SCRIPT}"
    return server.run(installed.folder.path, code, *arguments, **variables)


def unmet(done: Ended) -> list[str]:
    return [line for line in done.err.splitlines() if "was not met" in line]


def test_a_budget_of_the_environment_does_what_run_does(installed: Environment, server: Server, plain: str) -> None:
    done = installed.python("-I", "train.py", STEPS, **BUDGET)
    assert (done.code, done.out) == (0, plain), done.err
    assert done.err.startswith(f"\nspillway: 1 model attached, {STEPS} optimizer steps\n")
    assert ATTACHED in done.err
    run = server.spillway(installed.folder.path, "run", "--budget", "3GiB", "train.py", STEPS)
    assert run.out == plain
    assert run.err.splitlines()[:4] == done.err.splitlines()[:4]


IS_ARMED = "import sys; print(any('spillway' in type(each).__module__ for each in sys.meta_path))"


@pytest.mark.parametrize(
    ("variables", "is_armed"),
    [
        ({"SPILLWAY_BUDGET": "3GiB"}, True),
        ({"SPILLWAY_BUDGET": "off"}, False),
        ({"SPILLWAY_BUDGET": "off", "SPILLWAY_POLICY": "offload"}, False),
        ({"SPILLWAY_BUDGET": ""}, False),
        ({"SPILLWAY_HOST_BUDGET": "1GiB"}, False),
    ],
    ids=str,
)
def test_off_and_no_way_leave_a_program_alone(
    variables: dict[str, str], is_armed: bool, installed: Environment
) -> None:
    assert installed.python("-c", IS_ARMED, **variables) == Ended(0, f"{is_armed}\n", "")


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
def test_each_way_has_a_variable(name: str, value: str, way: str, installed: Environment, server: Server) -> None:
    done = armed(installed, server, "train.py", 1, **{f"SPILLWAY_{name}": value})
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
        ({"SPILLWAY_BUDGET": "1GiB", "SPILLWAY_STREAM": "x"}, "SPILLWAY_STREAM: got 'x', expected auto"),
        ({"SPILLWAY_BUDGET": "auto", "SPILLWAY_STREAM": "auto"}, "got SPILLWAY_STREAM without SPILLWAY_BUDGET"),
        ({"SPILLWAY_PLAN": "absent.json"}, "absent.json"),
    ],
    ids=str,
)
def test_a_wrong_value_is_one_sentence_and_2(
    variables: dict[str, str], told: str, installed: Environment, server: Server
) -> None:
    done = armed(installed, server, "train.py", 1, **variables)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ") and told in done.err and done.err.count("\n") == 1


def test_a_wrong_value_ends_a_program_where_it_imports_torch(installed: Environment) -> None:
    wrong = {"SPILLWAY_BUDGET": "lots"}
    done = installed.python("-c", "try: import torch\nexcept Exception: print('went on')", **wrong)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    assert installed.python("-c", "print('no torch')", **wrong) == Ended(0, "no torch\n", "")


def test_the_users_own_sitecustomize_runs_too(installed: Environment) -> None:
    installed.folder.write("custom/sitecustomize.py", "import os; print('custom', flush=True)")
    done = installed.python("-c", IS_ARMED, PYTHONPATH=str(installed.folder.path / "custom"), **BUDGET)
    assert done == Ended(0, "custom\nTrue\n", "")


def test_torch_that_a_sitecustomize_imports_is_managed_too_but_not_in_our_commands(installed: Environment) -> None:
    installed.folder.write("early/sitecustomize.py", "import torch")
    path = {"PYTHONPATH": str(installed.folder.path / "early")}
    # A program without a model says that it was managed.
    assert len(unmet(installed.python("-c", "pass", **path, **BUDGET))) == 1
    done = installed.python("-m", "spillway", "run", "--policy", "keep", "train.py", 1, **path, **BUDGET)
    assert done.err.count("GPT: 4 blocks") == done.err.count("GPT: 4 blocks, keep\n") == 1
    assert not unmet(done)


def test_a_look_for_torch_imports_nothing_and_its_loader_is_as_before(installed: Environment) -> None:
    code = """
import importlib.util, sys
first = importlib.util.find_spec("torch")
assert "torch" not in sys.modules and first.origin.endswith("__init__.py")
import torch
assert vars(torch.__spec__.loader).keys() == {"name", "path"}, vars(torch.__spec__.loader)
assert not [each for each in sys.meta_path if "spillway" in type(each).__module__]
"""
    done = installed.python("-c", code, **BUDGET)
    assert (done.code, done.out) == (0, ""), done.err
    [line] = done.err.split("\n")[1:-1]
    assert line.startswith("spillway: SPILLWAY_BUDGET=3GiB was not met, since nothing was attached: No module was")


def test_a_program_whose_budget_is_not_met_says_so_in_one_line(installed: Environment, server: Server) -> None:
    by_hand = installed.folder.write("by_hand.py", TRAINING.replace("loss = model(", "loss = model.forward("))
    done = armed(installed, server, by_hand.name, 2, SPILLWAY_QUIET="1", **BUDGET)
    assert done.code == 0
    assert done.err.count("\n") == 2 and "call model(...)" in done.err
    short = armed(installed, server, "train.py", 1, **BUDGET)
    assert "since the script ended before there was a plan (GPT takes" in unmet(short)[0]
    caught = installed.folder.write("caught.py", TRAINING.replace("finally:", "except Exception:"))
    small = armed(installed, server, caught.name, STEPS, SPILLWAY_BUDGET="1MiB")
    assert small.code == 0
    assert unmet(small) == ["spillway: SPILLWAY_BUDGET=1MiB was not met, since no plan fits it"]


def test_a_model_that_the_program_attaches_itself_is_attached_once(
    installed: Environment, server: Server, plain: str
) -> None:
    text = TRAINING.replace("model = GPT()", "model = GPT()\nimport spillway\nspillway.attach(model, policy='keep')")
    script = installed.folder.write("own.py", text)
    done = armed(installed, server, script.name, STEPS, **BUDGET)
    assert (done.code, done.out) == (0, plain), done.err
    assert "GPT is not attached: is attached by the script itself" in done.err
    assert len(unmet(done)) == 1


def test_a_managed_model_that_the_program_attaches_later_is_its_own(
    installed: Environment, server: Server, plain: str
) -> None:
    attaches = "        step == 4 and own.append(spillway.attach(model, policy='offload'))\n"
    text = TRAINING.replace("        loss = model(", f"{attaches}        loss = model(")
    text = text.replace("model = GPT()", "import spillway\nown = []\nmodel = GPT()")
    text += "\nassert own[0].passes == 3, own\n"
    script = installed.folder.write("later.py", text)
    done = armed(installed, server, script.name, STEPS, **BUDGET)
    assert (done.code, done.out) == (0, plain), done.err
    assert done.err.count("GPT is not attached: was attached by the script itself, after Spillway") == 1
    assert len(unmet(done)) == 1


LAUNCHER = """
import subprocess, sys
raise SystemExit(subprocess.run(sys.argv[1:]).returncode)
"""


def test_children_of_a_program_are_managed_and_the_program_is_content(
    installed: Environment, server: Server, plain: str
) -> None:
    launcher = installed.folder.write("launcher.py", LAUNCHER)
    done = armed(installed, server, launcher.name, installed.interpreter, "train.py", STEPS, **BUDGET)
    assert (done.code, done.out) == (0, plain), done.err
    assert done.err.count("model attached") == done.err.count(ATTACHED) == 1
    assert not unmet(done)


def test_children_of_run_are_managed_and_count(installed: Environment, server: Server, plain: str) -> None:
    launcher = installed.folder.write("launcher.py", LAUNCHER)
    options = ["--budget", "3GiB", "--stream", "auto", "-o", "children.json"]
    command = ["run", *options, launcher.name, installed.interpreter]

    def run(*arguments: object) -> tuple[Ended, dict[str, Any]]:
        done = server.spillway(installed.folder.path, *command, *arguments)
        return done, json.loads((installed.folder.path / "children.json").read_text())

    done, said = run("train.py", STEPS)
    assert (done.code, done.out) == (0, plain), done.err
    assert done.err.count(ATTACHED) == 1
    assert done.err.endswith("\nspillway: 0 models attached, 0 optimizer steps\n  attached in child processes: GPT\n")
    [child] = said["children"]
    assert (said["models"], child["models"][0]["kind"], child["steps"]) == ([], "GPT", STEPS)
    assert child["models"][0]["notes"] == [NOTHING_TO_STREAM]
    # A child of a child, whose launcher is a run of its own with other options. It ends early.
    inner = ["-m", "spillway", "run", "--quiet", "--best-effort", "--budget", "2GiB", launcher.name]
    done, said = run(*inner, installed.interpreter, "train.py", 1)
    assert (done.code, done.out) == (3, f"{plain.splitlines()[0]}\nfinally\n"), done.err
    [grandchild] = said["children"][0]["children"][0]["models"]
    assert (grandchild["way"], grandchild["notes"]) == ("budget 2GiB", [])
    assert "the script ended before there was a plan (GPT takes" in done.err
    nothing, _ = run("-c", "pass")
    assert nothing.code == 3
    assert "in this process or in a managed child." in " ".join(nothing.err.split())


def test_children_of_profile_and_bench_are_left_alone(installed: Environment, server: Server) -> None:
    said = installed.folder.path / "is-armed"
    child = f"""
    import subprocess
    with open({str(said)!r}, "w") as file:
        subprocess.run([{installed.interpreter!r}, "-c", {IS_ARMED!r}], stdout=file)"""
    script = installed.folder.write("with_child.py", TRAINING.replace("finally:", f"finally:{child}"))
    for command in (["profile", "-o", "children-profile.json"], ["bench", "--ways", "baseline"]):
        done = server.spillway(installed.folder.path, *command, script.name, 100, **BUDGET)
        assert done.code == 0, done.err
        assert said.read_text() == "False\n"
        assert "attached" not in done.err
        said.unlink()


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
    multiprocessing.set_executable(sys.argv[2])
    child = multiprocessing.get_context(sys.argv[1]).Process(target=train, args=(7,))
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""
)


def test_children_of_multiprocessing_are_managed(installed: Environment, server: Server) -> None:
    script = installed.folder.write("spawns.py", SPAWNS)
    run = ["run", "--budget", "3GiB", script]
    # Its whole path: children would look for a name in the folder that the server began in.
    # Each way to start a child, in a program and under run: either is with two of them.
    programs = [
        armed(installed, server, script, method, installed.interpreter, **BUDGET) for method in ("spawn", "fork")
    ]
    runs = [
        server.spillway(installed.folder.path, *run, method, installed.interpreter) for method in ("forkserver", "fork")
    ]
    for done in programs:
        assert done.code == 0, done.err
        assert done.err.count(ATTACHED) == 1
        assert not unmet(done)
    for done in runs:
        assert done.code == 0, done.err
        assert "attached in child processes: GPT" in done.err


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


TWO_RANKS = """
import functools, os
import torch.distributed as dist
child = os.fork()
rank = int(child == 0)
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
meet = dict(init_method=f"file://{{os.getcwd()}}/meeting.{meeting}", rank=rank, world_size=2)
dist.init_process_group = functools.partial(dist.init_process_group, **meet)
try:
    {code}
finally:
    if child:
        assert os.waitpid(child, 0)[1] == 0
"""
"""Two processes in the environment of ranks, without the time that a launcher takes."""


def two_ranks(installed: Environment, server: Server, code: str, *arguments: object, **variables: str) -> Ended:
    path = installed.folder.path
    path.joinpath("ranks.py").write_text(RANKS)
    return server.run(path, TWO_RANKS.format(code=code, meeting=len(variables)), *arguments, **variables)


@pytest.fixture(scope="module")
def plain_losses(installed: Environment, server: Server) -> list[str]:
    """What each rank of the script writes by itself."""
    code = "import runpy, sys; runpy.run_path(sys.argv[0], run_name='__main__')"
    assert two_ranks(installed, server, code, "ranks.py", "plain").code == 0
    return losses(installed, "plain")


def losses(installed: Environment, which: str) -> list[str]:
    return [(installed.folder.path / f"losses.{rank}.{which}").read_text() for rank in (0, 1)]


def check_ranks(installed: Environment, done: Ended, which: str, plain_losses: list[str]) -> None:
    assert done.code == 0, done.err
    assert losses(installed, which) == plain_losses
    assert [each.count("\n") for each in plain_losses] == [7, 7]
    assert done.err.count(ATTACHED) == done.err.count("model attached") == 1
    assert not unmet(done)


def test_ranks_under_torchrun(installed: Environment, plain_losses: list[str]) -> None:
    done = installed.python(*TORCHRUN, "ranks.py", "launched", **BUDGET)
    check_ranks(installed, done, "launched", plain_losses)


def test_ranks_that_are_runs_have_the_runs_budget(
    installed: Environment, server: Server, plain_losses: list[str]
) -> None:
    code = "import spillway.cli.startup; spillway.cli.startup.arm(); from spillway.cli.app import main; main()"
    command = ["spillway", "run", "--budget", "3GiB", "ranks.py", "runs"]
    done = two_ranks(installed, server, code, *command, SPILLWAY_BUDGET="2GiB")
    check_ranks(installed, done, "runs", plain_losses)


def test_accelerate_launch(installed: Environment, server: Server, plain: str) -> None:
    pytest.importorskip("accelerate")
    launch = f"""
    import sys
    from accelerate.commands.launch import main
    sys.executable = {installed.interpreter!r}
    main()"""
    launcher = installed.folder.write("accelerate_launch.py", launch)
    options = ["--cpu", "--num_processes", "1", "--mixed_precision", "no"]
    cache = {"HF_HOME": str(installed.folder.path / "hf"), "ACCELERATE_USE_CPU": "true"}
    done = armed(installed, server, launcher.name, *options, "train.py", STEPS, **cache, **BUDGET)
    assert (done.code, done.out) == (0, plain), done.err
    assert done.err.count(ATTACHED) == done.err.count("model attached") == 1
    assert not unmet(done)


def test_only_a_way_asks() -> None:
    assert asked({"SPILLWAY_BUDGET": "1GiB", "SPILLWAY_ALLOW": "keep"}) == {"budget": "1GiB", "allow": "keep"}
    assert asked({"SPILLWAY_ALLOW": "keep"}) == asked({"SPILLWAY_BUDGET": ""}) == asked({}) == {}
    assert asked({"SPILLWAY_BUDGET": "off", "SPILLWAY_PLAN": "plan.json"}) == {}
