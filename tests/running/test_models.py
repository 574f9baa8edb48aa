"""Which models of a script are found, what is attached to them, and what is said of the others."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils.checkpoint import checkpoint

import spillway
from spillway.attaching.call import PLACE, is_attached
from spillway.cli.running.models import BY_HAND, COMPILED, NO_BLOCKS, REPLACED, UNSEEN, ScriptObserver
from spillway.cli.running.options import RunOptions
from spillway.cli.running.result import RunResult, result_of
from spillway.planner.report import text
from steps import Block

WIDTH = 32


class Net(nn.Module):
    """Blocks and a head."""

    gradient_checkpointing = False

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.gradient_checkpointing else block(x)
        return self.head(x)  # type: ignore[no-any-return]


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def batch(seed: int = 0) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(call: Any, optimizer: torch.optim.Optimizer, steps: int = 1) -> list[Tensor]:
    losses = []
    for step in range(steps):
        loss = call(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=0.1)


def the_hooks() -> list[Any]:
    return [
        dict(optimizer_hooks._global_optimizer_post_hooks),
        dict(module_hooks._global_forward_pre_hooks),
        dict(module_hooks._global_forward_hooks),
    ]


@pytest.fixture
def observer() -> Iterator[ScriptObserver]:
    """What is attached is recomputed. In the end no hook is left."""
    before = the_hooks()
    seen = ScriptObserver(RunOptions(policy="recompute").attach)
    yield seen
    seen.end()
    seen.models.close()
    assert nn.Module._compiled_call_impl is None
    assert the_hooks() == before


def ended(observer: ScriptObserver) -> RunResult:
    observer.end()
    result = result_of(observer)
    assert max(map(len, result.to_text().splitlines())) <= text.WIDTH
    return result


def reasons(observer: ScriptObserver) -> list[tuple[str, str]]:
    return reasons_of(ended(observer))


def reasons_of(result: RunResult) -> list[tuple[str, str]]:
    return [(each.kind, each.reason) for each in result.not_attached]


def test_a_model_is_attached_in_its_first_forward_and_trains_bit_for_bit(observer: ScriptObserver) -> None:
    model = net()
    losses = train(model, sgd(model), 4)
    [root] = observer.models.managed
    assert root.blocks == 3
    assert is_attached(model)
    # The first forward was one pass of the whole model already.
    assert root.attached.stats().recomputed_bytes > 0
    observer.end()
    observer.models.close()
    assert PLACE not in model.__dict__
    plain = net()
    assert all(map(torch.equal, losses, train(plain, sgd(plain), 4)))


def test_the_first_forward_in_training_is_managed(observer: ScriptObserver) -> None:
    model = net()
    model(batch()).sum().backward()
    assert observer.models.managed[0].attached.stats().recomputed_bytes > 0


def test_whoever_looks_for_models_holds_nothing_of_their_forward(observer: ScriptObserver) -> None:
    """A list of frames that is in one of them is a circle, and what all of them have made is gone when it is broken."""
    made: list[weakref.ref[Tensor]] = []

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            made.append(weakref.ref(y))
            return self.block(y)  # type: ignore[no-any-return]

    model = nn.Sequential(Holding(), Holding())
    gc.disable()
    try:
        for _ in range(3):
            with torch.no_grad():
                model(batch())
            model(batch()).sum().backward()
            assert [each() for each in made] == [None] * len(made)
    finally:
        gc.enable()


def test_an_error_of_the_first_forward_is_the_models_own(observer: ScriptObserver) -> None:
    model = net()
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(2, WIDTH + 1))
    train(model, sgd(model))
    assert len(observer.models.managed) == 1


def test_nobody_looks_any_more_when_all_that_is_stepped_belongs_to_somebody(observer: ScriptObserver) -> None:
    model = net()
    optimizer = sgd(model)
    model(batch()).sum().backward()
    assert observer.models.is_observing
    optimizer.step()
    assert not observer.models.is_observing
    assert nn.Module._compiled_call_impl is None


def test_a_model_that_comes_later_is_seen_from_its_first_step_on(observer: ScriptObserver) -> None:
    first, second = net(), net()
    train(first, sgd(first), 3)
    assert not observer.models.is_observing
    train(second, sgd(second), 2)
    assert [root.module() for root in observer.models.managed] == [first, second]
    assert not observer.models.is_observing


def test_a_model_whose_optimizer_waits_is_seen_in_its_first_forward(observer: ScriptObserver) -> None:
    critic, generator = net(), net()
    first, second = sgd(critic), sgd(generator)
    train(critic, first, 5)
    assert observer.models.is_observing
    generator(batch()).sum().backward()
    assert is_attached(generator)
    second.step()
    assert not observer.models.is_observing


def test_a_model_in_the_same_optimizer_is_seen_though_it_is_called_later(observer: ScriptObserver) -> None:
    model, later = net(), net()
    optimizer = sgd(model, later)
    train(model, optimizer, 4)
    assert observer.models.is_observing
    train(lambda x: later(model(x)), optimizer, 2)
    assert is_attached(later)
    assert not observer.models.is_observing
    assert reasons(observer) == []


def test_a_model_that_is_not_called_in_many_steps_is_named_in_the_end(observer: ScriptObserver) -> None:
    model, never = net(), nn.GRU(4, 4)
    optimizer = sgd(model, never)
    train(model, optimizer, 5)
    assert reasons(observer) == [("GRU", UNSEEN)]


def test_two_models_of_a_gan_are_two_roots(observer: ScriptObserver) -> None:
    def course(generator: Net, critic: Net) -> list[Tensor]:
        losses = []
        ours, theirs = sgd(generator), sgd(critic)
        for step in range(3):
            with torch.no_grad():
                fake = generator(batch(step))
            loss = critic(fake).mean() - critic(batch(step)).mean()
            theirs.zero_grad()
            loss.backward()
            theirs.step()
            other = critic(generator(batch(step))).mean()
            ours.zero_grad()
            other.backward()
            ours.step()
            losses += [loss.detach(), other.detach()]
        return losses

    managed = course(net(), net(layers=2))
    assert [root.blocks for root in observer.models.managed] == [2, 3]
    observer.end()
    observer.models.close()
    assert all(map(torch.equal, managed, course(net(), net(layers=2))))


def test_evaluation_and_calls_without_gradients_attach_nothing(observer: ScriptObserver) -> None:
    model = net()
    with torch.no_grad():
        model(batch())
    model.eval()
    model(batch()).sum().backward()
    assert observer.models.managed == []
    model.requires_grad_(False).train()
    model(batch())
    assert observer.models.managed == []


def test_a_frozen_model_is_seen_when_it_is_trained(observer: ScriptObserver) -> None:
    model = net().requires_grad_(False)
    model(batch())
    model.requires_grad_(True)
    train(model, sgd(model), 2)
    assert is_attached(model)


class Around(nn.Module):
    """A wrapper that came later."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def test_the_outermost_module_is_the_root_and_a_later_wrapper_changes_nothing(observer: ScriptObserver) -> None:
    model = Around(net())
    train(model, sgd(model), 1)
    [root] = observer.models.managed
    assert root.kind == "Around"
    late = Around(model)
    train(late, sgd(late), 3)
    assert [each.module() for each in observer.models.managed] == [model]
    assert root.attached.stats().recomputed_bytes > 0
    assert reasons(observer) == []


