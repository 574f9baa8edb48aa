"""An optimizer whose state, fp32 master weights and step are on the CPU.

NOTE [ A step ]

A parameter is *held* if the CPU has its state. The user's own tensor stays on the GPU, in its own type. The CPU has a
**master** of it, in the type of the step, and the state. The GPU steps all other parameters as usual.

Backward: a gradient is accumulated, and its copy to the CPU is queued behind an event on the compute stream. ``p.grad``
becomes an :class:`~spillway.optim.gradient.OffloadedGradient`, a tensor whose bytes are on the CPU. Later gradients are
added there. Clipping and scaling are noted, and applied when the step reads the gradient.

``step()``: one *worker thread* takes the parameters in turn. It waits for the gradient of each, queues a copy of the
parameter to the CPU (NOTE [ A step reads the parameter ] in ``host_parameter.py``), and gives its pieces to *workers*,
a few more threads. For each piece a worker updates the master from the parameter, casts and multiplies the gradient in
scratch memory, lets the optimizer's own class step the master, and queues its copy to the GPU, which casts it to the
parameter's type. The compute stream waits for this before ``step()`` returns. After
:meth:`OffloadedOptimizer.overlap_forward` each block of the model waits for its own parameters when it is next called.
With ``step_in_backward`` a step begins when its gradient has arrived (``stepping.py``).

NOTE [ Threads ]

The caller's threads (the one that calls ``step``, and those of backward) decide and queue. Only the worker thread
touches masters, sums and states, in the order in which tasks were queued. So do its workers: each has pieces of its
own, and the next step of a piece waits for them. So what the caller's side notes (``Gradient.raw``, ``summed``,
``factors``) is what will be when all queued tasks are done. A block of pinned memory carries the events after which its
next owner may write it.

NOTE [ Pieces ]

Fused CPU kernels work in units of a cache line, and threads divide a tensor at such borders. So a tensor that is cut at
cache lines steps to the same bits as the whole, which tests/optim/test_pieces.py shows for each of them. Large
parameters are therefore cut: scratch memory stays in the caches, and copies begin early. No other implementation
promises that, since tails are vectorised differently, and none is cut. Small parameters share a call and a copy; each
is still stepped by itself.
"""
