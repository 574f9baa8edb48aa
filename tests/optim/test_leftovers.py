"""Nothing is left of an optimizer: no hook, no thread, no block of pinned memory, no cycle; nothing hangs in a fork."""

from __future__ import annotations

import gc
import os
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module, Parameter

import spillway
from optim.support import (
    Block,
    assert_same_values,
    batches,
    here,
    is_away,
    loss_of,
    offloaded,
    plainly,
    train,
    wide,
)
from running.scripts import Ended, Server
from spillway import OffloadedOptimizer, SessionError, UsageError
from spillway.testing import AdversaryBackend

AdamW = torch.optim.AdamW


_before: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def threads_of_others() -> None:
    """What other tests left to the collector is not counted."""
    gc.collect()
    _before.clear()
    _before.update(threading.enumerate())


def threads() -> list[str]:
    new = set(threading.enumerate()) - _before
    return [one.name for one in new if one.name.startswith("spillway-optimizer")]


def ended(true: Callable[[], bool]) -> bool:
    """Whether it becomes so, given a moment."""
    for _ in range(200):
        gc.collect()
        if true():
            return True
        time.sleep(0.01)
    return False


# What an optimizer was used for, when it ended.


def nothing(model: Module, optimizer: OffloadedOptimizer) -> None:
    """It was only made."""


def a_backward(model: Module, optimizer: OffloadedOptimizer) -> None:
    loss_of(model, batches(1)[0]).backward()


def several_backwards(model: Module, optimizer: OffloadedOptimizer) -> None:
    for batch in batches(3):
        loss_of(model, batch).backward()