def test_a_copy_and_an_average_train_and_run_as_copies_do(observer: ScriptObserver) -> None:
    model = net()
    train(model, sgd(model), 1)
    twin = copy.deepcopy(model)
    assert not is_attached(twin)
    assert torch.equal(twin(batch()), model(batch()))


def wrapped() -> tuple[Any, nn.Module]:
    model = net()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    return model, model


def compiled() -> tuple[Any, nn.Module]:
    model = net()
    return torch.compile(model, backend="eager"), model


def compiled_in_place() -> tuple[Any, nn.Module]:
    model = net()
    model.compile(backend="eager")
    return model, model


def by_hand() -> tuple[Any, nn.Module]:
    model = net()
    return model.forward, model


def replicated() -> tuple[Any, nn.Module]:
    model = nn.DataParallel(net())
    return model, model


def without_blocks() -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 4)
    return model, model


def in_a_transform() -> tuple[Any, nn.Module]:
    model = net()

    def call(x: Tensor) -> Tensor:
        def loss(parameters: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(model, parameters, (x,)).square().mean()

        gradients = torch.func.grad(loss)(dict(model.named_parameters()))
        return sum((p * gradients[name].detach()).sum() for name, p in model.named_parameters())  # type: ignore[return-value]

    return call, model


REFUSED = [
    (wrapped, "Net", "checkpoints already"),
    (compiled, "OptimizedModule", "compiled around"),
    (compiled_in_place, "Net", COMPILED),
    (by_hand, "Net", BY_HAND),
    (replicated, "DataParallel", "DistributedDataParallel"),
    (without_blocks, "Linear", NO_BLOCKS),
    (in_a_transform, "Net", "torch.func transform"),
]


@pytest.mark.parametrize(("make", "kind", "told"), REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_a_rejected_model_trains_on_and_is_named_once(
    make: Any, kind: str, told: str, observer: ScriptObserver
) -> None:
    call, model = make()
    losses = train(call, sgd(model), 4)
    assert observer.models.managed == []
    assert not observer.models.is_observing
    [(found, reason)] = reasons(observer)
    assert found == kind
    assert told in reason
    plain, same = make()
    assert all(map(torch.equal, losses, train(plain, sgd(same), 4)))


def test_a_scripted_model_of_ones_own_class_trains_on(observer: ScriptObserver) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)))

    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        model = torch.jit.script(Own())
    with pytest.raises(spillway.SpillwayError, match=r"scripted|repeats no block"):
        spillway.attach(model)
    train(model, sgd(model), 2)
    assert len(observer.models.rejected) == 1


