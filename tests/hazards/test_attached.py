"""Hazards 14 and 65, and others of their kind: what attaching leaves on a model, and who else wants its place."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import spillway
from recompute.regions import HiddenAttribute
from spillway import RecomputeError, UnsupportedError, UsageError
from spillway.attaching.call import ModuleCall
from spillway.policies import Keep, Offload
from steps import Block, assert_no_hook, failing, small_batch, step

PLACE = "_compiled_call_impl"

# Dynamo looks at it, and hides the warning from those whose warnings are no errors.
COMPILES = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Model(nn.Module):
    """Blocks and a head, one level down."""

    def __init__(self, block: Callable[[], nn.Module] = lambda: Block(32), layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(block() for _ in range(layers)))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


class Remembers(Block):
    """A block whose state is all that it has."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Compiler:
    """A backend of ``torch.compile`` that counts how often what it compiled runs forward, unseen by Spillway."""

    runs = HiddenAttribute(0)

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    torch._dynamo.reset()
    yield Compiler()
    torch._dynamo.reset()


def contents(model: nn.Module) -> list[list[tuple[str, int]]]:
    """The dictionaries of all modules: keys in their order, and the very objects."""
    return [[(key, id(value)) for key, value in module.__dict__.items()] for module in model.modules()]


def is_attached(model: nn.Module) -> bool:
    return any(module.__dict__.get(PLACE) is not None for module in model.modules())


# Hazard 65: copies


