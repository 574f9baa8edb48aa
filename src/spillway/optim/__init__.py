"""An optimizer whose state, fp32 master weights and step are on the CPU.

NOTE [ A step ]

A parameter is *held* if the CPU has its state. The user's own tensor stays on the GPU, in its own type. The CPU has its
state and its **fp32 master weight**: a copy in the type of the step. The GPU steps all other parameters as usual.

Backward: a gradient is accumulated, and its copy to the CPU is queued behind an event on the compute stream. ``p.grad``
becomes a tensor whose bytes are on the CPU (``offloaded_gradient.py``), and later gradients are added there.

``step()``: one *worker thread* takes *chunks* of parameters in turn (NOTE [ The state store ] in ``state_store.py``).
It queues copies of the next parameters to the CPU (NOTE [ A step reads the parameter ] in ``host_parameter.py``), and
waits for the gradients of the chunk. It gives the chunk to *workers*, a few more threads, which do this for each
parameter:

1. Update the master weight from the parameter.
2. Cast and multiply the gradient in scratch memory.
3. Let the optimizer's own class step the master weight.
4. Queue the copy of the master weight to the GPU, which casts it to the parameter's type.

The compute stream waits for these copies before ``step()`` returns. After :meth:`OffloadedOptimizer.overlap_forward`
each block of the model waits for its own parameters when it is next called. With ``step_in_backward`` a step begins
when its gradient has arrived (``stepping.py``).

NOTE [ Threads ]

The caller's threads (the one that calls ``step``, and those of backward) decide and queue. Only the worker thread
touches master weights, sums and states, in the order in which tasks were queued. So do its workers: each has chunks of
its own, and the next step of a chunk waits for them. So the notes of the caller's side (``Gradient.raw``, ``summed``,
``factors``) describe the state after all queued tasks. With ``step_on="auto"`` a second thread queues steps on the GPU
(NOTE [ Steps on both ] in ``placement.py``). A block of pinned memory carries the events after which its next
owner may write it.

NOTE [ Pieces ]

Fused CPU kernels work in units of a cache line, and threads divide a tensor at such borders. So a tensor that is cut at
cache lines steps to the same bits as the whole, which tests/optim/test_pieces.py shows for each of them. Large
parameters are therefore cut: scratch memory stays in the caches, and copies begin early. No other implementation
promises that, since tails are vectorised differently, so parameters of other classes stay whole. Small parameters share
a call and a copy; each is still stepped by itself.
"""
