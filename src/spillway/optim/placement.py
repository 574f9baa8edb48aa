"""The division of parameters between the CPU and their GPU, and the step on the GPU.

NOTE [ Steps on both ]

With ``step_on="auto"`` there are two stores: one steps on the CPU, the other streams states to the GPU and steps there.
They work at the same time, on different parameters. The CPU is limited by the bandwidth of its memory, and the streamed
part by that of the link. Whether both together are faster than one is measured (:class:`ShareTuner`).

Whole parameters of the two alternate in the order of the model. So both processors get gradients during all of
backward, and blocks of the next forward wait for both alike. If one had the first layers and the other the last ones,
each would be idle for a half of backward, and for a half of the forward.

A parameter's store depends only on its place among all parameters, and on the share. So it does not change if other
parameters are added, or if ``divide`` lets the GPU keep some of them. Two runs with the same share have the same bits.

A thread of its own queues the steps on the GPU: the CPU worker thread waits for its workers. The two threads wait for
each other only where gradients were summed on the CPU. Copies to the GPU read the sums after the last addition, and
the next addition comes after these copies.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from spillway.checkpointing.tensors import is_dense
from spillway.errors import BackendError, UnsupportedError, UsageError
from spillway.optim.cpu_store import CpuStore, DiskTier, MemoryTier
from spillway.optim.gpu_store import GpuStore
from spillway.optim.gradient import DeviceContext
from spillway.optim.host_parameter import HostParameter
from spillway.optim.optimizer_class import (
    MASTER,
    BorrowingOptimizer,
    ClassArguments,
    ClassTraits,
    GroupWrites,
    State,
    StatePrediction,
    check_parameters,
    cpu_settings_of,
    for_cpu,
    settings_of,
)
from spillway.optim.options import Options, alternating, compute_with, counted, held_beyond, held_of, workers_of
from spillway.optim.state_store import StateStore, StepCost
from spillway.optim.states import device_copy, with_tensors
from spillway.optim.tensors import follow, local_of
from spillway.optim.transfers import Transfers
from spillway.runtime.backend import HostQueue, on_error
from spillway.runtime.device import DeviceRuntime
from spillway.session import Session

if TYPE_CHECKING:
    from spillway.parameters.homes import StreamedParameter

IN_CAPTURE = "An optimizer step in a CUDA graph's capture: the CPU computes it. Call step() outside of the capture."

Groups = Callable[[], list[dict[str, Any]]]
"""Gives the optimizer's param groups, which loading a state replaces."""


