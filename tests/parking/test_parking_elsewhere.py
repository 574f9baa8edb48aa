"""Parking beside the rest: attached models, streamed weights, optimizers on the CPU, FSDP2, compiled models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import spillway
from allocations import count_exactly
from integrations.ranks import World
from parameters.test_planned import STATIC, Training
from parameters.test_streamed import Model
from parking.test_parked import adversary, session, settle  # noqa: F401  (fixtures)
from runtime.scenarios import adversary_session
from spillway import policies
from spillway.errors import ParkedError
from spillway.parking.parked import Parking
from spillway.runtime.cpu import CpuBackend

Park = Callable[[], object]


def synchronize(session: spillway.Session) -> None:  # noqa: F811
    for each in list(session.of(Parking).returning):
        each.synchronize()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, park: Park, steps: int = 6) -> list[Tensor]:
    """Losses and, in the end, weights. ``park`` is called wherever a loop may do so."""
    found = []
    for step in range(steps):
        park()
        torch.manual_seed(step)
        loss = model(torch.randn(6, 4)).square().mean()
        loss.backward()
        park()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    park()
    return [*found, *(each.detach().clone() for each in model.parameters())]


def same(got: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(got) == len(wanted) and all(map(torch.equal, got, wanted))


POLICIES = {
    "kept": policies.Keep(),
    "recomputed": spillway.Recompute(),
    "offloaded": policies.Offload(),
    "matmuls offloaded": spillway.Recompute(offload="matmul"),
}


@pytest.mark.parametrize("stream", [None, "layers.*"], ids=["resident", "streamed"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.covered
def test_an_attached_model(policy: str, stream: str | None) -> None:
    plain = Model()
    adapters = [each for each in plain.parameters() if each.requires_grad]
    wanted = trained(plain, torch.optim.AdamW(adapters, fused=True), lambda: None)
    model = Model()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], fused=True)
    with adversary_session(window=1024) as (_, session):  # noqa: F811
        attached = spillway.attach(model, session=session, policy=POLICIES[policy], stream=stream, min_bytes=0)
        homes = sum(each.nbytes for each in model.parameters() if not each.untyped_storage().resizable())
        parked = []

        def park() -> None:
            with spillway.parked(model, optimizer=optimizer, session=session) as parking:
                parked.append(parking.nbytes)
                with pytest.raises(ParkedError):
                    model(torch.ones(6, 4))

        assert same(trained(model, optimizer, park), wanted)
        assert (homes > 0) == (stream is not None)
        # Weights that are streamed have no memory on the device to give back.
        assert parked[0] == sum(each.nbytes for each in model.parameters()) - homes
        synchronize(session)
        attached.remove()
        settle(session)


class Copying(CpuBackend):
    """The CPU's backend for a device with memory of its own."""

    direct_disk = False


def test_a_hook_ends_when_its_copies_are_done() -> None:
    with spillway.Session(backend=Copying) as session:  # noqa: F811
        model = Normed()
        with spillway.parked(model, session=session):
            assert all(each._forward_pre_hooks for each in model.modules())
        for _ in range(2):
            model(torch.randn(5, 4))
        assert not any(each._forward_pre_hooks for each in model.modules())
        synchronize(session)


def test_a_plan_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    count_exactly(monkeypatch, lambda: STATIC)
    found = []
    for parks in (False, True):
        with spillway.Session(window="64KiB", backend=Copying) as session:  # noqa: F811
            loop = Training(session, is_trained=False)
            with loop.attach(stream="layers.*", budget="60%") as attached:
                loop.search(attached)
                plan, losses = attached.plan, []
                for _ in range(4):
                    if parks:
                        with spillway.parked(loop.model, optimizer=loop.optimizer, session=session) as parking:
                            assert parking.nbytes > 0
                    losses += loop.step(reads=True)
                assert attached.stage == "active" and attached.plan is plan
                synchronize(session)
                found.append(losses)
    assert same(*found)


OPTIONS: dict[str, dict[str, Any]] = {
    "host": {},
    "disk": {"tier": "disk"},
    "on the gpu": {"step_on": "gpu"},
    "in backward": {"step_in_backward": True},
    "overlapped": {},
}


@pytest.mark.parametrize("how", OPTIONS)
def test_steps_on_the_cpu_end_before_their_parameters_leave(how: str) -> None:
    def run(*, parks: bool) -> list[Tensor]:
        model = Model()
        with adversary_session(window=1 << 20) as (_, session):  # noqa: F811
            optimizer = spillway.OffloadedOptimizer(
                [each for each in model.parameters() if each.requires_grad],
                torch.optim.AdamW,
                lr=1e-2,
                session=session,
                **OPTIONS[how],
            )
            if how == "overlapped":
                optimizer.overlap_forward(model, blocks="layers.*")

            def park() -> None:
                named = {} if how == "overlapped" else {"optimizer": optimizer}
                if parks:
                    with spillway.parked(model, session=session, **named) as parking:  # type: ignore[arg-type]
                        assert parking.nbytes > 0

            # Without its weights, which may be read only after this.
            found = trained(model, optimizer, park)[:6]
            synchronize(session)
            optimizer.synchronize()
            found += [each.detach().clone() for each in model.parameters()]
            optimizer.close()
            return found

    assert same(run(parks=True), run(parks=False))


