"""Checks of communication plans: messages match, all ranks finish, and no data is overwritten.

Also functions that count the elements and messages of a plan.
"""

from collections import defaultdict


def messages(plans, kinds):
    """Return the (step, span) of each message in order, by (source, destination)."""
    found = defaultdict(list)
    for rank, plan in enumerate(plans):
        for number, step in enumerate(plan):
            for kind in kinds:
                for move in getattr(step, kind):
                    ends = (rank, move.peer) if kind == "sends" else (move.peer, rank)
                    found[ends].append((number, move.span))
    return found


def assert_they_end(plans):
    """Assert that the plans do not deadlock.

    A rank starts a step after its previous step; a step ends once all its peers have started
    theirs.
    """
    sent, received = messages(plans, ("sends",)), messages(plans, ("adds", "takes"))
    partners = defaultdict(list)  # (rank, step) -> (other rank, its step)
    for (source, destination), out in sent.items():
        for (number, _), (other, _) in zip(out, received[source, destination], strict=True):
            partners[source, number].append((destination, other))
            partners[destination, other].append((source, number))
    at = [0] * len(plans)
    while any(step < len(plan) for step, plan in zip(at, plans, strict=True)):
        ready = [
            rank
            for rank, step in enumerate(at)
            if step < len(plans[rank]) and all(at[r] >= n for r, n in partners[rank, step])
        ]
        assert ready, f"every rank waits: {at}"
        for rank in ready:
            at[rank] += 1


def overlap(one, other):
    return max(one.start, other.start) < min(one.stop, other.stop)


def assert_they_fit(plans, name):
    """Assert that sends match receives, ranks do not deadlock, and steps overwrite no own data."""
    sent, received = messages(plans, ("sends",)), messages(plans, ("adds", "takes"))
    assert sent.keys() == received.keys(), name
    for ends, out in sent.items():
        assert [s for _, s in out] == [s for _, s in received[ends]], (name, ends)
    assert all(a != b and max(a, b) < len(plans) for a, b in sent), name
    assert_they_end(plans)
    for step in (step for plan in plans for step in plan):
        for take in step.takes:
            others = [*step.sends, *step.adds, *(t for t in step.takes if t is not take)]
            assert not any(overlap(take.span, other.span) for other in others), name
        spans = sorted({move.span for move in step.adds})
        assert not any(map(overlap, spans, spans[1:])), name


def num_sent(plan):
    """Return the number of elements that a rank sends."""
    return sum(move.span.length for step in plan for move in step.sends)


def num_messages(plan):
    """Return the number of messages that a rank sends."""
    return sum(len(step.sends) for step in plan)