@pytest.mark.parametrize("policy", [None, Offload()], ids=["regions", "offload"])
@pytest.mark.parametrize("block", [Block, Remembers])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save", "average"])
def test_h65_a_copy_runs_its_own_weights_and_has_no_regions(way: str, block: type[Block], policy: Any) -> None:
    model, x = Model(lambda: block(32)), small_batch()
    attached = spillway.attach(model, policy=policy)
    step(model, x)
    if way == "deepcopy":
        copied = copy.deepcopy(model)
    elif way == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    elif way == "save":
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copied = torch.load(buffer, weights_only=False)
    else:
        copied = AveragedModel(model)
        assert torch.equal(copied(x), model(x))
        copied = copied.module
    assert not is_attached(copied)
    assert is_attached(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    attached.remove()
    assert step(copied, x) != step(model, x)
    twice = Model(lambda: block(32))
    with torch.no_grad():
        for parameter in twice.parameters():
            parameter.mul_(2)
    assert step(copied, x) == step(twice, x)


def test_h65_a_copy_made_in_the_middle_of_a_call_runs_its_own_weights() -> None:
    model, x = Model(), small_batch()
    copies: list[nn.Module] = []
    block = model.body[1]
    block.register_forward_pre_hook(lambda *_: copies.append(copy.deepcopy(block)))
    attached = spillway.attach(model)
    step(model, x)
    attached.remove()
    (copied,) = copies
    copied._forward_pre_hooks.clear()
    block._forward_pre_hooks.clear()
    assert step(copied, x) == step(block, x)
    with torch.no_grad():
        copied.down.weight.zero_()
        copied.down.bias.zero_()
    assert torch.equal(copied(x), x)


def test_h65_nothing_else_of_the_model_changes() -> None:
    model, x = Model(), small_batch()
    keys, hooks = list(model.state_dict()), [dict(module._forward_hooks) for module in model.modules()]
    before = contents(model)
    spillway.attach(model)
    step(model, x)
    assert list(model.state_dict()) == keys
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks
    assert all(isinstance(block, Block) and type(block) is Block for block in model.body)
    assert [[item for item in items if item[0] != PLACE] for items in contents(model)] == before
    assert model.load_state_dict(copy.deepcopy(model.state_dict()))


def test_h65_remove_restores_every_dictionary() -> None:
    model, x = Model(), small_batch()
    model.body[1].up.compile(backend="eager")
    before = contents(model)
    attached = spillway.attach(model, blocks=[Block, "*.up"])
    assert contents(model) != before
    attached.remove()
    assert contents(model) == before
    attached.remove()
    assert contents(model) == before
    with spillway.attach(model):
        pass
    assert contents(model) == before
    with pytest.raises(KeyError), spillway.attach(model):
        raise KeyError
    assert contents(model) == before


def test_h65_a_model_dies_by_its_last_name(no_collector: None) -> None:
    model, x = Model(), small_batch()
    model.body[0].register_forward_hook(lambda *_: None)
    attached = spillway.attach(model)
    step(model, x)
    weak = weakref.ref(model)
    del model
    assert weak() is None
    assert "Model" in repr(attached)
    attached.remove()


def test_h65_a_class_that_copies_by_hand_is_refused() -> None:
    class Shares(Block):
        def __deepcopy__(self, memo: dict[int, Any]) -> Shares:
            twin = type(self).__new__(type(self))
            twin.__dict__.update(self.__dict__)
            return twin

    class Copies(Block):
        def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
            twin = type(self).__new__(type(self))
            twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
            return twin

    shared = Model(lambda: Shares(32))
    failing(UnsupportedError, lambda: spillway.attach(shared), match="'body.0' .* __deepcopy__ of its own")
    model = Model(lambda: Copies(32))
    spillway.attach(model)
    assert not is_attached(copy.deepcopy(model))


def test_h65_copies_for_other_devices_are_refused() -> None:
    failing(UnsupportedError, lambda: spillway.attach(nn.DataParallel(Model())), match="DistributedDataParallel")


@pytest.mark.parametrize("policy", [None, Offload()], ids=["regions", "offload"])
def test_h65_dataparallel_around_an_attached_model_calls_it_on_one_device(policy: Any) -> None:
    model, x = Model(), small_batch()
    expected = Model()(x)
    with spillway.attach(model, policy=policy) as attached:
        wrapped = nn.Sequential(nn.DataParallel(nn.Sequential(model)))
        assert torch.equal(wrapped(x), expected)
        assert attached.passes == 1


def test_h65_blocks_that_are_checkpointed_after_attaching_are_refused() -> None:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    model, x = Model(), small_batch()
    with spillway.attach(model) as attached:
        names = attached.blocks
        blocks = [model.get_submodule(name) for name in names]
        wrappers.apply_activation_checkpointing(model, check_fn=lambda module: any(module is each for each in blocks))
        failing(UsageError, lambda: model(x), match=f"'{names[0]}' .CheckpointWrapper. checkpoints already")
        assert_no_hook()


def replica_of(model: nn.Module) -> nn.Module:
    """A replica as ``DataParallel`` makes it, by copying dictionaries, with weights twice as large."""
    replica = model._replicate_for_data_parallel()
    for name, parameter in model._parameters.items():
        replica.__dict__[name] = None if parameter is None else parameter.detach() * 2
    for name, child in model._modules.items():
        replica._modules[name] = None if child is None else replica_of(child)
    return replica  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", [None, Offload()], ids=["regions", "offload"])
def test_h65_replicas_run_their_own_weights_and_are_refused_in_training(policy: Any) -> None:
    model, x = Model(), small_batch()
    expected = replica_of(model)(x)
    spillway.attach(model, policy=policy)
    replica = replica_of(model)
    failing(UnsupportedError, lambda: replica(x), match="replica of the model .*DistributedDataParallel")
    assert_no_hook()
    with torch.no_grad():
        assert torch.equal(replica(x), expected)
    assert torch.equal(replica.eval()(x), expected)
    assert not torch.equal(expected, model(x))


@pytest.mark.parametrize("original", ["lives", "died"])
@pytest.mark.parametrize("block", [Block, Remembers])
def test_h65_a_shallow_copy_runs_its_own_weights(block: type[Block], original: str) -> None:
    model, x = Model(lambda: block(32)), small_batch()
    spillway.attach(model)
    copied = copy.copy(model.body[1])
    copied._modules = copy.deepcopy(copied._modules)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    plain = block(32)
    plain.load_state_dict(copied.state_dict())
    if original == "died":
        del model
    assert step(copied, x) == step(plain, x)


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, lambda it: pickle.loads(pickle.dumps(it))])
def test_h65_a_model_may_keep_what_attach_gave_back(way: Callable[[Any], Any]) -> None:
    model = Model()
    model.attached = spillway.attach(model)
    assert way(model.attached) is None
    copied = copy.deepcopy(model)
    assert copied.attached is None
    assert not is_attached(copied)
    model.attached.remove()


# Hazard 14: exceptions