class Placement:
    """Parameters whose state is in a store (``held``), parameters of the GPU (``device``), and all their states.

    ``HostParameter.store`` is the store of a parameter.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        device_class: type[Optimizer],
        arguments: ClassArguments,
        options: Options,
        session: Session,
        groups: Groups,
    ) -> None:
        self.traits = ClassTraits.of(optimizer_class)
        self.options = options
        self.held: dict[torch.Tensor, HostParameter] = {}
        self.streamed: dict[torch.Tensor, StreamedParameter | None] = {}
        """Parameters that are in pinned CPU memory between uses."""
        self.contexts: dict[torch.device, DeviceContext] = {}
        self._class = optimizer_class
        self._given = arguments.cpu
        self._session = session
        self.groups = groups
        self._prediction = StatePrediction(device_class, for_cpu(arguments.device))
        self._threads: tuple[HostQueue, HostQueue, HostQueue] | None = None
        self._placed: list[list[int]] = []
        """The identities of the parameters of each group, as they were placed."""
        self._addresses: list[int] = []
        """The addresses of the parameters when they were checked for shared memory."""
        self.device = DeviceStep(device_class, arguments, groups)
        self.stores = self._new_stores()
        self.cpu_share = options.first_cpu_share
        """The share of elements that the CPU steps, if all parameters were held. See :func:`alternating`."""

    def parameters(self) -> Iterator[tuple[int, torch.Tensor]]:
        """All parameters, with the indices of their groups."""
        for index, group in enumerate(self.groups()):
            for parameter in group["params"]:
                yield index, parameter

    def counted(self) -> list[tuple[int, torch.Tensor]]:
        """The parameters that a fraction counts, with the indices of their groups."""
        may_stay = counted([local_of(parameter).device for _, parameter in self.parameters()])
        return list(itertools.compress(self.parameters(), may_stay))

    def fraction(self) -> float:
        sizes = {parameter: local_of(parameter).numel() for _, parameter in self.parameters()}
        return sum(sizes.get(parameter, 0) for parameter in self.held) / max(1, sum(sizes.values()))

    def state_bytes(self, group: int, parameter: torch.Tensor) -> int:
        """Bytes of a parameter's state, its master weight included."""
        local, work = local_of(parameter), self.options.work_dtype(parameter)
        master = 0 if work == local.dtype else local.numel() * work.itemsize
        return master + self._prediction.nbytes(local.shape, work, self.groups()[group])

    def add(self, parameters: Sequence[tuple[int, torch.Tensor]]) -> list[HostParameter]:
        """Place new parameters, given with the indices of their groups. Gives those that the CPU steps."""
        if self.traits.steps_alone:
            check_parameters(self._class, [parameter for _, parameter in parameters], self._given)
        devices = (self.context_of(local_of(one).device) for _, one in self.parameters())
        is_new = self.options.measures_share and not self.held
        if is_new and all(device.transfers.backend.direct_disk for device in devices):
            # Nothing is gained by copies from CPU memory to CPU memory.
            self.cpu_share = 1.0
        fraction, stores = self.options.fraction, self.stores_by_parameter()
        on_cpu = self.on_cpu(parameters, fraction if isinstance(fraction, (int, float)) else 1.0)
        # All of them are made before the first is added: one may be refused.
        held = [self._made(group, one) for (group, one), here in zip(parameters, on_cpu, strict=True) if here]
        self.check_memory()
        for one in held:
            self.held[one.parameter] = one
            stores[one.parameter].add(one)
        for group, parameter in parameters:
            if parameter not in self.held:
                self.device.add(parameter, group, self.options.work_dtype(parameter))
        return held

    def check_memory(self) -> None:
        """Raise if two parameters share memory: a step reads both before it writes them, and one update is lost."""
        found = [local_of(parameter) for parameter in dict.fromkeys(parameter for _, parameter in self.parameters())]
        addresses = [one.data_ptr() for one in found]
        if addresses == self._addresses:
            return
        # An empty tensor, or one whose memory was freed, is at 0.
        some = [(str(one.device), at, one) for at, one in zip(addresses, found, strict=True) if at and is_dense(one)]
        # Neighbours in memory. If any two overlap, then two neighbours do.
        some.sort(key=lambda each: each[:2])
        for (device, start, one), (other_device, other_start, other) in itertools.pairwise(some):
            if device == other_device and other_start < start + one.nbytes:
                raise UnsupportedError(
                    f"Parameters of shapes {tuple(one.shape)} and {tuple(other.shape)} share memory. A step reads both "
                    f"before it writes them, so an update would be lost. Use one parameter in both places, or give "
                    f"each its own memory: parameter.data = parameter.data.clone()."
                )
        self._addresses = addresses

    def is_regrouped(self) -> bool:
        """Whether the user has edited which parameters are in which group."""
        return self._placed != self._grouping()

    def groups_of_placed(self) -> dict[torch.Tensor, int]:
        """The parameters that are placed, with the indices of their groups at that time."""
        held = {parameter: one.group for parameter, one in self.held.items()}
        return {**held, **{parameter: self.device.group_of(parameter) for parameter in self.device}}

    def regroup(self, groups: Mapping[torch.Tensor, int]) -> list[tuple[torch.Tensor, State]]:
        """Parameters are in these groups, in this order. Gives states that left their chunks, to be put again."""
        for parameter in list(self.device):
            self.device.add(parameter, groups[parameter], self.options.work_dtype(parameter))
        self.held = {parameter: self.held[parameter] for parameter in groups if parameter in self.held}
        moved = [held for parameter, held in self.held.items() if held.group != groups[parameter]]
        for held in moved:
            held.group = groups[held.parameter]
        # All parameters of a chunk are stepped with the settings of one group.
        apart = [
            held
            for held in [*moved, *self.stored_with(moved)]
            if self.held.get(held.parameter) is held
            and (held.cut != held.store.may_cut(held) or any(one.kind != held.kind for one in self.stored_with([held])))
        ]
        states = [state for store, some in self.of_stores(apart) for state in store.load_all(some)]
        apart = [held for _, some in self.of_stores(apart) for held in some]
        for held in apart:
            held.store.discard(held)
            held.store.add(held)
        self._placed = self._grouping()
        return [(held.parameter, state) for held, state in zip(apart, states, strict=True)]

    def _grouping(self) -> list[list[int]]:
        return [[*map(id, group["params"])] for group in self.groups()]

    def new_held(self, group: int, parameter: torch.Tensor, state: State) -> HostParameter:
        """A parameter that comes from elsewhere, in its store with a copy of its state. It is not in ``held`` yet."""
        made, store = self._made(group, parameter), self.stores_by_parameter()[parameter]
        with on_error(made.release), on_error(store.discard, made):
            store.add(made)
            store.put([(made, state)])
        return made

    def drop(self, held: HostParameter) -> None:
        """A parameter is no longer stepped here. Its state is gone."""
        held.store.discard(held)
        held.release()

    # Steps.

    def of_stores(self, held: Iterable[HostParameter]) -> Iterator[tuple[StateStore, list[HostParameter]]]:
        some = list(held)
        for store in self.stores:
            mine = [one for one in some if one.store is store]
            if mine:
                yield store, mine

    def prepare(self, held: Iterable[HostParameter]) -> None:
        for store, some in self.of_stores(held):
            store.prepare(some)

    def complete(self, waiting: Sequence[HostParameter]) -> list[HostParameter]:
        return [one for store, some in self.of_stores(waiting) for one in store.complete(some)]

    def stored_with(self, held: Iterable[HostParameter]) -> list[HostParameter]:
        """Further parameters whose states are stored again when these are stepped or set."""
        return [other for store, some in self.of_stores(held) for other in store.others_in_chunks(some)]

    def settle(self, cost: StepCost) -> None:
        for store in self.stores:
            store.settle(cost)

    # States.

    def state_of(self, parameter: torch.Tensor) -> State:
        """A parameter's state, with slots for tensors that are elsewhere."""
        held = self.held.get(parameter)
        return self.device.state_of(parameter) if held is None else held.store.state_of(held)

    def all_states(self) -> dict[torch.Tensor, State]:
        """All states with their master weights. Those of the CPU are loaded."""
        states: dict[torch.Tensor, State] = {}
        for store, some in self.of_stores(self.held.values()):
            states.update(zip([one.parameter for one in some], store.load_all(some), strict=True))
        return {one: states[one] if one in states else self.device.state_of(one) for _, one in self.parameters()}

    def put_states(self, states: Sequence[tuple[torch.Tensor, State]]) -> None:
        loaded: dict[HostParameter, State] = {}
        for parameter, state in states:
            held = self.held.get(parameter)
            if held is None:
                self.device.put_state(parameter, state)
            else:
                held.check()
                loaded[held] = state
        for store, some in self.of_stores(loaded):
            store.put([(one, loaded[one]) for one in some])

    def begin_states(self, parameters: Sequence[torch.Tensor]) -> None:
        for store, some in self.of_stores(self.held[one] for one in parameters if one in self.held):
            store.begin(some)
        for parameter in parameters:
            if parameter not in self.held:
                self.device.begin_state(parameter)

    def close(self) -> None:
        for store in self.stores:
            store.close()
        self.held.clear()
        self.streamed.clear()
        self.device.close()

    # Devices.

    def context_of(self, device: torch.device) -> DeviceContext:
        """The context of a device; made when it is first asked for."""
        context = self.contexts.get(device)
        if context is None:
            try:
                runtime = self._session.runtime(device)
            except BackendError as error:
                if device.type != "meta":
                    raise
                raise UsageError(
                    "OffloadedOptimizer: got a parameter on meta, expected content. Load the weights first: "
                    "spillway.load_weights(model, files). Then make the optimizer."
                ) from error
            if not isinstance(runtime, DeviceRuntime):
                raise UnsupportedError(IN_CAPTURE)
            if self._threads is None:
                # One worker thread and its workers for all devices, which share the CPUs.
                threads, queue = self.options.threads_of_step, runtime.backend.host_queue
                workers, each = workers_of(threads)
                lane = queue("optimizer", begin=partial(compute_with, threads))
                some = queue("optimizer-worker", threads=workers, begin=partial(compute_with, each))
                both = len(self.stores) > 1
                stepper = queue("optimizer-gpu", begin=partial(compute_with, threads)) if both else lane
                self._threads = lane, some, stepper
            pins_sums = any(store.steps_on_device for store in self.stores)
            context = self.contexts[device] = DeviceContext(
                Transfers(runtime), *self._threads, self._session.check_open, pins_sums=pins_sums
            )
        return context

    def _new_stores(self) -> tuple[StateStore, ...]:
        """The GPU's first: its copies begin before the CPU is busy."""
        tier, step_on, early = self.options.tier, self.options.step_on, self.options.step_in_backward
        if not self.traits.steps_alone and (tier, step_on, early) != ("host", "cpu", False):
            raise UnsupportedError(
                f"{self._class.__name__} with tier={tier!r} and step_on={step_on!r}, step_in_backward={early}: a class "
                f"that is not torch's may step all parameters in one call, which needs all of their state and "
                f"gradients at once. Leave these options out, or use a class of torch.optim."
            )
        stores: list[StateStore] = []
        if step_on != "cpu":
            stores.append(GpuStore(self._class, self._given, lambda held: settings_of(self.groups()[held.group])))
        if step_on != "gpu":
            workers, _ = workers_of(self.options.threads_of_step)
            place = DiskTier() if tier == "disk" else MemoryTier()
            stores.append(CpuStore(place, self._class, self._given, self._cpu_settings, workers=workers))
        return tuple(stores)

    def _cpu_settings(self, held: HostParameter) -> dict[str, Any]:
        group = self.groups()[held.group]
        return cpu_settings_of(group, fused=self.traits.is_fused(group, held.work_dtype))

    def _made(self, group: int, parameter: torch.Tensor) -> HostParameter:
        """A parameter to be stepped by a store, which has yet to add it."""
        context = self.context_of(local_of(parameter).device)
        return HostParameter(parameter, group, context, self.options.work_dtype(parameter))

    def stores_by_parameter(self) -> dict[torch.Tensor, StateStore]:
        """The store of every parameter, for as long as it is held: see NOTE [ Steps on both ]."""
        parameters = [parameter for _, parameter in self.parameters()]
        may_stream = counted([local_of(parameter).device for parameter in parameters])
        # Whole parameters count, not shards: all ranks then step a parameter in the same place.
        sizes = [one.numel() if counts else 0 for one, counts in zip(parameters, may_stream, strict=True)]
        on_cpu = alternating(sizes, self.cpu_share)
        first, last = self.stores[0], self.stores[-1]
        return {
            parameter: last if is_taken or not counts else first
            for parameter, is_taken, counts in zip(parameters, on_cpu, may_stream, strict=True)
        }

    def on_cpu(self, parameters: Sequence[tuple[int, torch.Tensor]], fraction: float) -> list[bool]:
        """Whether the CPU steps each of them: by the rest of the GPU's budget, or by a fraction without a budget."""
        may_stay = counted([local_of(parameter).device for _, parameter in parameters])
        among = list(zip(parameters, may_stay, strict=True))
        budget = self.options.budget
        if budget is None:
            sizes = [local_of(parameter).numel() if counts else 0 for (_, parameter), counts in among]
            taken = held_of(sizes, fraction, last_first=self.options.hold == "last")
        else:
            sizes = [self.state_bytes(group, parameter) if counts else 0 for (group, parameter), counts in among]
            there = sum(self.state_bytes(group, one) for group, one in self.parameters() if one in self.device)
            taken = held_beyond(sizes, budget - there)
        return [is_taken or not counts for is_taken, counts in zip(taken, may_stay, strict=True)]