def sharded(fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(4, 16), *(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)))
    for layer in (*model[1:], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), fused=fused, foreach=not fused)


@pytest.mark.parametrize("fused", [False, True])
def test_shards_of_fsdp2(fused: bool, one_rank: None, session: spillway.Session) -> None:  # noqa: F811
    uses: list[Callable[[Any, Any], object]] = [
        lambda model, _: model(torch.ones(2, 4)),
        lambda _, optimizer: optimizer.step(),
        lambda model, _: model.state_dict(),
        lambda model, _: model[0].weight.to_local(),
        lambda model, _: model[0].weight.full_tensor(),
    ]
    plain, other = sharded(fused)
    wanted = trained(plain, other, lambda: (plain(torch.ones(2, 4)), plain.reshard()))  # type: ignore[operator]
    model, optimizer = sharded(fused)

    def park() -> None:
        # After a forward alone, FSDP2 leaves the root's weights gathered.
        model(torch.ones(2, 4)).sum()
        with spillway.parked(model, optimizer=optimizer, session=session) as parking:
            assert parking.nbytes >= 4 * sum(each.numel() for each in model.parameters())
            assert all(isinstance(each, DTensor) for each in model.parameters())
            for use in uses:
                with pytest.raises(ParkedError):
                    use(model, optimizer)

    got = trained(model, optimizer, park)
    assert same(*([getattr(each, "full_tensor", lambda each=each: each)() for each in some] for some in (got, wanted)))


class Normed(nn.Module):
    """Its buffers are broadcast before each forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.b = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.norm(self.a(x)).relu())
        return y


def replicated() -> None:
    """One rank's part of a training with DDP, whose C++ code reads buffers and adds to gradients."""
    from torch.nn.parallel import DistributedDataParallel

    found = []
    for parks in (False, True):
        with adversary_session() as (_, session):  # noqa: F811
            model = DistributedDataParallel(Normed(), gradient_as_bucket_view=True)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)

            def park(parks: bool = parks, model: Any = model, optimizer: Any = optimizer, own: Any = session) -> None:
                if parks:
                    with spillway.parked(model, optimizer=optimizer, session=own) as parking:
                        assert parking.nbytes > 0

            found.append([*trained(model, optimizer, park), *(each.clone() for each in model.buffers())])
            synchronize(session)
    assert same(*found)


def test_a_model_of_ddp(world: World) -> None:
    world.run(replicated)


def summed() -> None:
    """A collective of torch asks no guard."""
    with adversary_session() as (_, session):  # noqa: F811
        model = Normed()
        wanted = 2 * model.norm.running_var
        with spillway.parked(model, session=session):
            pass
        group: Any = torch.distributed.group.WORLD
        group.allreduce([model.norm.running_var]).wait()
        assert torch.equal(model.norm.running_var, wanted)
        synchronize(session)


def test_collectives_right_after(world: World) -> None:
    world.run(summed)


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(torch.relu(self.a(x)))
        return y


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_compiled_model_is_not_compiled_again(how: str, session: spillway.Session) -> None:  # noqa: F811
    torch.compiler.reset()
    compilations = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    model: Any = Compiled()
    if how == "wrapped":
        model = torch.compile(model, backend=backend)
    else:
        model.compile(backend=backend)
    x = torch.randn(5, 4)
    wanted = model(x)
    assert len(compilations) == 1
    for _ in range(3):
        with spillway.parked(model, session=session) as parking, pytest.raises(ParkedError, match="the forward of"):
            model(x)
        assert not any(each._forward_pre_hooks for each in model.modules())
        assert torch.equal(model(x), wanted)
    parking.synchronize()
    assert len(compilations) == 1
    torch.compiler.reset()


def test_a_checkpointed_block_is_recomputed_afterwards(session: spillway.Session) -> None:  # noqa: F811
    model, plain = Compiled(), Compiled()
    x = torch.randn(5, 4)
    losses = []
    for each in (plain, model):
        loss = checkpoint(each, x, use_reentrant=False).square().mean()  # type: ignore[union-attr]
        if each is model:
            with spillway.parked(model, session=session), pytest.raises(ParkedError):
                # Its first use is the recomputation of the block.
                loss.backward(retain_graph=True)
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    assert same([each.grad for each in model.parameters()], [each.grad for each in plain.parameters()])  # type: ignore[misc]