class Fails(Block):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.fails:
            raise ArithmeticError
        return y


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("policy", [None, Offload(), spillway.Recompute(use_reentrant=True)])
def test_h14_an_exception_in_forward_leaves_nothing(policy: Any, hooked: bool) -> None:
    model, x = Model(lambda: Fails(32)), small_batch()
    if hooked:
        model.body[1].register_forward_hook(lambda *_: None)
    plain = step(model, x)
    before = contents(model)
    attached = spillway.attach(model, policy=policy)
    model.body[1].fails = True
    for _ in range(2):
        # A policy is asked while the first call is replayed.
        failing(ArithmeticError, lambda: step(model, x))
        assert_no_hook()
    model.body[1].fails = False
    del model.body[1].__dict__["fails"]
    assert step(model, x) == plain
    assert_no_hook()
    attached.remove()
    assert contents(model) == before


def test_h14_attaching_that_fails_half_way_leaves_nothing() -> None:
    class Past(Block):
        def __call__(self, x: Tensor) -> Tensor:
            return self.forward(x)

    model = Model()
    model.body[2] = Past(32)
    before = contents(model)
    failing(UnsupportedError, lambda: spillway.attach(model, blocks="body.*"), match="'body.2' .* __call__ of its own")
    assert contents(model) == before


