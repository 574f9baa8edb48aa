"""What comes from outside the program: files that a user names, and names that others chose."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import spillway
from running.scripts import MODELS, TRAINING, Folder, Server, keep_hardware
from spillway.errors import printable
from spillway.planner.files import check_writable, read_file, write_file
from spillway.planner.hardware import Hardware
from spillway.planner.profile import Profile
from spillway.planner.report.facts import facts_of
from spillway.planner.report.page import to_page, to_trace

LLAMA = Profile.load(Path(__file__).parents[1] / "planner" / "llama_8b_block.json")
ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b2J\u202e"
"""Colours, a title, a bell, an 8-bit sequence, and letters from right to left."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("outside")
    folder = Folder(path, keep_hardware(path / "cache"))
    folder.write("train.py", TRAINING)
    os.mkfifo(path / "fifo")
    (path / "folder").mkdir()
    (path / "dangling").symlink_to("absent/file")
    (path / "loop").symlink_to("loop")
    replace(LLAMA, calls=LLAMA.calls[:2]).save(path / "profile.json")
    return folder


# Files.


@pytest.mark.timeout(120)
@pytest.mark.covered(times=2)
@pytest.mark.parametrize("name", ["fifo", "folder", "dangling", "loop", "/dev/zero", "absent"])
@pytest.mark.parametrize(
    "command",
    [
        ("plan", "NAME", "--budget", "50%", "--hardware", "h100"),
        ("plan", "profile.json", "--budget", "50%", "--hardware", "NAME"),
        ("report", "profile.json", "NAME", "--text"),
        ("run", "--plan", "NAME", "train.py", "1"),
        ("run", "--hardware", "NAME", "--budget", "1GiB", "train.py", "1"),
        ("bench", "--ways", "plan=NAME", "train.py", "1"),
    ],
)
def test_only_a_regular_file_is_read(command: tuple[str, ...], name: str, folder: Folder, server: Server) -> None:
    done = server.told(folder.path, *(word.replace("NAME", name) for word in command))
    assert (done.code, done.out) == (2, "")
    assert name in done.err
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


