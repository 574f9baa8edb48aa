"""The spill file in processes of their own: limits of the kernel's, forks, signals, and two jobs on one path."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import spillway.errors
from runtime.disk_support import MiB, needs_proc

# The packages' own __init__ are passed over, and torch has a stand-in: it takes seconds, and the file does not need it.
CHILD = """
import mmap, os, signal, sys, threading, types
source = sys.argv.pop(1)
for name in ("spillway", "spillway.runtime"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [os.path.join(source, *name.split("."))]
class StandIn(types.ModuleType):
    def __getattr__(self, name):
        return type(name, (), {})
for name in ("torch", "spillway._torch"):
    sys.modules[name] = StandIn(name)
from spillway.errors import SessionError, TierFullError
from spillway.runtime.spill_file import SpillFile, ALIGNMENT, SystemCalls
signal.alarm(120)
def page(content, nbytes=ALIGNMENT):
    memory = mmap.mmap(-1, nbytes)
    memory[: len(content)] = content
    return memory
def raises(kind, call, *arguments):
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    raise SystemExit(f"{call} did not raise {kind}")
def say(word):
    print(word, flush=True)
def put(content, nbytes):
    extent = file.allocate(nbytes)
    file.write(extent, page(content, nbytes))
    return extent
def get(extent):
    back = page(b"", extent.reserved)
    file.read(extent, back)
    return back[: extent.nbytes]
file = SpillFile(sys.argv[1], allow_memory_filesystem=True)
"""


def start(directory: Path, script: str, *arguments: str) -> subprocess.Popen[str]:
    source = str(Path(spillway.errors.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + script, source, str(directory), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What it printed, when it ended well."""
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, (process.returncode, out, err)
    assert not err
    return out


@needs_proc
def test_h49_disk_full_of_a_real_kernel_does_not_kill_the_process_and_nothing_is_mapped(tmp_path: Path) -> None:
    script = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
extent = put(b"x", 2**20)
say(raises(TierFullError, file.allocate, 1))
assert get(extent)[:1] == b"x"
assert sys.argv[1] not in open("/proc/self/maps").read(), "the file is mapped: a full disk would be a SIGBUS"
"""
    assert "File too large" in finish(start(tmp_path, script))


@needs_proc
@pytest.mark.parametrize(
    "end", ["file.close()", pytest.param("del file; import gc; gc.collect()", marks=pytest.mark.long), "pass"]
)
def test_h50_forked_child_cannot_use_the_file_and_its_end_does_no_harm(tmp_path: Path, end: str) -> None:
    script = f"""
extent = put(b"parent's", 8192)
child = os.fork()
if child == 0:
    for call in (lambda: file.allocate(1), lambda: file.write(extent, page(b"")), lambda: file.read(extent, page(b""))):
        assert f"expected its owner, process {{os.getppid()}}" in raises(SessionError, call)
    file.free(extent)
    file.free(extent)  # a finaliser of the parent's that ends here as well: nothing, and no error
    file.used_bytes, file.reserved_bytes
    {end}
    sys.exit()  # with all that the interpreter does at its end
assert os.waitpid(child, 0)[1] == 0
assert file.used_bytes == 8192
assert get(extent)[:8] == b"parent's"
assert get(put(b"another", 8192))[:7] == b"another"
file.close()
"""
    finish(start(tmp_path, script))


@needs_proc
def test_h50_forked_child_does_not_wait_for_a_lock_that_a_thread_of_the_parent_held(tmp_path: Path) -> None:
    script = """
standing, go = threading.Event(), threading.Event()
class Held(SystemCalls):
    def fallocate(self, fd, offset, length):
        if offset:
            standing.set()
            go.wait()
        super().fallocate(fd, offset, length)
file = SpillFile(sys.argv[1], allow_memory_filesystem=True, calls=Held())
extent = file.allocate(1)
thread = threading.Thread(target=file.allocate, args=(64 * 2**20,))
thread.start()
standing.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    raises(SessionError, file.allocate, 1)
    file.free(extent), file.used_bytes, file.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
go.set()
thread.join()
file.free(extent)
"""
    finish(start(tmp_path, script))


@needs_proc
def test_h50_forked_child_that_lives_on_does_not_hold_the_space_of_a_closed_file(tmp_path: Path) -> None:
    script = """
file.allocate(1)
inside, outside = os.pipe()
child = os.fork()
if child == 0:
    os.read(inside, 1)
    os._exit(0)
def sizes():
    links = [f"/proc/{child}/fd/{fd}" for fd in os.listdir(f"/proc/{child}/fd")]
    return [os.stat(link).st_size for link in links if os.readlink(link).startswith(sys.argv[1])]
assert sizes() == [64 * 2**20], sizes()
file.close()
assert sizes() == [0], sizes()
os.write(outside, b"x")
assert os.waitpid(child, 0)[1] == 0
"""
    finish(start(tmp_path.resolve(), script))


@needs_proc
@pytest.mark.parametrize(
    ("deadly", "way"),
    [
        (signal.SIGTERM, "tmpfile"),
        (signal.SIGKILL, "named"),
        pytest.param(signal.SIGTERM, "named", marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, "tmpfile", marks=pytest.mark.long),
    ],
)
def test_h52_spill_files_left_after_sigterm_sigkill_are_none(tmp_path: Path, deadly: signal.Signals, way: str) -> None:
    script = """
class Calls(SystemCalls):
    def open(self, path, flags, mode):
        if sys.argv[2] == "named" and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "no O_TMPFILE here")
        return super().open(path, flags, mode)
os.umask(0)
file = SpillFile(sys.argv[1], allow_memory_filesystem=True, calls=Calls())
put(b"x", 2**20)
say("written")
sys.stdin.read()
"""
    directory = tmp_path.resolve()
    process = start(directory, script, way)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        links = [f"/proc/{process.pid}/fd/{fd}" for fd in os.listdir(f"/proc/{process.pid}/fd")]
        spilled = [link for link in links if os.readlink(link).startswith(str(directory))]
        assert len(spilled) == 1
        assert os.readlink(spilled[0]).endswith("(deleted)")
        status = os.stat(spilled[0])
        assert (status.st_nlink, stat.S_IMODE(status.st_mode)) == (0, 0o600)
        assert status.st_blocks * 512 >= 64 * MiB, "the space is reserved"
        assert list(directory.iterdir()) == [], "it has no name even while it is in use"
    finally:
        process.send_signal(deadly)
        process.communicate(timeout=60)
    assert process.returncode == -deadly
    assert list(directory.iterdir()) == []


def test_h53_two_jobs_one_path_never_meet(tmp_path: Path) -> None:
    script = """
name = sys.argv[2].encode()
extents = [put(name * number, 8192) for number in range(50)]
say("written")
sys.stdin.readline()
for number, extent in enumerate(extents):
    assert get(extent) == (name * number).ljust(8192, b"\\0")
file.close()
"""
    jobs = [start(tmp_path, script, name) for name in ("one", "two")]
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == "written\n"
    finish(jobs[0])  # the first reads, closes and ends while the second still holds its own
    finish(jobs[1])
    assert list(tmp_path.iterdir()) == []