@pytest.mark.parametrize("calls", range(4))
def test_h14_attaching_that_is_interrupted_anywhere_leaves_nothing(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Model(), small_batch()
    plain = step(model, x)
    # As a copy has it, of a class whose state is all that it has.
    model.body[0].__dict__[PLACE] = None
    before = contents(model)
    taken: list[object] = []
    install = ModuleCall.install

    def interrupted(call: ModuleCall) -> None:
        if len(taken) == calls:
            raise KeyboardInterrupt
        taken.append(call)
        install(call)

    with monkeypatch.context() as patched:
        patched.setattr(ModuleCall, "install", interrupted)
        failing(KeyboardInterrupt, lambda: spillway.attach(model, blocks=Block))
    assert len(taken) == calls
    assert contents(model) == before
    with spillway.attach(model):
        assert step(model, x) == plain


@pytest.mark.parametrize("selector", ["predicate", "policy"])
def test_h14_an_error_of_the_callers_own_leaves_nothing(selector: str) -> None:
    def fails(*_: Any) -> bool:
        raise ArithmeticError

    model, x = Model(), small_batch()
    before = contents(model)
    if selector == "predicate":
        failing(ArithmeticError, lambda: spillway.attach(model, blocks=fails))
    else:
        attached = spillway.attach(model, policy=spillway.Recompute(policy=fails))
        # A policy is asked while the first call is replayed.
        failing(ArithmeticError, lambda: step(model, x))
        assert_no_hook()
        attached.remove()
    assert contents(model) == before


# Other threads


def test_calls_that_come_while_attaching_and_removing_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if from another thread, between any two of the modules."""
    model, x = Model(), small_batch()
    plain = step(model, x)
    turns: list[str] = []
    install, uninstall = ModuleCall.install, ModuleCall.uninstall

    def between(name: str, change: Callable[[ModuleCall], Any]) -> Callable[[ModuleCall], Any]:
        def run(call: ModuleCall) -> Any:
            assert step(model, x) == plain
            done = change(call)
            assert step(model, x) == plain
            turns.append(name)
            return done

        return run

    monkeypatch.setattr(ModuleCall, "install", between("install", install))
    monkeypatch.setattr(ModuleCall, "uninstall", between("uninstall", uninstall))
    attached = spillway.attach(model)
    attached.remove()
    assert turns == ["install"] * 4 + ["uninstall"] * 4


def test_a_call_that_is_under_way_may_outlive_remove() -> None:
    model, x = Model(), small_batch()
    plain = step(model, x)
    # Torch has looked what to call, and all is taken off before that looks.
    attached = spillway.attach(model)
    begun = model.__dict__[PLACE]
    attached.remove()
    assert torch.equal(begun(x).square().mean(), plain.loss)
    for place in ("", "body.1", "head"):
        attached = spillway.attach(model)
        handle = model.get_submodule(place).register_forward_pre_hook(lambda *_, attached=attached: attached.remove())
        for _ in range(2):
            assert step(model, x) == plain
        handle.remove()
        assert not is_attached(model)


# Who may not be attached to


def test_attaching_twice_is_an_error() -> None:
    model = Model()
    first = spillway.attach(model, blocks="body.0")
    before = contents(model)
    for other in (model, nn.Sequential(model, nn.ReLU())):
        failing(UsageError, lambda other=other: spillway.attach(other), match="attached already.* remove()")
    assert contents(model) == before
    first.remove()
    spillway.attach(model)


def test_a_scripted_module_is_refused() -> None:
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        scripted = torch.jit.script(nn.Sequential(nn.Linear(32, 32), nn.ReLU()))
    failing(UnsupportedError, lambda: spillway.attach(scripted, policy=Keep()), match="scripted")
    model = nn.Sequential(scripted, nn.Linear(32, 32))
    failing(UnsupportedError, lambda: spillway.attach(model, blocks="0"), match="'0' .*scripted")


def test_a_call_of_ones_own_that_goes_on_to_torchs_is_taken() -> None:
    class Own(Block):
        calls = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            Own.calls += 1
            return super().__call__(*args, **kwargs)

    model, x = Model(lambda: Own(32)), small_batch()
    plain = step(model, x)
    with spillway.attach(model) as attached:
        assert step(model, x) == plain
        assert attached.stats().recomputed_bytes > 0


def test_a_call_that_is_what_torchs_own_calls_is_refused() -> None:
    class Past(Block):
        __call__ = nn.Module._call_impl

    failing(UnsupportedError, lambda: spillway.attach(Model(lambda: Past(32))), match="'body.0' .* __call__ of its own")


class Double:
    """A function that is no method of whom it belongs to."""

    def __call__(self, x: Tensor) -> Tensor:
        return x.sin().exp()


class Static(nn.Linear):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.sin().exp()


class OfClass(nn.Linear):
    seen = 0

    @classmethod
    def forward(cls, x: Tensor) -> Tensor:  # type: ignore[override]
        cls.seen += 1
        return x.sin().exp()


class Object(nn.Linear):
    forward = Double()  # type: ignore[assignment]


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("kind", [Static, OfClass, Object])
def test_a_forward_that_is_no_method_is_called_as_it_is(kind: type[nn.Linear], hooked: bool) -> None:
    model, x = Model(lambda: kind(32, 32)), small_batch().requires_grad_()
    if hooked:
        for block in model.body:
            block.register_forward_hook(lambda *_: None)
    plain = step(model, x)
    with spillway.attach(model, blocks=kind) as attached:
        for _ in range(3):
            assert step(model, x) == plain
        assert attached.stats().recomputed_bytes > 0


def test_a_forward_that_is_a_property_is_refused() -> None:
    class Property(Block):
        @property
        def forward(self) -> Any:
            return super().forward

    class Inherits(Property):
        pass

    model, x = Model(lambda: Inherits(32)), small_batch()
    failing(UnsupportedError, lambda: spillway.attach(model), match="'body.0' .*forward is a property")
    with spillway.attach(model, policy=Offload()):
        assert step(model, x) == step(Model(), x)


class Slots(Block):
    __slots__ = ("extra",)


class Frozen(Block):
    def __setattr__(self, name: str, value: Any) -> None:
        if "down" in self.__dict__.get("_modules", ()):
            raise AttributeError(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(name)


class Forwards(nn.Module):
    """Has all that its only part has."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Block(32)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("part"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)  # type: ignore[no-any-return]


class Empty(Block):
    """False, and without a length."""

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        raise TypeError


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("kind", [Slots, Frozen, Forwards, Empty])
def test_classes_that_see_to_their_own_attributes(kind: Callable[..., nn.Module], hooked: bool) -> None:
    model, x = Model(kind if kind is Forwards else lambda: kind(32)), small_batch()
    if hooked:
        for block in model.body:
            block.register_forward_hook(lambda *_: None)
    plain = step(model, x)
    before = contents(model)
    attached = spillway.attach(model, blocks=kind)
    for _ in range(3):
        assert step(model, x) == plain
    assert attached.stats().recomputed_bytes > 0
    assert not is_attached(copy.deepcopy(model))
    attached.remove()
    assert contents(model) == before
    assert step(model, x) == plain


def test_an_argument_with_any_attribute_is_no_cache() -> None:
    class Options(dict[str, Any]):
        __getattr__ = dict.get

    class Takes(Block):
        def forward(self, x: Tensor, options: Any = None) -> Tensor:
            return super().forward(x) * options.scale

    class Gives(Model):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.body:
                x = block(x, options=Options(scale=2.0))
            return self.head(x)  # type: ignore[no-any-return]

    model, x = Gives(lambda: Takes(32)), small_batch()
    plain = step(model, x)
    with spillway.attach(model) as attached:
        assert step(model, x) == plain
        assert attached.stats().recomputed_bytes > 0


@pytest.mark.parametrize("hooked", [False, True])
def test_blocks_that_make_their_parameters_in_their_first_call(hooked: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.LazyLinear(32), nn.GELU()) for _ in range(3)))
        if hooked:
            for block in model:
                block.register_forward_hook(lambda *_: None)
        return model

    model, other, x = make(), make(), small_batch()
    with spillway.attach(model, blocks="?") as attached:
        for turn in range(3):
            torch.manual_seed(1)
            ours = step(model, x)
            torch.manual_seed(1)
            assert ours == step(other, x)
            assert (attached.stats().recomputed_bytes > 0) == (turn > 0)