class DeviceStep:
    """Steps parameters on their GPU, with fp32 master weights there if they need some."""

    def __init__(self, optimizer_class: type[Optimizer], arguments: ClassArguments, groups: Groups) -> None:
        self._groups = groups
        self._optimizer = BorrowingOptimizer(optimizer_class, arguments.device)
        self._steps_alone = ClassTraits.of(optimizer_class).steps_alone
        self._arguments = arguments
        self._states: defaultdict[torch.Tensor, State] = defaultdict(dict)
        self._masters: dict[torch.Tensor, torch.nn.Parameter] = {}
        self._work: dict[torch.Tensor, tuple[int, torch.dtype]] = {}

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._work

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._work)

    def add(self, parameter: torch.Tensor, group: int, work_dtype: torch.dtype) -> None:
        self._work[parameter] = (group, work_dtype)

    def group_of(self, parameter: torch.Tensor) -> int:
        return self._work[parameter][0]

    def discard(self, parameter: torch.Tensor) -> None:
        self._states.pop(self._masters.pop(parameter, parameter), None)
        del self._work[parameter]

    def step(self) -> None:
        by_group = defaultdict(list)
        for parameter, (index, _) in self._work.items():
            if parameter.grad is not None:
                stepped = self._ready(parameter)
                if stepped is not parameter:
                    stepped.grad = parameter.grad.detach().to(stepped.dtype)
                by_group[index].append(stepped)
        if not by_group:
            return
        indices = sorted(by_group)
        lent = [{**self._settings(index), "params": by_group[index]} for index in indices]
        self._begin(lent)
        written = [GroupWrites(group) for group in lent]
        self._optimizer.step(lent, self._states)
        for index, writes in zip(indices, written, strict=True):
            writes.apply_to(self._groups()[index])
        with torch.no_grad():
            for parameter, master in self._masters.items():
                if master.grad is not None:
                    parameter.copy_(master)
                    master.grad = None

    def state_of(self, parameter: torch.Tensor) -> State:
        """A parameter's state as the plain optimizer has it, with its master weight."""
        stepped = self._masters.get(parameter, parameter)
        state = dict(self._states.get(stepped, {}))
        if stepped is not parameter:
            state[MASTER] = stepped.detach()
        return state

    def begin_state(self, parameter: torch.Tensor) -> None:
        self._begin([{**self._groups()[self._work[parameter][0]], "params": [self._ready(parameter)]}])

    def put_state(self, parameter: torch.Tensor, state: State) -> None:
        """Put a state on the GPU. Without a master weight, one is made from the parameter."""
        group, dtype = self._work[parameter]
        settings = self._groups()[group]
        on_device = bool(settings.get("capturable") or settings.get("fused"))

        def put(key: Any, value: Any) -> Any:
            if key == MASTER or self._steps_alone:
                return device_copy(key, value, parameter, dtype, step_on_device=on_device)
            return with_tensors(value, lambda one: one.to(parameter.device))

        state = {key: put(key, value) for key, value in state.items()}
        master = state.pop(MASTER, None)
        self._states.pop(self._masters.pop(parameter, parameter), None)
        if master is None or dtype == local_of(parameter).dtype:
            self._ready(parameter)
        else:
            self._masters[parameter] = torch.nn.Parameter(master.to(dtype), requires_grad=False)
        if state:
            self._states[self._masters.get(parameter, parameter)] = state

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        for parameter, master in self._masters.items():
            master.copy_(parameter)

    def close(self) -> None:
        self._masters.clear()
        self._states.clear()

    def _settings(self, group: int) -> dict[str, Any]:
        return {**self._arguments.defaults, **self._groups()[group], **self._arguments.device_only}

    @torch.no_grad()
    def _ready(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor that is stepped, updated from the parameter."""
        dtype = self._work[parameter][1]
        if dtype == local_of(parameter).dtype:
            return parameter
        master = self._masters.get(parameter)
        if master is None:
            master = self._masters[parameter] = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        else:
            follow(local_of(master), local_of(parameter).detach())
        return master

    def _begin(self, groups: Sequence[dict[str, Any]]) -> None:
        """Let the class's constructor make what it makes for new parameters."""
        new = {one for group in groups for one in group["params"] if one not in self._states}
        self._states.update(self._optimizer.begin(groups, new))
