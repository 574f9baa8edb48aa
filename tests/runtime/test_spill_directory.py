"""Where the spill file may live: a directory that was named, or a default one, and no host memory unasked."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from runtime.disk_support import get, make, needs_proc, put
from spillway.errors import SpillPathError
from spillway.runtime.spill_file import SpillFile, SystemCalls
from spillway.runtime.system import Mount


class Mounted(SystemCalls):
    """A disk, and on it what a test wants mounted."""

    def __init__(self, *mounts: Mount) -> None:
        self.table = [Mount("/", "ext4", "/dev/sda1"), *mounts]

    def mounts(self) -> Sequence[Mount]:
        return self.table


def in_memory(*points: Path | str) -> Mounted:
    return Mounted(*(Mount(str(point), "tmpfs", "tmpfs") for point in points))


@pytest.mark.parametrize(("kind", "device"), [("tmpfs", "tmpfs"), ("ramfs", "ramfs"), ("ext4", "/dev/zram0")])
def test_h68_tmpfs_and_its_like_are_refused_and_can_be_allowed(tmp_path: Path, kind: str, device: str) -> None:
    calls = Mounted(Mount(str(tmp_path.resolve()), kind, device))
    (tmp_path / "inside").mkdir()
    with pytest.raises(SpillPathError, match=r"host memory: spilling there saves nothing.*allow_memory_filesystem"):
        SpillFile(tmp_path / "inside", calls=calls)
    with closing(SpillFile(tmp_path / "inside", calls=calls, allow_memory_filesystem=True)) as file:
        assert get(file, put(file, b"asked for")) == b"asked for"


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no /dev/shm")
def test_h68_tmpfs_that_is_real_is_known_from_the_mount_table(tmp_path: Path) -> None:
    with pytest.raises(SpillPathError, match="tmpfs"):
        SpillFile("/dev/shm")
    link = tmp_path / "looks-like-a-disk"
    link.symlink_to("/dev/shm")
    with pytest.raises(SpillPathError, match="tmpfs"):
        SpillFile(link)
    with closing(SpillFile("/dev/shm", allow_memory_filesystem=True)) as file:
        assert get(file, put(file, b"asked for")) == b"asked for"


def test_h68_tmpfs_is_told_by_the_mount_on_top_and_by_whole_names(tmp_path: Path) -> None:
    here = str(tmp_path.resolve())
    calls = Mounted(
        Mount("/", "tmpfs", "tmpfs"),
        Mount(here, "tmpfs", "tmpfs"),
        Mount(here, "xfs", "/dev/nvme0n1"),
        Mount(here + "/mem", "tmpfs", "tmpfs"),
    )
    (tmp_path / "memory").mkdir()
    with closing(SpillFile(tmp_path / "memory", calls=calls)) as file:
        assert file.directory == tmp_path.resolve() / "memory"


def test_a_path_that_is_gone_or_no_directory_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, why in [("gone", "No such file"), ("file", "not a directory"), ("file/under", "Not a directory")]:
        with pytest.raises(SpillPathError, match=why) as caught:
            make(tmp_path / path)
        assert str(tmp_path / path) in str(caught.value)
        assert "SPILLWAY_DIR" in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_path_that_is_not_writable_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SpillPathError, match="not writable"):
        make(tmp_path)


@needs_proc
def test_a_kernel_file_system_is_refused() -> None:
    with pytest.raises(SpillPathError):
        make(Path("/proc/self"))


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary and a working directory of the test's own, and no variable."""
    for name in ("temporary", "working", "chosen"):
        (tmp_path / name).mkdir()
    monkeypatch.delenv("SPILLWAY_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "working")
    return tmp_path.resolve()


def test_the_default_is_the_first_directory_that_is_not_in_memory(places: Path) -> None:
    temporary, working, var = places / "temporary", places / "working", Path("/var/tmp").resolve()
    assert SpillFile(calls=in_memory()).directory == temporary
    if var.is_dir():
        assert SpillFile(calls=in_memory(temporary)).directory == var
    assert SpillFile(calls=in_memory(temporary, var)).directory == working
    with pytest.raises(SpillPathError, match="set SPILLWAY_DIR") as caught:
        SpillFile(calls=in_memory(temporary, var, working))
    assert all(str(place) in str(caught.value) for place in (temporary, working))
    allowed = SpillFile(calls=in_memory(temporary), allow_memory_filesystem=True).directory
    assert allowed != temporary, "being allowed is no reason to prefer it"
    assert SpillFile(calls=in_memory("/"), allow_memory_filesystem=True).directory == temporary


def test_the_variable_comes_before_the_defaults_and_an_argument_before_the_variable(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILLWAY_DIR", str(places / "chosen"))
    assert SpillFile(calls=Mounted()).directory == places / "chosen"
    assert SpillFile("../temporary", calls=Mounted()).directory == places / "temporary"
    with pytest.raises(SpillPathError, match="host memory"):
        SpillFile(calls=in_memory(places / "chosen"))
    monkeypatch.setenv("SPILLWAY_DIR", str(places / "gone"))
    with pytest.raises(SpillPathError, match="gone"):
        SpillFile(calls=Mounted())
    monkeypatch.setenv("SPILLWAY_DIR", "")
    assert SpillFile(calls=Mounted()).directory == places / "temporary"