# A model in another


@pytest.mark.parametrize("around", [None, Offload(), spillway.Recompute(use_reentrant=True)])
@pytest.mark.parametrize("inside", [None, Offload(), spillway.Recompute(save="matmul", offload="inputs")])
def test_an_attached_model_inside_of_a_region_of_another(around: Any, inside: Any) -> None:
    inner, x = Model(), small_batch()
    outer = nn.Sequential(nn.Sequential(nn.Linear(32, 32), inner), nn.Linear(8, 8))
    plain = step(outer, x)
    before = contents(outer)
    options = {} if around == Offload() else {"blocks": "0"}
    first = spillway.attach(outer, policy=around, min_bytes=0, **options)
    second = spillway.attach(inner, policy=inside, min_bytes=0)
    for _ in range(3):
        assert step(outer, x) == plain
        assert_no_hook()
    first.remove()
    assert step(outer, x) == plain
    second.remove()
    assert contents(outer) == before


@pytest.mark.parametrize("flag", ["gradient_checkpointing", "grad_checkpointing"])
def test_a_flag_by_which_blocks_checkpoint_is_false_while_attached(flag: str) -> None:
    def flags() -> list[object]:
        return [vars(module).get(flag) for module in model.modules()]

    model, x = Model(), small_batch()
    plain = step(model, x)
    for module in (model, model.body[0], model.body[1], next(model.body[1].children()), model.head):
        setattr(module, flag, True)
    setattr(model.body[2], flag, False)
    before, on = contents(model), flags()
    attached = spillway.attach(model)
    assert not any(getattr(each, flag, False) for each in (model, *model.body.modules()))
    # No block: nothing else would recompute it.
    assert getattr(model.head, flag)
    [note] = attached.notes
    assert note.startswith(f"{flag} of the model is switched off")
    assert note in attached.explain()
    assert step(model, x) == plain
    # Switched on by the user meanwhile.
    setattr(model.body[2], flag, True)
    setattr(model, flag, True)
    assert step(model, x) == plain
    assert not any(getattr(each, flag, False) for each in (model, *model.body.modules()))
    attached.remove()
    assert [each is True for each in flags()] == [each is not None for each in on]
    assert attached.notes == ()
    setattr(model.body[2], flag, False)
    assert contents(model) == before
    # An offload policy offloads what these checkpoints keep.
    with spillway.attach(model, policy=Offload()):
        assert flags() == on
    assert contents(model) == before


def test_a_flag_of_a_class_is_put_back_to_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    monkeypatch.setattr(Model, "gradient_checkpointing", True, raising=False)
    before = contents(model)
    with spillway.attach(model):
        assert model.gradient_checkpointing is False
    assert model.gradient_checkpointing is True
    assert contents(model) == before


def test_an_attach_that_fails_leaves_flags_as_they_were() -> None:
    model = Model()
    model.body[1].gradient_checkpointing = True
    model.body[2] = checkpoint_wrapper(model.body[2])
    failing(UsageError, lambda: spillway.attach(model), match="checkpoints already")
    assert model.body[1].gradient_checkpointing is True


def test_a_wrapped_checkpoint_is_refused() -> None:
    model = Model()
    model.body[1] = checkpoint_wrapper(model.body[1])
    failing(UsageError, lambda: spillway.attach(model), match="'body.1' .*CheckpointWrapper.* checkpoints already")


# Hooks


