"""A script under ``spillway run`` against the same script under Python: exit code, output and errors are its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from running.scripts import MODELS, SOURCE, Folder, Server

PACKAGE = str(SOURCE / "spillway") + os.sep
"""How the names of our own files begin, wherever the checkout is."""

MAIN = """
import argparse, atexit, multiprocessing, os, pickle, sys

class Point:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == other.x

def double(point):
    return Point(2 * point.x)

if __name__ == "__main__":
    atexit.register(print, "at exit", flush=True)
    parser = argparse.ArgumentParser(description="The script's own.")
    parser.add_argument("--budget", type=int)
    parser.add_argument("rest", nargs="*")
    print(parser.parse_args(), sys.argv, sys.path[0])
    print(__name__, __file__, __package__, __spec__ is None, sys.modules["__main__"].Point is Point)
    print(sys.stdin.read())
    assert pickle.loads(pickle.dumps(Point(1))) == Point(1)
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(double, [Point(2)]) == [Point(4)]
    sys.stdout.flush()
    sys.exit(3)
"""

FAILS = """
def inner(n):
    return 1 / n

def outer():
    try:
        inner(0)
    except ZeroDivisionError as error:
        raise KeyError("on purpose") from error

outer()
"""

HOOKED = """
import sys

def mine(kind, error, trace):
    names = []
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    print("mine", kind.__name__, names)

sys.excepthook = mine

def fails():
    raise ValueError

fails()
"""


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        pytest.param(MAIN, ["--budget", "1", "--", "-x", "--help"], id="main"),
        pytest.param(MAIN, ["--help"], id="help"),
        pytest.param(FAILS, [], id="error"),
        pytest.param(HOOKED, [], id="excepthook"),
        pytest.param("raise KeyboardInterrupt", [], id="interrupt"),
        pytest.param("print('here')\nraise SystemExit('so long')", [], id="message"),
        pytest.param("x = (\n", [], id="syntax"),
    ],
)
def test_a_script_ends_and_speaks_as_under_python(
    text: str, arguments: list[str], folder: Folder, server: Server
) -> None:
    script = folder.write("script.py", text)
    plain = folder.python(script.name, *arguments, stdin="some\ninput")
    managed = server.spillway(folder.path, "run", "--quiet", script.name, *arguments, stdin="some\ninput")
    assert managed == plain


def test_a_module_of_a_package_and_a_folder_run_as_under_python(folder: Folder, server: Server) -> None:
    text = (
        "import sys\nfrom package import here\nprint(__name__, __package__, __spec__.name, sys.argv, sys.path[0], here)"
    )
    folder.write("package/__init__.py", "here = 'there'")
    folder.write("package/__main__.py", text)
    arguments = ["-m", "package", "--lr", "3"]
    assert server.spillway(folder.path, "run", "--quiet", *arguments) == folder.python(*arguments)
    folder.write("alone/__main__.py", "import sys\nprint(__name__, repr(__package__), sys.argv, sys.path[0])")
    assert server.spillway(folder.path, "run", "--quiet", "alone", "a") == folder.python("alone", "a")


WORKERS = (
    MODELS
    + """
class Tokens(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.full((16,), index)

if __name__ == "__main__":
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for method in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(Tokens(), 4, num_workers=1, multiprocessing_context=method)
        for tokens in loader:
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(tokens[:, 0].tolist())
"""
)


def test_workers_of_a_loader_find_the_scripts_classes(folder: Folder, server: Server) -> None:
    script = folder.write("script.py", WORKERS)
    managed = server.spillway(folder.path, "run", "--policy", "recompute", script.name)
    assert managed.code == 0, managed.err
    assert managed.out == "[0, 1, 2, 3]\n[4, 5, 6, 7]\n" * 2
    assert managed.err.count("spillway: ") == 1
    assert "GPT: 4 blocks, recompute" in managed.err


INTERRUPTED = (
    MODELS
    + """
import time
model = GPT()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    while True:
        model(torch.zeros(1, 4, dtype=torch.long)).backward()
        optimizer.step()
        print("step", flush=True)
        time.sleep(0.01)
finally:
    print("finally", flush=True)
"""
)


def test_an_interrupt_is_the_scripts_and_what_came_of_it_is_said_all_the_same(folder: Folder) -> None:
    script = folder.write("script.py", INTERRUPTED)
    process = subprocess.Popen(
        [sys.executable, "-m", "spillway", "run", "--policy", "keep", script.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder.path,
        env=folder.environment(),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "step\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert out.splitlines()[-1] == "finally"
    assert "KeyboardInterrupt" in err
    assert PACKAGE not in err
    assert "GPT: 4 blocks, keep" in err


def test_frames_of_the_first_forward_are_not_shown(folder: Folder, server: Server) -> None:
    text = MODELS + "\nGPT()(torch.zeros(1, 4))\n"
    script = folder.write("script.py", text)
    plain = server.run(folder.path, "import runpy, sys; runpy.run_path(sys.argv[0])", script.name)
    managed = server.spillway(folder.path, "run", "--quiet", "--policy", "keep", script.name)
    assert managed.code == plain.code == 1
    assert PACKAGE not in managed.err
    assert managed.err.splitlines()[-1] == plain.err.splitlines()[-1]
    assert script.name in managed.err
