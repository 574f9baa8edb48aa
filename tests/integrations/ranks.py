"""Two processes that stay, for tests of what several ranks do: started once for a module's tests.

A *case* is a function at the top of a test module, with arguments that can be pickled; each rank calls it.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import spillway

RANKS = 2
_SECONDS = 120


class World:
    """Ranks that wait for cases. After a case that failed in one of them they are started anew.

    Args:
        folder: for the store by which they find each other.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starts = 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        """What the case gives back in each rank.

        Raises:
            AssertionError: with the traceback of the first rank in which it failed.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((case, args))
        answers: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_SECONDS):
                answers.append((f"rank {rank}: no answer in {_SECONDS} s", None))
                break
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append((f"rank {rank}: died", None))
        failed = [error for error, _ in answers if error is not None]
        if failed:
            self._stop()
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
        self._stop()

    def _start(self) -> None:
        self._starts += 1
        store = str(self._folder / f"store-{self._starts}")
        # Forks of a process that has imported all that takes long, and has no threads.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch._dynamo.decorators", "torch.distributed.fsdp", "spillway.attaching.budget"]
        )
        source = str(Path(spillway.__file__).parents[1])
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, store), daemon=True)
            # The server that forks knows no sys.path of this process: it would import an installed package.
            with mock.patch.dict(os.environ, PYTHONPATH=source):
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


def _serve(pipe: Connection, rank: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=_SECONDS // 2)
    )
    while (message := pipe.recv()) is not None:
        case, args = message
        # Cases collect garbage, and need not go through torch and all that ran before each time for it.
        gc.collect()
        gc.freeze()
        try:
            torch.manual_seed(0)
            answer = None, case(*args)
        except BaseException:  # noqa: BLE001  (told to the test)
            answer = f"rank {rank}: {traceback.format_exc()}", None
        pipe.send(answer)
    spillway.Session.default().close()
    # A rank that leaves while the other still talks to it ends that one, too.
    dist.barrier()
    dist.destroy_process_group()