def test_hooks_of_a_block_run_once_and_see_what_was_computed() -> None:
    class Side(nn.Module):
        """Nobody wants the first output again."""

        def __init__(self) -> None:
            super().__init__()
            self.side = nn.Linear(32, 32)
            self.main = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            out = self.side(x)
            return self.main(x).sin().exp() + out

    def run(attach: bool) -> tuple[list[Tensor], list[str]]:
        model, x = Model(Side), small_batch()
        seen: list[Tensor] = []
        order: list[str] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            order.append("before")
            return (args[0] * 2,), kwargs

        def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            order.append("after")
            seen.extend((args[0].detach(), output.detach()))
            return output + 1

        def backward(module: nn.Module, into: Any, out: Any) -> None:
            order.append("backward")
            seen.extend((into[0].clone(), out[0].clone()))

        for block in model.body:
            block.register_forward_pre_hook(before, with_kwargs=True)
            block.register_forward_hook(after)
            block.register_full_backward_hook(backward)
        if attach:
            spillway.attach(model)
        x.requires_grad_()
        results = [step(model, x) for _ in range(3)]
        return [*seen, *(tensor for result in results for tensor in (result.loss, *result.gradients))], order

    (plain, order), (ours, own) = run(False), run(True)
    assert own == order
    assert all(map(torch.equal, ours, plain))


def test_hooks_on_all_modules_run_around_regions() -> None:
    model, x = Model(), small_batch()
    plain = step(model, x)
    blocks: list[nn.Module] = []
    with spillway.attach(model):
        with torch.nn.modules.module.register_module_forward_hook(
            lambda module, *_: blocks.append(module) if isinstance(module, Block) else None
        ):  # fmt: skip
            assert step(model, x) == plain
        assert blocks == list(model.body)


def test_an_instances_own_forward_is_what_runs_in_the_region() -> None:
    """So do accelerate's hooks."""
    model, x = Model(), small_batch()
    block = model.body[1]
    old = block.forward
    block.forward = lambda x: old(x) * 2
    plain = step(model, x)
    before = contents(model)
    for hooked in (False, True):
        handle = block.register_forward_hook(lambda *_: None) if hooked else None
        with spillway.attach(model) as attached:
            for _ in range(2):
                assert step(model, x) == plain
            assert attached.stats().recomputed_bytes > 0
        if handle is not None:
            handle.remove()
    assert contents(model) == before


# Between forward and backward


def test_remove_between_forward_and_backward() -> None:
    model, x = Model(), small_batch()
    plain = step(model, x)
    attached = spillway.attach(model)
    model.zero_grad()
    loss = model(x).square().mean()
    attached.remove()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(map(torch.equal, gradients, plain.gradients))  # type: ignore[arg-type]


@pytest.mark.parametrize("again", [False, True])
def test_blocks_in_blocks_that_went_or_came_before_backward_are_an_error(again: bool) -> None:
    model, x = Model(), small_batch()
    attached = spillway.attach(model, blocks=Block if again else [Block, "*.up"])
    loss = model(x).square().mean()
    attached.remove()
    if again:
        spillway.attach(model, blocks=[Block, "*.up"])
    failing(RecomputeError, loss.backward, match="Call backward first, then remove")


# Compiled


@COMPILES
def test_compiled_blocks_run_compiled_inside_of_their_regions(compiler: Any) -> None:
    model, x = Model(), small_batch()
    for block in model.body:
        block.compile(backend=compiler)
    plain = step(model, x)
    compiler.runs = 0
    with spillway.attach(model) as attached:
        assert len(attached.blocks) == 3
        for _ in range(3):
            # Once forward, and once again.
            compiler.runs = 0
            assert step(model, x) == plain
            assert compiler.runs == 6
        assert attached.stats().recomputed_bytes > 0
    compiler.runs = 0
    assert step(model, x) == plain
    assert compiler.runs == 3


@COMPILES
def test_compiled_blocks_by_aot_eager_are_right() -> None:
    model, x = Model(), small_batch()
    for block in model.body:
        block.compile(backend="aot_eager")
    plain = step(model, x)
    with spillway.attach(model, policy=spillway.Recompute(save="matmul")):
        for _ in range(3):
            assert step(model, x) == plain


@COMPILES
@pytest.mark.parametrize("blocks", [None, Block, "body.*"])
def test_wrapped_compiled_blocks_are_blocks(compiler: Any, blocks: Any) -> None:
    model, x = Model(), small_batch()
    for index in range(3):
        model.body[index] = torch.compile(model.body[index], backend=compiler)
    plain = step(model, x)
    with spillway.attach(model, blocks=blocks) as attached:
        assert attached.blocks == ("body.0", "body.1", "body.2")
        for _ in range(2):
            step(model, x)
        compiler.runs = 0
        assert step(model, x) == plain
        assert compiler.runs == 6
    failing(UsageError, lambda: spillway.attach(model, blocks="*.up"), match="'body.0' .* compiled around blocks")