def test_what_is_given_up_is_told_at_once(observer: ScriptObserver) -> None:
    told: list[str] = []
    observer.models.tell = told.append
    model = nn.Linear(WIDTH, WIDTH)
    train(model, sgd(model), 2)
    assert told == [f"Linear is not attached: {each.reason}" for each in observer.models.rejected] != []


def test_where_hooks_are_disabled_a_model_trains_on(observer: ScriptObserver) -> None:
    plain = net()
    expected = train(plain, sgd(plain), 3)
    model = net()
    losses = train(model, sgd(model), 2)
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        loss = model(batch(2)).square().mean()
        loss.backward()
    assert all(map(torch.equal, [*losses, loss.detach()], expected))


def test_a_scripted_model_is_said() -> None:
    # TorchScript is deprecated, and says so where warnings are errors.
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        model = torch.jit.script(nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2))))
    seen = ScriptObserver(RunOptions(policy="recompute").attach)
    train(model, sgd(model), 2)
    [(_, reason)] = reasons(seen)
    seen.models.close()
    assert "scripted" in reason


def test_of_a_script_with_one_step_what_was_not_seen_is_said(observer: ScriptObserver) -> None:
    call, model = compiled_in_place()
    optimizer = sgd(model)
    train(call, optimizer, 1)
    assert reasons(observer) == [("Net", COMPILED)]


def test_parameters_in_no_module_are_counted(observer: ScriptObserver) -> None:
    weight = nn.Parameter(torch.ones(WIDTH, 4))
    train(lambda x: x @ weight, torch.optim.SGD([weight], lr=0.1), 3)
    assert [(each.kind, each.count) for each in ended(observer).not_attached] == [("Parameter", 1)]
    assert not observer.models.is_observing


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_blocks_that_are_compiled_later_are_attached_anew(observer: ScriptObserver) -> None:
    model = net()
    optimizer = sgd(model)
    train(model, optimizer, 2)
    for block in model.blocks:
        block.compile(backend="eager")
    train(model, optimizer, 4)
    [root] = ended(observer).models
    assert any("attached again" in note for note in root.notes)
    assert root.stats.recomputed_bytes > 0


def test_a_model_that_is_compiled_as_a_whole_later_is_said(observer: ScriptObserver) -> None:
    model = net()
    optimizer = sgd(model)
    train(model, optimizer, 2)
    model.compile(backend="eager")
    train(model, optimizer, 2)
    assert reasons(observer) == [("Net", COMPILED)]
    assert observer.models.managed == []


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_model_that_is_called_inside_of_something_compiled_later_is_rejected(
    observer: ScriptObserver,
) -> None:
    def course(model: nn.Module) -> list[Tensor]:
        optimizer = sgd(model)
        return [*train(model, optimizer, 2), *train(torch.compile(model, backend="eager"), optimizer, 3)]

    model = net()
    losses = course(model)
    assert PLACE not in model.__dict__
    assert [kind for kind, _ in reasons(observer)] == ["OptimizedModule"]
    observer.models.close()
    assert all(map(torch.equal, losses, course(net())))