@pytest.mark.timeout(120)
@pytest.mark.covered(times=2)
@pytest.mark.parametrize("name", ["fifo", "folder", "dangling", "loop"])
@pytest.mark.parametrize(
    "command",
    [
        ("plan", "profile.json", "--budget", "50%", "--hardware", "h100", "--output", "NAME"),
        ("report", "profile.json", "plan.json", "-o", "NAME"),
        ("report", "profile.json", "plan.json", "--trace", "NAME"),
        ("run", "--policy", "keep", "-o", "NAME", "train.py", "1"),
        ("run", "--policy", "keep", "--report", "NAME", "train.py", "1"),
        ("run", "--budget", "3GiB", "--profile", "NAME", "train.py", "1"),
        ("profile", "-o", "NAME", "train.py", "1"),
        ("bench", "-o", "NAME", "train.py", "1"),
        ("demo", "-o", "NAME"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    command: tuple[str, ...], name: str, folder: Folder, server: Server
) -> None:
    done = server.told(folder.path, *(word.replace("NAME", name) for word in command))
    assert (done.code, done.out) == (2, "")
    assert f"'{name}'" in done.err
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


def test_regular_files_links_to_them_and_character_devices_are_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write_file(tmp_path / "link", "text")
    assert read_file(tmp_path / "link", "Plan") == (tmp_path / "file").read_bytes() == b"text"
    write_file("/dev/null", "text")
    check_writable("--json", None)
    with pytest.raises(spillway.UsageError, match="null byte"):
        read_file("a\0b", "Plan")
    with pytest.raises(spillway.UsageError, match=r"--json: 'absent/' cannot be written .*Give the name of a file"):
        check_writable("--json", "absent/")


@pytest.mark.timeout(120)
def test_a_cache_that_is_a_fifo_is_measured_again_and_replaced(folder: Folder, server: Server) -> None:
    [cache] = folder.cache.glob("hardware-*.json")
    kept = cache.read_bytes()
    cache.unlink()
    os.mkfifo(cache)
    done = server.told(folder.path, "doctor", "--seconds", "0.1", SPILLWAY_CACHE=str(folder.cache))
    assert done.code == 0, done.err
    assert cache.is_file()
    assert Hardware.load(cache).source.startswith("measured")
    cache.write_bytes(kept)


@pytest.mark.timeout(120)
def test_text_for_the_demo_is_read_from_regular_files_only(folder: Folder, server: Server) -> None:
    done = server.told(folder.path, "demo", "--data", "fifo", "--ways", "baseline", "--steps", "3", "--layers", "1")
    assert done.code == 2
    assert "--data: got 0 bytes of text in regular files of 'fifo'" in done.err


# Names.


def assert_harmless(text: str) -> None:
    lines = text.split("\n")
    assert all(map(str.isprintable, lines)), [line for line in lines if not line.isprintable()]


def test_what_a_terminal_obeys_is_escaped_and_all_else_stays() -> None:
    assert printable("layers.0 é 中") == "layers.0 é 中"
    assert printable(f"a{ESCAPES}\n") == r"a\x1b[31mred\x1b]0;title\x07\x9b2J\u202e\n"
    error = spillway.UsageError(f"first {ESCAPES}\nsecond")
    assert str(error) == f"first {printable(ESCAPES)}\nsecond"
    assert error.args == (f"first {ESCAPES}\nsecond",)


def named(profile: Profile) -> Profile:
    """The same profile of a model whose names are not harmless."""
    kinds = tuple(
        replace(
            kind,
            kind=f"{kind.kind}{ESCAPES}",
            operators=tuple(replace(each, name=f"{each.name}{ESCAPES}") for each in kind.operators),
        )
        for kind in profile.kinds
    )
    calls = tuple(replace(call, name=f"{call.name}{ESCAPES}\n") for call in profile.calls[:2])
    return replace(profile, model=f"Llama{ESCAPES}\n", kinds=kinds, calls=calls)


def test_names_of_a_file_reach_terminal_page_and_trace_as_text(folder: Folder, server: Server) -> None:
    profile = named(LLAMA)
    profile.save(folder.path / "named.json")
    done = server.told(
        folder.path, "plan", "named.json", "--budget", "50%", "--hardware", "h100", "-o", "named-plan.json"
    )
    assert done.code == 0, done.err
    assert r"\x1b[31mred" in done.out
    assert_harmless(done.out + done.err)
    told = server.told(folder.path, "report", "named.json", "named-plan.json", "--text", "--hardware", "h100")
    assert told.code == 0, told.err
    assert_harmless(told.out + told.err)
    plan = spillway.Plan.load(folder.path / "named-plan.json")
    assert plan.blocks[0].name == profile.calls[0].name
    assert_harmless(f"{plan}\n{profile}")
    facts = facts_of(profile, plan, Hardware.named("h100"))
    events = json.loads(to_trace(facts))["traceEvents"]
    for event in events:
        assert_harmless(event["name"])
        assert all(each.isprintable() for each in event.get("args", {}).values() if isinstance(each, str))
    plotly = pytest.importorskip("plotly.offline", reason="the page is drawn by plotly")
    page = to_page(facts).replace(plotly.get_plotlyjs(), "")
    assert len(page) < 1 << 20
    assert r"\x1b[31mred" in page
    assert "\x1b" not in page and "\u202e" not in page and r"\u001b" not in page


NAMED = (
    MODELS
    + f"""
ESCAPES = {ESCAPES!r}
Block.__name__ = GPT.__name__ = "Named" + ESCAPES

class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        for number in range(2):
            self.add_module(str(number) + ESCAPES, Block(32))

    def forward(self, x):
        for child in self.children():
            x = child(x)
        return x.square().mean()

Holder.__name__ = "Holder" + ESCAPES
"""
)
GIVEN_UP = (
    NAMED
    + "model = nn.Linear(4, 4)\ntype(model).__name__\nclass Odd(nn.Linear): pass\n"
    + ("Odd.__name__ += ESCAPES\nmodel = Odd(4, 4)\nmodel(torch.ones(1, 4)).sum().backward()\n")
)
ATTACHED = NAMED + "Holder()(torch.ones(1, 32)).backward()\n"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        pytest.param(GIVEN_UP, ["--policy", "keep"], id="not attached"),
        pytest.param(ATTACHED, ["--policy", "keep"], id="attached"),
        pytest.param(ATTACHED, ["--budget", "1KiB"], id="budget"),
    ],
)
def test_names_of_a_scripts_classes_and_modules_reach_the_terminal_as_text(
    text: str, options: list[str], folder: Folder, server: Server
) -> None:
    folder.write("named.py", text)
    done = server.told(folder.path, "run", "--best-effort", *options, "named.py")
    assert r"\x1b[31mred" in done.err
    assert_harmless(done.err)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", f"absent{ESCAPES}.py"),
        ("run", "-m", f"absent{ESCAPES}"),
        ("run", "--plan", f"absent{ESCAPES}", "train.py"),
        ("run", "-o", f"absent{ESCAPES}/out", "--policy", "keep", "train.py"),
        ("run", "--policy", ESCAPES, "train.py"),
        ("plan", f"absent{ESCAPES}", "--budget", "1GiB"),
        ("plan", "profile.json", "--budget", ESCAPES),
        ("plan", "profile.json", "--budget", "1GiB", "--hardware", ESCAPES),
        ("profile", "-o", f"absent{ESCAPES}/out", "train.py"),
        ("bench", "--ways", ESCAPES, "train.py"),
        ("demo", "--data", f"absent{ESCAPES}"),
        ("demo", "--device", ESCAPES),
        ("doctor", "--spill-directory", f"absent{ESCAPES}"),
        ("run", "--\x1b[31m", "train.py"),
        (ESCAPES,),
    ],
)
def test_what_a_command_is_given_is_repeated_as_text(
    arguments: tuple[str, ...], folder: Folder, server: Server
) -> None:
    done = server.told(folder.path, *arguments)
    assert done.code in (1, 2)
    assert_harmless(done.out + done.err)


@pytest.mark.parametrize("name", ["..x", ".x", "x.", "a..b", "", ".", "__main__", "__mp_main__", "sys", "absent.x"])
def test_a_name_of_no_module_is_one_sentence(name: str, folder: Folder, server: Server) -> None:
    done = server.told(folder.path, "run", "-m", name)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: got -m {name!r}, expected")
    assert done.err.count("\n") == 1
