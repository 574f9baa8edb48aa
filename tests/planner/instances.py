"""Problems to solve: random small ones, and large ones like a model's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from spillway.planner.tasks import Option, Part, Phase, Problem, Rates, Sent, Streamed, Task, Turn
from spillway.types import Decision

MIB = 2**20
KEEP, SEND, DISK, AGAIN = Decision.KEEP, Decision.OFFLOAD_HOST, Decision.OFFLOAD_DISK, Decision.RECOMPUTE


def option(
    sizes: Sequence[int],
    decisions: Sequence[Decision],
    forward: Sequence[float],
    backward: Sequence[float],
    gradient: int,
    scratch: int = 0,
) -> Option:
    """A block with a value for each operator: kept, sent after its operator, or computed again before backward.

    Backward wants the values from the last to the first and frees each after its operator; the gradient of the
    parameters grows in equal parts.
    """
    tasks: list[Task] = []
    for place, (nbytes, decision, seconds) in enumerate(zip(sizes, decisions, forward, strict=True)):
        on_disk = decision is DISK
        sends = (Sent(place, nbytes, on_disk),) if decision in (SEND, DISK) else ()
        change = 0 if decision is AGAIN else nbytes
        tasks.append(Task(f"forward {place}", Phase.FORWARD, seconds, nbytes + scratch, change, sends))
    back: list[Task] = []
    for place, decision in enumerate(decisions):
        if decision is AGAIN:
            needs = (place - 1,) if place and decisions[place - 1] in (SEND, DISK) else ()
            nbytes = sizes[place]
            back.append(Task(f"again {place}", Phase.RECOMPUTE, forward[place], nbytes + scratch, nbytes, takes=needs))
    each = gradient // len(sizes)
    for place in reversed(range(len(sizes))):
        nbytes, sent = sizes[place], decisions[place] in (SEND, DISK)
        back.append(
            Task(
                f"backward {place}",
                Phase.BACKWARD,
                backward[place],
                each + nbytes + scratch,
                each - (0 if sent else nbytes),
                takes=(place,) if sent else (),
                drops=(place,) if sent else (),
            )
        )
    # As if the first were its input, and the last its output.
    kept = [nbytes if decision is KEEP else 0 for nbytes, decision in zip(sizes, decisions, strict=True)]
    return Option(tuple(decisions), tuple(tasks), tuple(back), output_bytes=kept[-1], input_bytes=kept[0])


def choices(problem: Problem) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(len(each)) for each in problem.options))


def random_problem(seed: int, *, most: int = 1500) -> Problem:
    """Up to 10 blocks with up to 3 options, ``most`` choices; budgets are to be set."""
    random_ = random.Random(seed)
    while True:
        blocks = random_.randint(1, 10)
        signatures = []
        for _ in range(random_.randint(1, 3)):
            values = random_.randint(1, 4)
            sizes = [random_.choice([1, 2, 3, 5, 8, 13]) * MIB for _ in range(values)]
            forward = [random_.choice([0.5, 1.0, 1.5, 2.0]) * 1e-3 for _ in range(values)]
            backward = [2 * seconds for seconds in forward]
            kinds = [KEEP, SEND, AGAIN] + ([DISK] if random_.random() < 0.3 else [])
            ways = {tuple(random_.choice(kinds) for _ in range(values)) for _ in range(random_.randint(1, 3))}
            gradient = random_.choice([0, 1, 4, 12]) * MIB
            scratch = random_.choice([0, 2]) * MIB
            signatures.append(
                tuple(option(sizes, way, forward, backward, gradient, scratch) for way in sorted(ways, key=str))
            )
        options = tuple(random_.choice(signatures) for _ in range(blocks))
        count = 1
        for each in options:
            count *= len(each)
        if count <= most:
            break
    rates = Rates(
        out=random_.choice([1e9, 3e9, 10e9]),
        back=random_.choice([1e9, 3e9, 10e9]),
        disk_write=1e9,
        disk_read=2e9,
        window=random_.choice([2, 8, 20, 60]) * MIB,
    )
    head = random_.choice([0, 4, 30]) * MIB
    return Problem(
        static_bytes=random_.randint(0, 50) * MIB,
        parts=(
            Part(
                blocks,
                before=(Task("embedding", Phase.OUTSIDE, 1e-4, 2 * MIB, MIB),),
                middle=(Task("head", Phase.OUTSIDE, 2e-3, head, head // 4),),
                after=(Task("embedding's backward", Phase.OUTSIDE, 1e-4, 3 * MIB, MIB),),
            ),
        ),
        names=tuple(f"layer{number}" for number in range(blocks)),
        options=options,
        rates=rates,
        budget=0,
        extra_bytes=tuple(random_.choice([-8, -1, 0, 0, 6]) * MIB for _ in options),
        streamed=(Streamed(),) * blocks,
    )


def casting(problem: Problem, seed: int) -> Problem:
    """The problem with blocks that leave something behind, which some options hold to the end of the forward only."""
    random_ = random.Random(seed)

    def with_casts(option: Option, nbytes: int) -> Option:
        *before, last = option.forward
        *between, end = option.backward
        is_kept = not any(task.phase is Phase.RECOMPUTE for task in option.backward)
        return replace(
            option,
            forward=(
                *before,
                replace(last, peak_bytes=last.peak_bytes + nbytes, change_bytes=last.change_bytes + nbytes),
            ),
            backward=(*between, replace(end, change_bytes=end.change_bytes - nbytes * is_kept)),
            let_go_bytes=0 if is_kept else nbytes,
        )

    known = {}
    for each in problem.options:
        if id(each) not in known:
            nbytes = random_.choice([0, 1, 3, 9]) * MIB
            known[id(each)] = tuple(with_casts(option, nbytes) for option in each)
    loss = random_.choice([0, 4, 30]) * MIB
    return replace(
        problem,
        parts=tuple(replace(part, late=(Task("loss", Phase.OUTSIDE, 0.0, loss, loss // 8),)) for part in problem.parts),
        options=tuple(known[id(each)] for each in problem.options),
    )


def streaming(problem: Problem, seed: int) -> Problem:
    """The problem with parameters that autograd saves. In some blocks they are streamed."""
    random_ = random.Random(seed)

    def with_parameters(option: Option, sizes: tuple[int, ...]) -> Option:
        if any(task.phase is Phase.RECOMPUTE for task in option.backward):
            return option
        keys = tuple(range(len(option.decisions), len(option.decisions) + len(sizes)))
        first, *others = option.backward
        first = replace(first, takes=(*first.takes, *keys[:1]), drops=(*first.drops, *keys[:1]))
        last = others.pop() if others else first
        last = replace(last, takes=(*last.takes, *keys[1:]), drops=(*last.drops, *keys[1:]))
        backward = (first, *others, last) if len(option.backward) > 1 else (last,)
        return replace(option, backward=backward, parameters=sizes)

    known, sizes = {}, {}
    for each in problem.options:
        if id(each) not in known:
            sizes[id(each)] = tuple(random_.choice([1, 2, 5]) * MIB for _ in range(random_.randint(1, 3)))
            known[id(each)] = tuple(with_parameters(option, sizes[id(each)]) for option in each)
    return replace(
        problem,
        options=tuple(known[id(each)] for each in problem.options),
        # Some are not saved.
        streamed=tuple(
            Streamed(
                random_.choice([(), sizes[id(each)][:1], (*sizes[id(each)], MIB // 2)]),
                random_.choice([0.0, 1e-3, 1e-2]),
            )
            for each in problem.options
        ),
    )


def hosted(problem: Problem, seed: int) -> Problem:
    """The problem with a host that takes time, for one option much, for another one nothing."""
    random_ = random.Random(seed)
    pace = random_.choice([0.4, 1.0, 1.6])

    def queued(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
        return tuple(
            replace(task, host_seconds=random_.choice([0.0, 1.0, 2.0]) * pace * task.seconds) for task in tasks
        )

    # Blocks of one signature go on to share their options.
    known = {
        id(each): tuple(
            replace(option, forward=queued(option.forward), backward=queued(option.backward)) for option in each
        )
        for each in problem.options
    }
    return replace(
        problem,
        parts=tuple(
            Part(part.blocks, *map(queued, (part.before, part.middle, part.after)), part.late) for part in problem.parts
        ),
        options=tuple(known[id(each)] for each in problem.options),
    )


def in_turns(problem: Problem, seed: int) -> Problem:
    """The problem's blocks in one part or two, each called up to three times, in any order of turns."""
    random_ = random.Random(seed)
    blocks = len(problem.options)
    first = random_.randint(1, blocks)
    (around,) = problem.parts
    sizes = [first, blocks - first] if blocks > first else [blocks]
    # What is held outside of blocks from a forward to its backward; gradients outside, of which some are in the middle.
    held, gradient = random_.choice([0, 1, 5]) * MIB, random_.choice([0, 2]) * MIB
    parts = [
        Part(
            size,
            tuple(replace(task, change_bytes=task.change_bytes + held) for task in around.before),
            tuple(replace(task, change_bytes=task.change_bytes - held) for task in around.middle),
            tuple(
                replace(task, change_bytes=gradient - task.change_bytes, gradient_bytes=gradient)
                for task in around.after
            ),
            around.late,
        )
        for size in sizes
    ]
    ahead = [(part, chunk) for part in range(len(parts)) for chunk in range(random_.randint(1, 3))]
    waiting: list[tuple[int, int]] = []
    turns = []
    while ahead or waiting:
        is_backward = bool(waiting) and (not ahead or random_.random() < 0.5)
        these = waiting if is_backward else ahead
        part, chunk = these.pop(random_.randrange(len(these)))
        turns.append(Turn(part, chunk, is_backward))
        if not is_backward:
            waiting.append((part, chunk))
    return replace(problem, parts=tuple(parts), turns=tuple(turns))