@COMPILES
def test_a_block_compiled_after_attaching_is_noticed(compiler: Any) -> None:
    model, x = Model(), small_batch()
    attached = spillway.attach(model)
    model.body[1].compile(backend=compiler)
    theirs = model.body[1].__dict__[PLACE]
    failing(UsageError, lambda: model(x), match="'body.1' .*compiled after attaching.* attach again")
    assert_no_hook()
    failing(UsageError, attached.remove, match="'body.1' .*compiled after attaching")
    assert model.body[1].__dict__[PLACE] is theirs
    assert [name for name, module in model.named_modules() if module.__dict__.get(PLACE)] == ["body.1"]
    attached.remove()
    with spillway.attach(model):
        step(model, x)
    assert model.body[1].__dict__[PLACE] is theirs


@COMPILES
def test_a_block_that_is_wrapped_by_the_compiler_after_attaching_says_so(compiler: Any) -> None:
    model, x = Model(), small_batch()
    attached = spillway.attach(model)
    model.body[1] = torch.compile(model.body[1], backend=compiler)
    failing(UnsupportedError, lambda: model(x), match="'body.1' .* inside of torch.compile.* before attaching")
    assert_no_hook()
    attached.remove()
    torch._dynamo.reset()
    assert step(model, x) == step(Model(), x)


@pytest.mark.parametrize("name", ["", "body"])
@COMPILES
def test_what_is_around_blocks_compiled_after_attaching_is_noticed(compiler: Any, name: str) -> None:
    model, x = Model(), small_batch()
    attached = spillway.attach(model)
    model.get_submodule(name).compile(backend=compiler)
    if name:
        failing(UsageError, lambda: model(x), match="'body' was compiled after attaching")
        attached.remove()
    else:
        failing(UsageError, attached.remove, match="the model .Model. was compiled after attaching")
    assert [each for each, module in model.named_modules() if module.__dict__.get(PLACE)] == [name]


@COMPILES
def test_an_error_of_a_call_is_not_told_twice(compiler: Any) -> None:
    model, x = Model(), small_batch()

    def run() -> None:
        with spillway.attach(model):
            model.body[1].compile(backend=compiler)
            model(x)

    with pytest.raises(UsageError) as caught:
        run()
    assert caught.value.__context__ is None


@pytest.mark.parametrize("place", ["model", "body", "wrapped"])
@COMPILES
def test_what_is_compiled_around_blocks_is_refused(compiler: Any, place: str) -> None:
    model: Any = Model()
    if place == "wrapped":
        model = torch.compile(model, backend=compiler)
    else:
        model.get_submodule("" if place == "model" else place).compile(backend=compiler)
    failing(UsageError, lambda: spillway.attach(model, blocks=Block), match="compiled around blocks.* block.compile()")


@COMPILES
def test_an_attached_model_inside_of_a_compiled_one_says_so(compiler: Any) -> None:
    model, x = Model(), small_batch()
    attached = spillway.attach(model)
    compiled = torch.compile(model, backend=compiler)
    failing(UnsupportedError, lambda: compiled(x), match="inside of torch.compile")
    assert_no_hook()
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    attached.remove()
    torch._dynamo.reset()
    assert step(compiled, x) == step(model, x)


@COMPILES
def test_a_compiled_function_around_an_attached_model_is_right(compiler: Any) -> None:
    model, x = Model(), small_batch()
    plain = step(model, x)
    spillway.attach(model)
    compiled = torch.compile(lambda x: model(x), backend=compiler)
    model.zero_grad()
    compiled(x).square().mean().backward()
    assert all(map(torch.equal, [p.grad for p in model.parameters()], plain.gradients))  # type: ignore[arg-type]


def test_a_graph_module_is_attached_to() -> None:
    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return isinstance(module, Block)

    model, x = Model(), small_batch()
    plain = step(model, x)
    graph = torch.fx.GraphModule(model, Leaves().trace(model))
    with spillway.attach(graph, blocks=Block) as attached:
        for _ in range(2):
            assert step(graph, x) == plain
        assert attached.stats().recomputed_bytes > 0
        assert not is_attached(copy.deepcopy(graph))


