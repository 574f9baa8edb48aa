"""Moves of parameters' states: between CPU and GPU, between stores, and after their parameters to another device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from spillway.errors import UnsupportedError, UsageError
from spillway.optim.host_parameter import HostParameter
from spillway.optim.options import FractionTuner, ShareTuner, Tuner
from spillway.optim.placement import Placement
from spillway.optim.states import StateViews, as_distributed
from spillway.optim.stepping import StepQueue
from spillway.optim.tensors import local_of
from spillway.runtime.backend import on_error
from spillway.runtime.system import many_processes

if TYPE_CHECKING:
    from spillway.parameters.homes import StreamedParameter


class Moves:
    """Moves parameters' states between steps. A state that cannot be moved stays where it is."""

    def __init__(self, placement: Placement, steps: StepQueue, views: StateViews) -> None:
        self._placement = placement
        self._steps = steps
        self._views = views
        self._tuner: Tuner | None = None
        options = placement.options
        if options.fraction == "auto":
            self._tuner = FractionTuner(options.slowdown)
        elif options.measures_share and placement.cpu_share < 1:
            # There is a GPU.
            self._tuner = ShareTuner()

    def step_is_queued(self) -> None:
        """Let the CPU step more or fewer elements, if the measured steps say so."""
        tuner, placement = self._tuner, self._placement
        if tuner is None:
            return
        is_share = isinstance(tuner, ShareTuner)
        # Now, since the next backward may step. The GPU may not have waited for the last step yet.
        chosen = tuner.note(self._steps.older.times(), placement.cpu_share if is_share else placement.fraction())
        if tuner.is_done:
            self._tuner = None
        if chosen is None:
            return
        self._steps.finish()
        if is_share:
            for parameter in self.to_stores(chosen):
                self._views.show(parameter)
            self._steps.forget_costs()
        else:
            self.divide(chosen)

    def check_alone(self) -> None:
        """Raise in a process group, if a number is to be measured."""
        option, number = ("step_on", "cpu_share") if isinstance(self._tuner, ShareTuner) else ("fraction", "fraction")
        if self._tuner is not None and many_processes():
            raise UnsupportedError(
                f"{option}='auto' in a process group: ranks would choose different numbers. Give the same {number} on "
                f"every rank. A run of one process finds it: optimizer.{number}."
            )

    # Between CPU and GPU.

    def divide(self, fraction: float) -> None:
        placement = self._placement
        parameters = list(placement.parameters())
        on_cpu = placement.on_cpu(parameters, fraction)
        for (group, parameter), here in zip(parameters, on_cpu, strict=True):
            held = placement.held.get(parameter)
            if here and held is None:
                state = placement.device.state_of(parameter)
                placement.held[parameter] = placement.new_held(group, parameter, state)
                placement.device.discard(parameter)
                self._steps.watch(placement.held[parameter])
            elif held is not None and not here:
                self._to_device(held)
            else:
                continue
            self._views.show(parameter)

    def _to_device(self, held: HostParameter) -> None:
        (state,), parameter, device = held.store.load_all([held]), held.parameter, self._placement.device
        with on_error(device.discard, parameter):
            device.add(parameter, held.group, held.work_dtype)
            device.put_state(parameter, as_distributed(state, parameter))
            # It may find no memory for a gradient.
            self._steps.bring_back(held)
        del self._placement.held[parameter]
        self._placement.drop(held)

    # Between stores.

    def to_stores(self, cpu_share: float) -> Iterator[torch.Tensor]:
        """Let the CPU step another share of the elements. Gives each parameter when its state has moved."""
        placement = self._placement
        placement.cpu_share = cpu_share
        stores = placement.stores_by_parameter()
        for parameter, held in placement.held.items():
            before, after = held.store, stores[parameter]
            if before is not after:
                (state,) = before.load_all([held])
                with on_error(before.take_over, held), on_error(after.discard, held):
                    after.add(held)
                    after.put([(held, state)])
                before.discard(held)
                yield parameter

    # After parameters to another device.

    def check_streaming(self) -> None:
        placement = self._placement
        stays = any(parameter not in placement.held for _, parameter in placement.parameters())
        if placement.options.fraction == "auto" or placement.options.budget is not None or stays:
            raise UsageError(
                "got an optimizer with a fraction or a device_budget, some of whose state stays on the GPU, expected "
                "none of them with stream=. Leave both out."
            )
        if any(parameter.grad is not None for _, parameter in placement.parameters()):
            raise UsageError(
                "got parameters with gradients, expected none: they would have to move. Attach between zero_grad() and "
                "the next backward."
            )
        if many_processes():
            raise UnsupportedError(
                "stream= with an optimizer, in a process group: got several processes, expected one. Shard parameters "
                "by fully_shard() instead."
            )

    @contextlib.contextmanager
    def following(self) -> Iterator[dict[torch.Tensor, StreamedParameter | None]]:
        """Inside, parameters may move; afterwards their states follow. See :meth:`OffloadedOptimizer.moving`.

        Raises:
            TierFullError: there is no memory for the states. All is as it was, if parameters go back.
        """
        placement = self._placement
        self._steps.early.check_none("a move of parameters")
        self._steps.finish()
        self._steps.take_edits()
        with on_error(self._follow_homes):
            yield placement.streamed
        moved = [held for held in placement.held.values() if has_moved(held)]
        if moved:
            self._measure_on_device()
        with contextlib.ExitStack() as undo:
            made = []
            for held in moved:
                (state,) = held.store.load_all([held])
                made.append(placement.new_held(held.group, held.parameter, state))
                undo.callback(placement.drop, made[-1])
            undo.pop_all()
        for before, after in zip(moved, made, strict=True):
            gradient = before.gradient.restore() if before.gradient.is_current() else before.parameter.grad
            before.unhook()
            placement.drop(before)
            placement.held[after.parameter] = after
            after.parameter.grad = None
            self._steps.watch(after)
            self._steps.give(after, gradient)
            self._views.show(after.parameter)
        self._follow_homes()
        if moved:
            self._steps.forget_costs()

    def _follow_homes(self) -> None:
        """Parameters are streamed from other homes now, or from none."""
        for held in self._placement.held.values():
            self._steps.follow_home(held, self._placement.streamed.get(held.parameter))

    def _measure_on_device(self) -> None:
        """Parameters may be on a GPU now: measure the CPU's share, if that was not done."""
        placement = self._placement
        devices = {local_of(parameter).device for _, parameter in placement.parameters()}
        on_device = any(not placement.context_of(device).transfers.backend.direct_disk for device in devices)
        if placement.options.measures_share and placement.cpu_share == 1 and on_device:
            placement.cpu_share = placement.options.first_cpu_share
            self._tuner = ShareTuner()


def has_moved(held: HostParameter) -> bool:
    """Whether the parameter is on another device now."""
    return local_of(held.parameter).device != held.context.transfers.backend.device
