"""Scripts that tests write and run, with and without what sees them."""

from __future__ import annotations

import atexit
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch

from spillway import Hardware
from spillway.profiler.machine import cache_file
from spillway.runtime.system import device_name

SOURCE = Path(__file__).parents[2] / "src"

MODELS = """
import sys
import torch
from torch import nn

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    def __init__(self, width=64, layers=4):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
"""

TRAINING = (
    MODELS
    + """
torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
try:
    for step in range(int(sys.argv[1])):
        loss = model(torch.randint(64, (4, 64)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item().hex(), flush=True)
finally:
    print("finally")
"""
)

RANKS = (
    MODELS
    + """
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(dist.get_rank())
with open(f"losses.{dist.get_rank()}.{sys.argv[1]}", "w") as file:
    for step in range(7):
        loss = model(torch.randint(64, (4, 64)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex(), file=file)
dist.destroy_process_group()
"""
)


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it said."""

    code: int
    out: str
    err: str


_SERVER = """
import atexit
import os
import sys

code = 0

def leave():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

# Registered first, so that it is called last: to take torch apart, module by module, would take half a second.
atexit.register(leave)

import gc
import json

import torch._dynamo.decorators

import spillway.attaching.budget
import spillway.cli.bench
import spillway.cli.running.managed

# Or each child would go through all of it as it ends.
gc.freeze()
for line in iter(sys.stdin.readline, ""):
    process = os.fork()
    if not process:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
else:
    sys.exit()
order = json.loads(line)
os.chdir(order["folder"])
os.environ.update(order["environment"])
for number, name in enumerate(["stdin", "stdout", "stderr"]):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if number else 0), 0o600), number)
sys.argv = order["arguments"]
if order["takes_apart"]:
    atexit.unregister(leave)
try:
    exec(order["code"])
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    raise
except KeyboardInterrupt:
    # Python ends itself by this signal, after all else.
    atexit.unregister(leave)
    raise
except BaseException:
    code = 1
    raise
"""


class Server:
    """A process that has imported all that takes long, and forks for each command."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(
        self,
        folder: Path,
        code: str,
        *arguments: object,
        stdin: str = "",
        takes_apart: bool = True,
        **environment: str,
    ) -> Ended:
        """What code says and ends with, in a folder.

        Args:
            folder: where.
            code: Python.
            arguments: of its command line.
            stdin: its input.
            takes_apart: whether Python takes its modules apart in the end, as it does without this server. Threads
                have ended and the functions of ``atexit`` were called in either case.
            environment: more of its environment.
        """
        (folder / "stdin").write_text(stdin)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        words = list(map(str, arguments))
        order = {
            "folder": str(folder),
            "code": code,
            "environment": environment,
            "arguments": words,
            "takes_apart": takes_apart,
        }
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        ended_with = int(self._process.stdout.readline())
        out, err = ((folder / name).read_text() for name in ("stdout", "stderr"))
        return Ended(ended_with, out, err)

    def spillway(self, folder: Path, *arguments: object, takes_apart: bool = True, **environment: str) -> Ended:
        """The command line. Its standard input is empty unless stdin is given."""
        code = "from spillway.cli.app import main; main()"
        return self.run(folder, code, "spillway", *arguments, takes_apart=takes_apart, **environment)

    def told(self, folder: Path, *arguments: object, **environment: str) -> Ended:
        """The same where only its words, files and exit code matter: Python does not take its modules apart."""
        return self.spillway(folder, *arguments, takes_apart=False, **environment)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@functools.cache
def shared_server() -> Server:
    """The server of all test files, which takes long to start. It ends with the tests."""
    folder = tempfile.TemporaryDirectory(prefix="spillway-server-")
    path = Path(folder.name)
    server = Server(Folder(path, keep_hardware(path / "cache")).environment())
    atexit.register(folder.cleanup)
    atexit.register(server.close)
    return server


@dataclass(frozen=True)
class Folder:
    """Where scripts are."""

    path: Path
    cache: Path
    """Of what machines can do."""

    def write(self, name: str, text: str) -> Path:
        file = self.path / name
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(textwrap.dedent(text))
        return file

    def environment(self, **more: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
        return {
            **inherited,
            "PYTHONPATH": str(SOURCE),
            "SPILLWAY_CACHE": str(self.cache),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **more,
        }

    def python(self, *arguments: object, stdin: str = "", **environment: str) -> Ended:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            input=stdin,
            capture_output=True,
            text=True,
            cwd=self.path,
            env=self.environment(**environment),
            timeout=120,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def spillway(self, *arguments: object, stdin: str = "", **environment: str) -> Ended:
        return self.python("-m", "spillway", *arguments, stdin=stdin, **environment)


def keep_hardware(folder: Path) -> Path:
    """Some machine's rates as those of this one, so that none is measured."""
    file = cache_file(
        device_name(torch.device("cpu")),
        platform.node(),
        torch.__version__,
        os.environ.get("SPILLWAY_DIR") or None,
        {"SPILLWAY_CACHE": str(folder)},
    )
    assert file is not None
    file.parent.mkdir(exist_ok=True)
    Hardware.named("h200").save(file)
    return folder