class Cache:
    """What a transformer is given to write keys and values to."""

    def __init__(self) -> None:
        self.writes = 0

    def get_seq_length(self) -> int:
        return self.writes


class Caching(nn.Module):
    """A model that hands its blocks a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Cached() for _ in range(3))
        self.cache = Cache()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, cache=self.cache)
        return x


class Cached(Block):
    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:  # type: ignore[override]
        cache.writes += 1
        return super().forward(x)


def test_a_model_that_refuses_in_its_forward_runs_on_and_is_rejected_the_second_time(
    observer: ScriptObserver,
) -> None:
    torch.manual_seed(0)
    model = Caching()
    losses = train(model, sgd(model), 5)
    [(kind, reason)] = reasons(observer)
    assert kind == "Caching"
    assert "use_cache=False" in reason
    assert not is_attached(model)
    # No block ran a second time.
    assert model.cache.writes == 5 * 3
    observer.models.close()
    torch.manual_seed(0)
    plain = Caching()
    assert all(map(torch.equal, losses, train(plain, sgd(plain), 5)))


def test_what_a_checkpoint_runs_again_is_no_root(observer: ScriptObserver) -> None:
    model = net()
    # Blocks of blocks: each of them would be a root if it were called by itself.
    model.blocks = nn.ModuleList(nn.Sequential(Block(WIDTH), Block(WIDTH)) for _ in range(2))
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.gradient_checkpointing = True
    train(model, sgd(model), 3)
    assert observer.models.managed == []
    assert [kind for kind, _ in reasons(observer)] == ["Net"]


def test_a_model_that_the_script_attached_itself_is_left_to_it(observer: ScriptObserver) -> None:
    model = net()
    model.blocks = nn.ModuleList(nn.Sequential(Block(WIDTH), Block(WIDTH)) for _ in range(2))
    with spillway.attach(model, blocks="blocks.*") as own:
        model(batch()).sum().backward()
        assert own.stats().recomputed_bytes > 0
    assert observer.models.managed == []


def test_a_model_that_checkpoints_itself_is_attached_instead_and_said_at_once(observer: ScriptObserver) -> None:
    told: list[str] = []
    observer.models.tell = told.append
    model = net()
    model.gradient_checkpointing = True
    losses = train(model, sgd(model), 3)
    [managed] = observer.models.managed
    assert model.gradient_checkpointing is False
    assert managed.attached.stats().recomputed_bytes > 0
    assert told == [f"Net: {note}" for note in managed.attached.notes]
    assert "gradient_checkpointing of the model is switched off" in " ".join(ended(observer).to_text().split())
    observer.models.close()
    assert model.gradient_checkpointing is True
    plain = net()
    assert all(map(torch.equal, losses, train(plain, sgd(plain), 3)))


@pytest.mark.parametrize("options", [{"policy": "recompute"}, {"budget": "8GiB"}], ids=lambda each: next(iter(each)))
@pytest.mark.parametrize("part", ["model", "part", "wrapper"])
def test_a_managed_model_that_the_script_attaches_later_is_the_scripts(part: str, options: dict[str, str]) -> None:
    def parts(model: nn.Module) -> nn.Module:
        return {"model": model, "part": model[0], "wrapper": nn.Sequential(model)}[part]  # type: ignore[index]

    def make() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        model = nn.Sequential(Net(), nn.Linear(WIDTH, WIDTH))
        return model, parts(model)

    told: list[str] = []
    observer = ScriptObserver(RunOptions(**options).attach)  # type: ignore[arg-type]
    observer.models.tell = told.append
    try:
        model, meant = make()
        optimizer = sgd(model)
        losses = train(model, optimizer, 3)
        [managed] = observer.models.managed
        assert told == []
        own = spillway.attach(meant, policy=spillway.Recompute(offload="inputs"), blocks=Block, min_bytes=0)
        assert told == [f"Sequential is not attached: {REPLACED}"]
        assert repr(managed.attached).endswith("removed>")
        assert observer.models.managed == []
        losses += train(meant if part == "wrapper" else model, optimizer, 3)
        assert own.passes == 3 and own.stats().recomputed_bytes > 0
        own.remove()
        assert not any(is_attached(each) for each in meant.modules())
        losses += train(model, optimizer, 1)
        # It stays the script's own.
        assert observer.models.managed == [] and len(told) == 1
        plain, _ = make()
        theirs = sgd(plain)
        expected = train(plain, theirs, 3) + train(plain, theirs, 3) + train(plain, theirs, 1)
        assert all(map(torch.equal, losses, expected))
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
    finally:
        observer.end()
        observer.models.close()
    assert reasons_of(result_of(observer)) == [("Sequential", REPLACED)]


def test_a_part_that_is_attached_inside_of_a_managed_forward_is_the_scripts(observer: ScriptObserver) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.own: list[spillway.Attached] = []

        def forward(self, x: Tensor) -> Tensor:
            if not self.own and is_lazy:
                self.own.append(spillway.attach(self.net, policy="offload", min_bytes=0))
            return self.net(x)  # type: ignore[no-any-return]

    is_lazy = True
    torch.manual_seed(0)
    model = Lazy()
    losses = train(model, sgd(model), 3)
    assert model.own[0].passes == 3
    assert reasons(observer) == [("Lazy", REPLACED)]
    is_lazy = False
    torch.manual_seed(0)
    plain = Lazy()
    assert all(map(torch.equal, losses, train(plain, sgd(plain), 3)))


def test_threads_train_models_of_their_own(observer: ScriptObserver) -> None:
    models = [net() for _ in range(3)]
    losses: dict[int, list[Tensor]] = {}

    def work(number: int) -> None:
        losses[number] = train(models[number], sgd(models[number]), 3)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {id(root.module()) for root in observer.models.managed} == set(map(id, models))
    observer.end()
    observer.models.close()
    plain = net()
    expected = train(plain, sgd(plain), 3)
    assert all(torch.equal(a, b) for found in losses.values() for a, b in zip(found, expected, strict=True))
    observer.models.managed.clear()


def test_an_error_that_is_not_ours_goes_through() -> None:
    def fails(model: nn.Module) -> Any:
        raise KeyError("on purpose")

    seen = ScriptObserver(fails)
    with pytest.raises(KeyError, match="on purpose"):
        net()(batch())
    seen.end()
    seen.models.close()
    assert nn.Module._compiled_call_impl is None


def test_without_an_option_an_accelerator_has_a_budget_and_a_cpu_offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 1000))
    device = torch.device("cuda", 0)
    assert RunOptions().budget_on(device) == 900
    assert RunOptions(policy="keep").budget_on(device) is None
    assert RunOptions(budget="1KiB").budget_on(device) == "1KiB"
    assert RunOptions().budget_on(torch.device("cpu")) is None
    attached, way, _ = RunOptions().attach(net())
    attached.remove()
    assert (way, attached.budget) == ("offload", None)


def test_the_steady_step_of_an_optimizer_looks_at_no_parameter(
    observer: ScriptObserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    optimizer = sgd(model)
    train(model, optimizer, 2)
    monkeypatch.setattr(observer.models, "parameters", lambda: pytest.fail("looked"))
    train(model, optimizer, 3)
    monkeypatch.undo()


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_a_model_of_transformers_as_it_comes_trains_bit_for_bit(observer: ScriptObserver, name: str) -> None:
    """Its configuration asks for a cache of keys and values."""
    transformers = pytest.importorskip("transformers")
    sizes = (
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
        if name == "GPT2"
        else {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    )
    config = getattr(transformers, f"{name}Config")(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes)
    assert config.use_cache
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))

    def losses(model: nn.Module) -> list[Tensor]:
        optimizer = sgd(model)
        found = []
        for step in range(3):
            torch.manual_seed(step)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    plain = copy.deepcopy(model)
    found = losses(model)
    [root] = observer.models.managed
    assert root.blocks == 3
    assert root.attached.stats().recomputed_bytes > 0
    assert config.use_cache
    observer.end()
    observer.models.close()
    # With a cache, keys and values lie otherwise in memory, and kernels of some CPUs add up in another order.
    plain.config.use_cache = False
    assert all(map(torch.equal, found, losses(plain)))
