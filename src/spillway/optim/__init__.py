"""An optimizer whose state, masters and step are on the host.

NOTE [ Where a step happens ]

A parameter is *held* when its state is on the host: the user's own tensor stays on the device, in its own type, and the
host has a **master** of it, in the master's type, and the state beside that. What is not held steps on the device, as
always.

Backward: a gradient is accumulated -> its bytes go out behind an event on the compute stream of the moment ->
``p.grad`` becomes an :class:`~spillway.optim.away.AwayGradient`, a tensor whose bytes are on the host. What comes to it
later is added there. Clipping and scaling are noted, and done when the step reads the gradient.

``step()``: the *host lane*, one thread, takes the parameters in turn, waits for the gradient of each, queues a copy of
the parameter to the host (see NOTE [ The parameter is the truth ] in ``masters.py``), and gives its pieces to *hands*,
a few threads. Of each piece: let the master follow the parameter, cast the gradient into scratch and multiply it there,
let the optimizer's own class step the piece of the master, which is pinned, queue its way to the device, where it
becomes the parameter's type. Meanwhile other parameters come and go. The compute stream waits for them before
``step()`` returns, or, where a model was given to :meth:`OffloadedOptimizer.overlap_forward`, each block for its own
when it is next called. With ``step_in_backward`` the same begins when a gradient has come (``early.py``).

NOTE [ Who may touch what ]

The caller's threads (the one that calls ``step`` and those of backward) decide and queue; what is on the host, masters,
sums, states, is touched by the host lane alone, in the order in which it was queued, and by hands, of which each has
pieces of its own and whose ends the next step of them waits for. So whatever the caller's side
notes (``Gradient.raw``, ``summed``, ``factors``) says what will be when all that was queued is done. Blocks of pinned
memory travel with the event after which they may be read.

NOTE [ Pieces ]

The fused kernels of the host work through a tensor in units of a cache line, and let threads share them out at such
borders: a tensor that is cut at cache lines steps to the same bits as the whole, which tests/optim/test_pieces.py
holds for every one of them. So large parameters are cut, for scratch that stays in the caches and transfers that begin
early. No other implementation promises that (tails are vectorised differently), and none is cut. Small parameters share
a call and a transfer; each is stepped by itself all the same.
"""