# An 8B layer of 2048 tokens or so: what its operators save, and how long they take.
LAYER_SIZES = [mib * MIB for mib in (64, 64, 32, 16, 16, 64, 64, 224, 224, 224)]
LAYER_FORWARD = [1e-3 * ms for ms in (0.1, 1.0, 0.4, 0.2, 0.2, 0.6, 0.1, 1.4, 1.4, 0.6)]
LAYER_BACKWARD = [2.17 * seconds for seconds in LAYER_FORWARD]


def layer_options(count: int) -> tuple[Option, ...]:
    """From keep-all over some that send or compute again to send-all and recompute-all."""
    values = len(LAYER_SIZES)
    ways: list[list[Decision]] = [[KEEP] * values, [SEND] * values, [AGAIN] * values]
    groups = [(9,), (7, 8), (7, 8, 9), (5, 6), (1, 2), (0, 1, 2, 3, 4), (0, 5)]
    for sent, again in itertools.product([(), *groups], repeat=2):
        if (sent or again) and not set(sent) & set(again):
            ways.append([SEND if at in sent else AGAIN if at in again else KEEP for at in range(values)])
    made = random.Random(7).sample(ways[3:], min(count, len(ways)) - 3)
    return tuple(
        option(LAYER_SIZES, way, LAYER_FORWARD, LAYER_BACKWARD, 416 * MIB, 64 * MIB) for way in ways[:3] + made
    )


def large_problem(blocks: int, options: int, budget: int, *, rate: float = 50e9, host: int | None = None) -> Problem:
    """Blocks like those of an 8B model, all of one signature."""
    shared = layer_options(options)
    head = 1000 * MIB
    return Problem(
        static_bytes=16_000 * MIB,
        parts=(
            Part(
                blocks,
                before=(Task("embedding", Phase.OUTSIDE, 1e-3, 128 * MIB, 64 * MIB),),
                middle=(Task("head", Phase.OUTSIDE, 20e-3, 2 * head, head // 2),),
                after=(Task("embedding's backward", Phase.OUTSIDE, 1e-3, 1000 * MIB, 500 * MIB),),
            ),
        ),
        names=tuple(f"layer{number}" for number in range(blocks)),
        options=(shared,) * blocks,
        rates=Rates(rate, rate, 3e9, 5e9, 512 * MIB),
        budget=budget,
        extra_bytes=(0,) * blocks,
        streamed=(Streamed(),) * blocks,
        host_budget=host,
    )
