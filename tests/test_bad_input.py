"""What cannot be meant is refused by a typed error that says what was got, what was expected and what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import spillway
from spillway import (
    BackendError,
    Decision,
    PolicyError,
    Session,
    SessionError,
    SizeError,
    SpillPathError,
    UnsupportedError,
    UsageError,
    offload,
)
from spillway.integrations import AttachOptions
from spillway.policies import Keep, MinBytes, Offload, Ratio
from spillway.runtime.device import backend_for
from spillway.runtime.spill_file import SpillFile, SystemCalls
from spillway.runtime.system import Mount
from spillway.testing import AdversaryBackend
from steps import MiB, assert_no_hook, assert_nothing_left, failing, small_batch, small_model, step


class Case(NamedTuple):
    """Something that is refused."""

    name: str
    run: Callable[[], object]
    error: type[Exception]
    got: str
    expected: str
    advice: str = ""


def sized(name: str, run: Callable[[], object], got: str) -> Case:
    return Case(name, run, SizeError, got, "bytes as an int or a number with a unit", '"512MiB"')


ARGUMENTS = [
    Case("ratio too large", lambda: offload(ratio=1.5), UsageError, "ratio: got 1.5", "from 0", "offload all"),
    Case("ratio negative", lambda: offload(ratio=-0.1), UsageError, "ratio: got -0.1", "from 0", "keep all"),
    Case("ratio a string", lambda: offload(ratio="half"), UsageError, "ratio: got 'half'", "a number"),  # type: ignore[arg-type]
    Case("ratio nan", lambda: offload(ratio=float("nan")), UsageError, "ratio: got nan", "a number"),
    Case("a ratio's own", lambda: Ratio(2), UsageError, "ratio: got 2", "a number"),
    Case(
        "ratio and policy",
        lambda: offload(ratio=0.5, policy=Keep()),
        UsageError,
        "both ratio=0.5",
        "one of them",
        "Ratio",
    ),
    sized("size in parsecs", lambda: offload(min_bytes="12 parsecs"), "min_bytes: got '12 parsecs'"),
    sized("size a float", lambda: offload(min_bytes=1.5), "min_bytes: got 1.5"),  # type: ignore[arg-type]
    sized("size none", lambda: MinBytes(None), "nbytes: got None"),  # type: ignore[arg-type]
    sized("window", lambda: offload(window="wide"), "window: got 'wide'"),
    sized("session window", lambda: Session(window="wide"), "window: got 'wide'"),
    sized("host budget", lambda: Session(host_budget="12 parsecs"), "host_budget: got '12 parsecs'"),
    sized("disk budget", lambda: Session(disk_budget="all"), "disk_budget: got 'all'"),
    sized("writes per hour", lambda: Session(disk_bytes_per_hour="few"), "disk_bytes_per_hour: got 'few'"),
    Case("negative size", lambda: offload(min_bytes=-1), SizeError, "min_bytes: got -1", "at least 0 bytes"),
    Case("negative budget", lambda: Session(host_budget=-1), SizeError, "host_budget: got -1", "at least 0 bytes"),
    Case("tier", lambda: offload(tier="moon"), UsageError, "tier: got 'moon'", "'auto', 'host', 'disk'"),
    Case("tier none", lambda: offload(tier=None), UsageError, "tier: got None", "'auto'"),  # type: ignore[arg-type]
    Case("tier unhashable", lambda: offload(tier=[]), UsageError, "tier: got []", "'auto'"),  # type: ignore[arg-type]
    Case("tier of a policy", lambda: Offload("tape"), UsageError, "tier: got 'tape'", "'auto', 'host', 'disk'"),
    Case("tag", lambda: offload(tag=3), UsageError, "tag: got 3", "a string or None"),  # type: ignore[arg-type]
    Case("policy no callable", lambda: offload(policy="all"), UsageError, "policy: got 'all'", "a callable"),  # type: ignore[arg-type]
    Case("session no session", lambda: offload(session="mine"), UsageError, "session: got 'mine'", "Session"),  # type: ignore[arg-type]
    Case(
        "recorder no callable",
        lambda: Session(recorder=[]),
        UsageError,
        "recorder: got []",
        "a callable",  # type: ignore[arg-type]
    ),
    Case(
        "backend no callable",
        lambda: Session(backend="cpu"),
        UsageError,
        "backend: got 'cpu'",
        "a callable",  # type: ignore[arg-type]
    ),
    Case(
        "mark outside",
        lambda: spillway.offload_tensor(torch.ones(2)),
        UsageError,
        "outside of any spillway.offload context",
        "does not see what autograd saves",
        "policies.Keep()",
    ),
    Case("mark no tensor", lambda: spillway.keep_tensor("x"), UsageError, "got 'x'", "a tensor"),  # type: ignore[arg-type]
    Case(
        "path gone", lambda: Session(spill_directory="/nowhere"), SpillPathError, "/nowhere", "a directory", "SPILLWAY"
    ),
    Case("path no path", lambda: Session(spill_directory=5), SpillPathError, "got 5", "a directory"),  # type: ignore[arg-type]
    Case(
        "policy recomputes",
        lambda: offload(policy=spillway.Recompute()),
        UsageError,
        "policy: got Recompute(",
        "a callable from SavedTensor",
        "spillway.attach",
    ),
    Case("policy a class", lambda: offload(policy=Keep), UsageError, "policy: got <class", "a callable"),  # type: ignore[arg-type]
    Case("model listed", lambda: spillway.list_saved_tensors("x"), UsageError, "model: got 'x'", "torch.nn.Module"),  # type: ignore[arg-type]
    *(
        Case(
            f"loss of {name}",
            lambda logits=logits, target=target, dtype=dtype: spillway.cross_entropy(logits, target, dtype=dtype),
            UsageError,
            f"{name}: got",
            expected,
        )
        for name, logits, target, dtype, expected in (
            ("logits", None, torch.zeros(2, dtype=torch.int64), None, "a tensor"),
            ("target", torch.zeros(2, 3), [0, 1], None, "a tensor"),
            ("dtype", torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.int32, "a floating point type"),
            ("dtype", torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), "float32", "a floating point type"),
        )
    ),
    Case(
        "blocks of one argument",
        lambda: spillway.attach(small_model(), blocks=lambda name: True),  # type: ignore[arg-type, misc]
        UsageError,
        "blocks: got <function",
        "(name, module) -> bool",
    ),
    Case(
        "groups of no module",
        lambda: spillway.attach(small_model(), groups={"mlp": "*.mlp"}),
        UsageError,
        "groups: got '*.mlp'",
        "some of them",
    ),
    Case(
        "streams of no module",
        lambda: spillway.attach(small_model(), stream="foo"),
        UsageError,
        "stream: got 'foo'",
        "some of them",
    ),
    Case(
        "device unknown",
        lambda: spillway.attach(small_model(), stream="*", device="foo"),
        UsageError,
        "device: got 'foo'",
        "such as",
    ),
    Case(
        "device not here",
        lambda: spillway.bind_to_device("mtia"),
        UsageError,
        f"torch {torch.__version__} finds no mtia device",
        "Give '",
    ),
    *(
        Case(f"a trainer's {name}", lambda options=options: AttachOptions(options), UsageError, got, expected)
        for name, options, got, expected in (
            ("budget", {"budget": "x"}, "budget: got 'x'", "bytes"),
            ("host budget", {"budget": "1GiB", "host_budget": "x"}, "host_budget: got 'x'", "bytes"),
            ("least size", {"min_bytes": "x"}, "min_bytes: got 'x'", "bytes"),
            ("decisions", {"budget": "1GiB", "allow": {"x"}}, "allow: got {'x'}", "at least one of"),
            ("hardware", {"budget": "1GiB", "hardware": "v100"}, "hardware: got 'v100'", "one of h200"),
            ("distance", {"every": 0}, "every: got 0", "an integer of at least 1"),
            ("session", {"session": 5}, "session: got 5", "a spillway.Session"),
            ("groups", {"groups": 5}, "groups: got 5", "a mapping"),
            ("device", {"device": "cuda"}, "device: got 'cuda' without stream=", "both"),
        )
    ),
    Case("plan no plan", lambda: spillway.Plan.load(5), UsageError, "path: got 5", "the path of a file"),  # type: ignore[arg-type]
    Case("hardware a number", lambda: spillway.Hardware.named(5), UsageError, "hardware: 5 is", "one of h200"),  # type: ignore[arg-type]
    Case(
        "longest of a model",
        lambda: spillway.longest(5, budget="1GiB"),  # type: ignore[arg-type]
        UsageError,
        "step: got 5",
        "a function from a size",
    ),
    Case(
        "longest of no pair",
        lambda: spillway.longest(lambda size: small_model(), budget="1GiB"),  # type: ignore[arg-type, return-value]
        UsageError,
        "step: got ",
        "a tuple of a model and a batch",
    ),
    Case(
        "longest from a word",
        lambda: spillway.longest(lambda size: (small_model(), small_batch()), budget="1GiB", at_least="x"),  # type: ignore[arg-type]
        UsageError,
        "got at_least='x'",
        "integers",
    ),
    Case(
        "loss a word",
        lambda: spillway.profile(small_model(), small_batch(), loss="mse"),  # type: ignore[arg-type]
        UsageError,
        "loss: got 'mse'",
        "a function",
    ),
    Case(
        "loss detached",
        lambda: spillway.profile(small_model(), small_batch(), loss=lambda y: y.detach().sum()),
        UsageError,
        "loss: got a number",
        "no trainable parameter",
        "Unfreeze",
    ),
    Case(
        "profile without gradients",
        lambda: torch.no_grad()(spillway.profile)(small_model(), small_batch()),
        UsageError,
        "Gradients are off",
        "a backward",
        "outside of",
    ),
    Case("path a file", lambda: Session(spill_directory=__file__), SpillPathError, "not a directory", "a directory"),
]


@pytest.mark.parametrize("case", ARGUMENTS, ids=lambda case: case.name)
def test_an_argument_that_cannot_be_meant_is_refused_at_once(case: Case) -> None:
    message = failing(case.error, case.run)
    for part in (case.got, case.expected, case.advice):
        assert part in message
    assert_no_hook()


def test_arguments_are_keywords_only() -> None:
    for call in (lambda: offload(0.5), lambda: Session("1MiB"), lambda: spillway.keep_tensor(torch.ones(1), None)):  # type: ignore[call-arg, misc]
        failing(TypeError, call)


# Policies


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(window=0, spill_directory=tmp_path) as session:
        yield session
        assert_nothing_left(session)


@pytest.mark.parametrize("answer", [None, True, "offload", 1, Decision, ("offload",)])
@pytest.mark.parametrize("at", [0, 3])
def test_an_answer_that_is_no_decision_is_refused_in_the_forward_that_asked(
    session: Session, answer: object, at: int
) -> None:
    def policy(saved: spillway.SavedTensor) -> Any:
        return answer if saved.position == at else Decision.OFFLOAD

    model, x = small_model(), small_batch()
    plain = step(model, x)
    message = failing(PolicyError, lambda: step(model, x, offload(policy=policy, min_bytes=0, session=session)))
    for part in (f"got {answer!r}", "SavedTensor(", "expected a spillway.Decision", "Decision.OFFLOAD_HOST"):
        assert part in message
    assert_nothing_left(session)
    assert step(model, x, offload(min_bytes=0, session=session)) == plain


def test_the_name_of_the_policy_is_in_the_message(session: Session) -> None:
    def my_own_policy(saved: spillway.SavedTensor) -> Any:
        return "yes"

    model, x = small_model(), small_batch()
    for policy in (my_own_policy, spillway.policies.AnyOf(Keep(), my_own_policy)):
        context = offload(policy=policy, min_bytes=0, session=session)
        assert "my_own_policy" in failing(PolicyError, lambda context=context: step(model, x, context))


# Sessions


def enter(context: AbstractContextManager[Any]) -> None:
    with context:
        pass


def test_a_closed_session_is_refused_wherever_it_is_given(tmp_path: Path) -> None:
    session = Session(spill_directory=tmp_path)
    session.close()
    context = offload(session=session)
    uses: list[Callable[[], object]] = [
        lambda: enter(context),
        lambda: context(lambda: None)(),
        session.use_as_default,
        lambda: enter(session),
        lambda: session.runtime(torch.device("cpu")),
        lambda: spillway.keep_tensor(torch.ones(1), session=session),
        lambda: spillway.attach(small_model(), policy="offload", session=session),
    ]
    for use in uses:
        message = failing(SessionError, use)
        assert "got a closed session, expected an open one; make a new Session" in message
        assert_no_hook()


def test_a_session_closed_inside_of_its_own_context_is_an_error_and_leaves_no_hook(tmp_path: Path) -> None:
    session = Session(spill_directory=tmp_path, window=0)

    def run() -> None:
        with offload(session=session, min_bytes=0):
            y = small_batch().requires_grad_().exp()
            session.close()
            y.sin().cos()

    assert "closed session" in failing(SessionError, run)
    assert_no_hook()


# Places where it cannot work


def cube(x: Tensor) -> Tensor:
    return (x * x * x).sum()


CONTEXTS: dict[str, Callable[[Session], Any]] = {
    "offload": lambda session: offload(session=session),
    "keep": lambda session: spillway.keep(),
    "offload with modules": lambda session: offload(session=session, policy=spillway.policies.Modules("*")),
    "offload with operators": lambda session: offload(session=session, policy=spillway.policies.Operators("*")),
}

TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(x.unsqueeze(0)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in jvp
@pytest.mark.parametrize("context", list(CONTEXTS))
@pytest.mark.parametrize("transform", list(TRANSFORMS))
def test_contexts_inside_of_torch_func_are_refused(session: Session, context: str, transform: str) -> None:
    def inside(x: Tensor) -> Tensor:
        with CONTEXTS[context](session):
            return cube(x)

    message = failing(UnsupportedError, lambda: TRANSFORMS[transform](inside, torch.ones(3)))
    for part in ("got", "torch.func", "expected plain autograd", "hooks"):
        assert part in message
    assert_no_hook()
    x = torch.ones(3, requires_grad=True)
    with CONTEXTS[context](session):
        loss = cube(x)
    loss.backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("transform", list(TRANSFORMS))
def test_torch_func_inside_of_an_offload_works_or_is_refused_by_name(session: Session, transform: str) -> None:
    """Hooks that are installed already when a transform begins."""
    expected = TRANSFORMS[transform](cube, torch.ones(3))
    with offload(session=session, min_bytes=0):
        try:
            got = TRANSFORMS[transform](cube, torch.ones(3))
        except RuntimeError as error:
            got = error
    assert_no_hook()
    if isinstance(got, RuntimeError):
        # Torch's own refusal is as good as ours: it says what it does not support.
        assert "saved tensor hooks" in str(got)
    elif isinstance(expected, Tensor):
        assert torch.equal(got, expected)


def test_a_tensor_on_a_device_without_a_backend_is_refused_by_name() -> None:
    for device in ("meta", "xla", "hpu"):
        message = failing(BackendError, lambda device=device: backend_for(torch.device(device)))
        for part in (f"A saved tensor is on {device}", "serves the CPU", "spillway.keep()", "give Session a backend"):
            assert part in message


def test_a_backend_that_refuses_is_an_error_of_the_forward_and_leaves_no_hook(tmp_path: Path) -> None:
    def refusing(device: torch.device) -> Any:
        raise BackendError(f"got a saved tensor on {device}, expected none; go away")

    with Session(spill_directory=tmp_path, backend=refusing) as session:
        message = failing(
            BackendError, lambda: step(small_model(), small_batch(), offload(min_bytes=0, session=session))
        )
        assert "go away" in message
        assert_nothing_left(session)


def test_meta_tensors_stay() -> None:
    with Session() as session, offload(min_bytes=0, session=session):
        loss = torch.ones(4, device="meta", requires_grad=True).exp().sum()
        loss.backward()
    assert_no_hook()


@pytest.mark.parametrize("version", ["2.10.1", "2.4.0+cu121", "1.13.1", "unknown"])
def test_a_torch_that_is_too_old_is_refused_by_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    message = failing(UnsupportedError, spillway._require_torch)
    for part in (f"got torch {version}", "expected", "2.11", "pip install"):
        assert part in message


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("from spillway import offload", "UnsupportedError: got torch"),
        ("import spillway; spillway.policies", "UnsupportedError: got torch"),
        ("from spillway.cli.app import main; main()", "error: got torch"),
    ],
)
def test_beside_a_torch_that_is_too_old_it_is_said_before_anything_else(code: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '2.10.0'")
    source = str(Path(spillway.__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", code, "run", "train.py"],
        env={"PYTHONPATH": f"{tmp_path}:{source}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert f"{told} 2.10.0, expected 2.11 or later" in run.stderr


# Spill paths in memory


class InMemory(SystemCalls):
    """Everything is on a file system of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def mounts(self) -> list[Mount]:
        return [Mount("/", self.kind, self.kind)]


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_a_spill_path_in_memory_is_refused_unless_asked_for_by_name(tmp_path: Path, kind: str) -> None:
    calls = InMemory(kind)
    message = failing(SpillPathError, lambda: SpillFile(tmp_path, calls=calls))
    for part in (f"got {str(tmp_path)!r}", kind, "host memory", "expected a directory on a disk", "SPILLWAY_DIR"):
        assert part in message
    assert "allow_memory_filesystem=True" in message
    SpillFile(tmp_path, calls=calls, allow_memory_filesystem=True).close()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="has no /dev/shm")
def test_a_session_on_the_shared_memory_of_this_machine_is_refused_unless_asked_for_by_name() -> None:
    shared = Path("/dev/shm")
    before = set(shared.iterdir())
    message = failing(SpillPathError, lambda: Session(spill_directory=shared))
    assert "host memory" in message and "allow_memory_filesystem=True" in message
    with Session(spill_directory=shared, allow_memory_filesystem=True, disk_budget=MiB, window=0) as session:
        model, x = small_model(), small_batch()
        plain = step(model, x)
        context = offload(min_bytes=0, tier="disk", session=session)
        assert step(model, x, context) == plain
        assert context.stats().reloaded_bytes > 0
    assert set(shared.iterdir()) == before


@pytest.mark.parametrize("streams", [3, {"in": None}, {"out": 3}, {"out": torch.device("cpu")}], ids=str)
def test_streams_that_are_none_are_refused(streams: Any) -> None:
    with pytest.raises(spillway.UsageError, match="streams"):
        spillway.Session(streams=streams)


def test_streams_and_a_backend_are_refused() -> None:
    with pytest.raises(spillway.UsageError, match="both"):
        spillway.Session(streams={}, backend=AdversaryBackend().serve)
