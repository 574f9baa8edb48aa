"""Megatron-Core's names: fine-grained activation offloading, groups of saved tensors in chunks; and its optimizer.

A chunk (one micro-batch's forward through one virtual stage) is a :class:`~spillway.chunks.Chunk` of the engine, and a
group is one of its groups. Start and commit are no nodes of the graph: what comes back is fetched in the order that the
engine learns from use. ``docs/compat/megatron.md`` says what becomes of each name, and what differs.
"""

from __future__ import annotations

import sys

from spillway.compat.megatron.chunk import ChunkOffloadHandler, OffloadTensorGroup
from spillway.compat.megatron.graphs import (
    fine_grained_offloading_backward_record,
    fine_grained_offloading_forward_record,
)
from spillway.compat.megatron.interface import (
    FineGrainedActivationOffloadingInterface,
    fine_grained_offloading_disable_offload,
    fine_grained_offloading_enable_offload,
    fine_grained_offloading_group_commit,
    fine_grained_offloading_group_flush_delayed_groups,
    fine_grained_offloading_group_offload,
    fine_grained_offloading_group_start,
)
from spillway.compat.megatron.manager import PipelineOffloadManager
from spillway.compat.megatron.optimizer import HybridDeviceOptimizer
from spillway.compat.megatron.pool import GPUTensorPool, OffloadTensorPool
from spillway.compat.megatron.table import print_offload_summary_table, rank

__all__ = [
    "DEBUG",
    "DEBUG_RANK",
    "ChunkOffloadHandler",
    "FineGrainedActivationOffloadingInterface",
    "GPUTensorPool",
    "HybridDeviceOptimizer",
    "OffloadTensorGroup",
    "OffloadTensorPool",
    "PipelineOffloadManager",
    "debug_rank",
    "fine_grained_offloading_backward_record",
    "fine_grained_offloading_disable_offload",
    "fine_grained_offloading_enable_offload",
    "fine_grained_offloading_forward_record",
    "fine_grained_offloading_group_commit",
    "fine_grained_offloading_group_flush_delayed_groups",
    "fine_grained_offloading_group_offload",
    "fine_grained_offloading_group_start",
    "print_offload_summary_table",
]

DEBUG = False
"""Whether :func:`debug_rank` prints."""
DEBUG_RANK = 0
"""The rank that it prints on."""


def debug_rank(message: str) -> None:
    """Print a message on rank ``DEBUG_RANK``, while ``DEBUG``. Without a process group the rank is 0.

    Example:
        >>> debug_rank("a micro-batch begins")
    """
    if DEBUG and rank() == DEBUG_RANK:
        sys.stdout.write(f"{message}\n")