def clipped_gradients(model: Module, optimizer: OffloadedOptimizer) -> None:
    several_backwards(model, optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def steps(model: Module, optimizer: OffloadedOptimizer) -> None:
    train(model, optimizer, batches(4), micro=2)


def steps_and_a_backward(model: Module, optimizer: OffloadedOptimizer) -> None:
    steps(model, optimizer)
    clipped_gradients(model, optimizer)


def steps_that_overlap(model: Module, optimizer: OffloadedOptimizer) -> None:
    optimizer.overlap_forward(model, blocks=Block)
    steps(model, optimizer)


def a_state_that_is_loaded(model: Module, optimizer: OffloadedOptimizer) -> None:
    steps(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())


def a_scheduler(model: Module, optimizer: OffloadedOptimizer) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    steps(model, optimizer)
    scheduler.step()


def gradients_that_were_kept(model: Module, optimizer: OffloadedOptimizer) -> None:
    several_backwards(model, optimizer)
    kept = [one.grad for one in model.parameters()]
    optimizer.zero_grad()
    a_backward(model, optimizer)
    assert kept[0] is not None
    kept[0].clone()


USES = pytest.mark.parametrize(
    "use",
    [
        nothing,
        a_backward,
        several_backwards,
        clipped_gradients,
        steps,
        steps_and_a_backward,
        steps_that_overlap,
        a_state_that_is_loaded,
        a_scheduler,
        gradients_that_were_kept,
    ],
    ids=lambda use: use.__name__,
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

Use = Callable[[Module, OffloadedOptimizer], None]


@USES
@DTYPES
def test_close_leaves_nothing(use: Use, dtype: torch.dtype, session: spillway.Session) -> None:
    model = wide(dtype).float() if dtype is torch.float32 else Cast(wide(dtype))
    optimizer = offloaded(AdamW, session)(model)
    use(model, optimizer)
    optimizer.close()
    assert threads() == []
    gc.collect()
    assert session.used_bytes == (0, 0)
    for parameter in model.parameters():
        assert not is_away(parameter.grad)
        assert not parameter._post_accumulate_grad_hooks
    optimizer.close()
    # It goes on as a plain model.
    train(model, plainly(AdamW)(model), batches(1))


class Cast(Module):
    """Takes what a wide model takes."""

    def __init__(self, inner: Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.bfloat16())  # type: ignore[no-any-return]


@USES
@pytest.mark.parametrize("keeps_model", [False, True])
def test_the_collector_leaves_nothing(use: Use, keeps_model: bool, cpu_session: spillway.Session) -> None:
    model = wide()
    optimizer = offloaded(AdamW, cpu_session)(model)
    use(model, optimizer)
    dead = weakref.ref(optimizer)
    parts = [weakref.ref(one) for one in optimizer._placement.held.values()]
    parameter = weakref.ref(model.first.weight)
    del optimizer
    if not keeps_model:
        del model
    elif use is steps_that_overlap:
        # The hooks on a model keep its optimizer, which they wait for, until it is closed.
        dead().close()  # type: ignore[union-attr]
    assert ended(lambda: dead() is None and all(part() is None for part in parts))
    assert ended(lambda: threads() == [])
    assert ended(lambda: cpu_session.used_bytes == (0, 0))
    if keeps_model:
        model.zero_grad()
        train(model, plainly(AdamW)(model), batches(1))
        assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    else:
        assert ended(lambda: parameter() is None)


def test_gradients_whose_optimizer_is_gone_say_so(cpu_session: spillway.Session) -> None:
    model = wide()
    optimizer = offloaded(AdamW, cpu_session)(model)
    a_backward(model, optimizer)
    del optimizer
    gc.collect()
    gradient = model.first.weight.grad
    assert gradient is not None
    for use in (
        lambda: gradient.norm(),
        lambda: gradient.add_(gradient),
        lambda: loss_of(model, batches(1)[0]).backward(),
    ):
        with pytest.raises(UsageError, match="The OffloadedOptimizer of this gradient is gone"):
            use()
    assert "OffloadedGradient" in repr(gradient)
    model.zero_grad()
    train(model, plainly(AdamW)(model), batches(1))


def test_many_optimizers_leave_no_thread_and_no_byte(cpu_session: spillway.Session) -> None:
    model = wide()
    for _ in range(20):
        optimizer = offloaded(torch.optim.SGD, cpu_session, lr=0.1)(model)
        steps_and_a_backward(model, optimizer)
        del optimizer
        gc.collect()
        model.zero_grad()
    assert ended(lambda: threads() == [])
    assert cpu_session.used_bytes == (0, 0)
    assert cpu_session.host_bytes <= 64 << 20


@pytest.mark.parametrize("use", [nothing, steps, steps_and_a_backward, steps_that_overlap])
def test_nothing_waits_for_the_collector_after_close(use: Use, cpu_session: spillway.Session) -> None:
    gc.collect()
    gc.disable()
    try:
        model = wide()
        optimizer = offloaded(torch.optim.SGD, cpu_session, lr=0.1)(model)
        use(model, optimizer)
        held = [weakref.ref(one) for one in optimizer._placement.held.values()]
        store = optimizer._placement.stores[0]
        states = [value for one in held for value in store.state_of(one()).values()]  # type: ignore[arg-type]
        tensors = [weakref.ref(value) for value in states if isinstance(value, Tensor)]
        del states
        optimizer.close()
        assert cpu_session.used_bytes == (0, 0)
        assert all(one() is None for one in tensors)
        model.zero_grad()
    finally:
        gc.enable()


def test_steps_make_no_cycles(cpu_session: spillway.Session) -> None:
    model = wide()
    optimizer = offloaded(AdamW, cpu_session)(model)
    optimizer.overlap_forward(model, blocks=Block)
    train(model, optimizer, batches(4), micro=2)
    optimizer.synchronize()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        train(model, optimizer, batches(4), micro=2)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.synchronize()
        gc.collect()
        ours = [one for one in gc.garbage if type(one).__module__.startswith("spillway")]
        assert ours == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    optimizer.close()


def test_memory_does_not_grow_from_step_to_step(session: spillway.Session) -> None:
    model = wide(torch.bfloat16)
    optimizer = offloaded(AdamW, session)(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    seen = []
    for number, batch in enumerate(batches(8, torch.bfloat16)):
        if number % 3 == 2:
            # A step that is skipped.
            batch[0, 0] = float("inf")
        scaler.scale(loss_of(model, batch)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        optimizer.synchronize()
        if number % 3 == 2:
            seen.append(session.used_bytes[0])
    assert len(set(seen)) == 1, seen
    optimizer.close()
    assert session.used_bytes == (0, 0)


def test_a_closed_optimizer_says_so(session: spillway.Session) -> None:
    model = wide()
    optimizer = offloaded(AdamW, session, fraction=0.5)(model)
    steps(model, optimizer)
    loss_of(model, batches(1)[0]).backward()
    kept = [one.grad for one in model.parameters()]
    model.zero_grad()
    a_backward(model, optimizer)
    optimizer.close()
    before = [one.detach().clone() for one in model.parameters()]
    away = next(one for one in kept if is_away(one))
    assert away is not None
    with pytest.raises(UsageError, match="of a closed OffloadedOptimizer"):
        away.norm()
    for use in (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        lambda: optimizer.add_param_group({"params": [Parameter(torch.ones(2))]}),
        lambda: optimizer.overlap_forward(model),
    ):
        with pytest.raises(UsageError, match="got a closed OffloadedOptimizer"):
            use()
    assert_same_values(model.parameters(), before)
    optimizer.zero_grad()
    optimizer.synchronize()


def test_a_session_that_is_closed_first(adversary: AdversaryBackend) -> None:
    for backend in (None, adversary.serve):
        model = wide()
        with spillway.Session(backend=backend) as session:
            optimizer = offloaded(AdamW, session)(model)
            optimizer.overlap_forward(model, blocks=Block)
            steps_and_a_backward(model, optimizer)
            optimizer.step()
        gradient = model.first.weight.grad
        assert gradient is not None
        for use in (gradient.norm, gradient.clone, optimizer.step):
            with pytest.raises(SessionError, match="got a closed session"):
                use()
        with pytest.raises(SessionError, match="got a closed session"):
            loss_of(model, batches(1)[0]).backward()
        optimizer.close()
        assert threads() == []
        model.zero_grad()
        train(model, plainly(AdamW)(model), batches(1))


@pytest.mark.parametrize(
    "options",
    [{}, {"tier": "disk"}, {"step_on": "gpu"}, {"step_on": "auto", "cpu_share": 0.5}, {"step_in_backward": True}],
    ids=str,
)
@pytest.mark.parametrize("closes", ["optimizer", "session"])
def test_steps_that_are_queued_are_finished_by_close(closes: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = wide()
    with spillway.Session(spill_directory=tmp_path, allow_memory_filesystem=True) as session:
        optimizer = offloaded(AdamW, session, fused=True, **options)(model)
        optimizer.overlap_forward(model, blocks=Block)
        data = batches(3)
        train(model, optimizer, data[:2])
        # The last step is still queued when `step` returns.
        next(iter(optimizer._placement.contexts.values())).lane.run(lambda: time.sleep(0.2))
        train(model, optimizer, data[2:])
        if closes == "optimizer":
            optimizer.close()
    plain = wide()
    train(plain, plainly(AdamW)(plain), batches(3))
    assert_same_values(model, plain)
    optimizer.close()
    assert threads() == []


@pytest.mark.parametrize("closes", [False, True], ids=["collected", "closed"])
def test_a_session_that_closes_raises_what_went_wrong_in_a_step(closes: bool, cpu_session: spillway.Session) -> None:
    model = wide()
    optimizer = offloaded(AdamW, cpu_session)(model)
    optimizer.overlap_forward(model, blocks=Block)
    optimizer._placement.stores[0]._optimizer.step_each = failing  # type: ignore[method-assign]
    train(model, optimizer, batches(1))
    with pytest.raises(OSError, match="no step"):
        optimizer.close() if closes else cpu_session.close()
    assert cpu_session.closed is not closes
    optimizer.close()
    assert threads() == []


def failing(*_: Any) -> Any:
    raise OSError("no step")


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_parameter_that_is_gone_before_its_upload_is_done(
    tier: str, dtype: torch.dtype, adversary: AdversaryBackend, tmp_path: Path
) -> None:
    options = {"spill_directory": tmp_path, "allow_memory_filesystem": True}
    with spillway.Session(backend=adversary.serve, **options) as session:  # type: ignore[arg-type]
        model = wide(dtype)
        optimizer = offloaded(AdamW, session, tier=tier)(model)
        optimizer.overlap_forward(model, blocks=Block)
        train(model, optimizer, batches(1, dtype))
        context = next(iter(optimizer._placement.contexts.values()))
        context.transfers.settle()
        # The copies are queued, and not done.
        context.last_task().finish()
        storage = weakref.ref(model.first.weight.untyped_storage())
        del model, optimizer, context
        gc.collect()
        assert storage() is not None, "the allocator keeps it for the copy"
    adversary.check()
    assert storage() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_is_told_and_does_not_hang(server: Server, tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import os, sys, warnings, torch, spillway
        torch.set_num_threads(1)
        model = torch.nn.Linear(4, 4)
        session = spillway.Session()
        optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, session=session)
        def backward():
            model(torch.ones(2, 4)).sum().backward()
        backward(); optimizer.step(); backward()
        child = os.fork()
        if child == 0:
            said = []
            for use in (optimizer.step, lambda: model.weight.grad.norm(), backward, lambda: model.weight.grad.clone()):
                try:
                    use()
                except spillway.SessionError as error:
                    said.append(str(error))
            optimizer.zero_grad()
            optimizer.close()
            session.close()
            del optimizer, model
            sys.stdout.write(f"{len(said)} of 4: {said[0]}\\n")
            sys.stdout.flush()
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        backward(); optimizer.step()
        print(model.weight.grad.norm().item() > 0)
        optimizer.close()
        session.close()
        """
    )
    done = server.run(tmp_path, script, "script")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("4 of 4: got the session of process"), lines
    assert lines[1] == "True"


def test_an_optimizer_that_nobody_closed_does_not_keep_the_interpreter(server: Server, tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import torch, spillway
        torch.set_num_threads(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW)
        optimizer.overlap_forward(model, blocks=torch.nn.Linear)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model(torch.ones(2, 4)).sum().backward()
        print("ended")
        """
    )
    assert server.run(tmp_path, script, "script") == Ended(0, "ended\n", "")


@pytest.mark.parametrize("steps", [0, 1], ids=["gradient", "parameter"])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("closes", [False, True], ids=["collected", "closed"])
def test_memory_of_an_optimizer_that_ended_is_used_again_after_its_copies(
    closes: bool, before: int, steps: int, adversary: AdversaryBackend
) -> None:
    with spillway.Session(backend=adversary.serve) as session:
        first, second = Parameter(torch.ones(3000)), Parameter(torch.ones(3000))
        later = OffloadedOptimizer([second], torch.optim.SGD, lr=0.1, session=session)
        second.sum().backward()
        optimizer = OffloadedOptimizer([first], torch.optim.SGD, lr=0.1, session=session)
        transfers = next(iter(optimizer._placement.contexts.values())).transfers
        first.sum().backward()
        for _ in range(steps):
            optimizer.step()
        # What is leaving is kept until then.
        transfers.settle()
        first.grad = None
        if closes:
            optimizer.close()
        del optimizer
        gc.collect()
        # The host writes to memory of the same size: to each of the blocks that are free again.
        blocks = [transfers.arena.allocate(first.nbytes) for _ in range(before)]
        here(second.grad)
        for block in blocks:
            transfers.arena.free(block, block.after)
        later.close()
    adversary.check()


def test_memory_of_a_master_weight_is_written_after_the_copies_from_its_last_owner(adversary: AdversaryBackend) -> None:
    with spillway.Session(backend=adversary.serve) as session:
        for _ in range(2):
            model = torch.nn.Sequential(torch.nn.Linear(50, 60, bias=False)).bfloat16()
            optimizer = OffloadedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, session=session)
            optimizer.overlap_forward(model, blocks=torch.nn.Linear)
            model(torch.ones(2, 50, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            context = next(iter(optimizer._placement.contexts.values()))
            context.transfers.settle()
            context.last_task().finish()
            # Nothing has waited for the copy of the new values to the model.
            del model, optimizer, context
            gc.collect()
    adversary.check()