def test_an_attached_model_is_traced_by_fx_as_it_is() -> None:
    model, x = Model(), small_batch()
    with spillway.attach(model) as attached:
        graph = torch.fx.symbolic_trace(model)
        assert attached.stats() == spillway.StepStats()
    assert step(graph, x) == step(model, x)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_an_attached_model_is_traced_as_it_is() -> None:
    model, x = Model(), small_batch()
    with spillway.attach(model) as attached:
        traced = torch.jit.trace(model, x)
        assert attached.stats() == spillway.StepStats()
    assert torch.equal(traced(x), model(x))


@COMPILES
@pytest.mark.parametrize("training", [False, True])
def test_an_attached_model_is_exported_as_it_is(training: bool) -> None:
    model, x = Model().train(training), small_batch()
    with spillway.attach(model) as attached:
        exported = torch.export.export(model, (x,))
        assert attached.stats() == spillway.StepStats()
    assert torch.equal(exported.module()(x), model(x))


# Distributed


def full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.clone()


def sharded_steps(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Losses and gradients of a few steps of SGD: the gathered weights of one step are not those of the next."""
    seen: list[Tensor] = []
    for _ in range(4):
        model.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        seen.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                seen.append(full(parameter.grad))
                parameter -= parameter.grad
    return seen


@pytest.mark.parametrize("first", ["attach", "wrap"])
def test_ddp_before_or_after(one_rank: None, first: str) -> None:
    x = small_batch()
    plain = step(DistributedDataParallel(Model()), x)
    model = Model()
    if first == "attach":
        attached = spillway.attach(model)
        wrapped = DistributedDataParallel(model)
    else:
        wrapped = DistributedDataParallel(model)
        attached = spillway.attach(wrapped)
        # Its state is all that it has.
        assert not is_attached(copy.deepcopy(wrapped))
    for _ in range(3):
        assert step(wrapped, x) == plain
    assert attached.stats().recomputed_bytes > 0
    attached.remove()
    assert step(wrapped, x) == plain


def shard(model: Model, mesh: DeviceMesh, *, inner: bool = False) -> Model:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.body:
        for unit in (block.up, block) if inner else (block,):
            fully_shard(unit, mesh=mesh, mp_policy=half)
    fully_shard(model, mesh=mesh, mp_policy=half)
    return model


@pytest.mark.parametrize("first", ["attach", "shard"])
@pytest.mark.parametrize(
    "policy",
    [None, spillway.Recompute(save="u*"), spillway.Recompute(use_reentrant=True), Offload()],
    ids=["all", "save", "reentrant", "offload"],
)
def test_fsdp2_before_or_after(one_rank: None, first: str, policy: Any) -> None:
    mesh, x = DeviceMesh("cpu", [0]), small_batch()
    plain = sharded_steps(shard(Model(), mesh), x)
    model = Model()
    if first == "shard":
        shard(model, mesh)
    attached = spillway.attach(model, policy=policy, blocks=None if policy == Offload() else Block)
    if first == "attach":
        shard(model, mesh)
    assert all(map(torch.equal, sharded_steps(model, x), plain))
    attached.remove()
    assert not is_attached(model)


def test_fsdp2_units_inside_of_blocks(one_rank: None) -> None:
    mesh, x = DeviceMesh("cpu", [0]), small_batch()
    plain = sharded_steps(shard(Model(), mesh, inner=True), x)
    model = shard(Model(), mesh, inner=True)
    with spillway.attach(model, blocks=Block):
        assert all(map(torch.equal, sharded_steps(model, x), plain))


@COMPILES
@pytest.mark.parametrize("in_place", [False, True])
def test_fsdp2_around_compiled_blocks(one_rank: None, compiler: Any, in_place: bool) -> None:
    mesh, x = DeviceMesh("cpu", [0]), small_batch()

    def make() -> Model:
        torch._dynamo.reset()
        model = Model()
        for index, block in enumerate(model.body):
            if in_place:
                block.compile(backend=compiler)
            else:
                model.body[index] = torch.compile(block, backend=compiler)
        return shard(model, mesh)

    plain = sharded_steps(make(), x)
    model = make()
    with spillway.attach(model, blocks=Block) as attached:
        compiler.runs = 0
        assert all(map(torch.equal, sharded_steps(model, x), plain))
        assert compiler.runs >= 4 * 3
        assert attached.stats().recomputed_bytes > 0
