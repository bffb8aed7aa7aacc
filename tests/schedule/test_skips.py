"""Long skips: the oracle is a machine that carries named values from rank to rank."""

from collections import Counter
from dataclasses import replace

import pytest

from gpipe_hpc.schedule import (
    Action,
    Op,
    Placement,
    Schedule,
    ScheduleError,
    build,
    check,
    digest,
    forward_only,
    from_text,
    lower,
    parse_action,
    to_text,
)


def skip_sets(placement):
    """One long skip, all into or out of an end, nested pairs, and some within a rank."""
    last = placement.num_stages - 1
    route = placement.routes[0]
    pairs = [(s, d) for s in range(last + 1) for d in range(s + 2, last + 1)]
    return {
        "one": ((0, last),),
        "fan": tuple((0, d) for d in range(2, last + 1)),
        "nested": tuple((s, last - s) for s in range(last + 1) if s + 2 <= last - s),
        "within a rank": tuple((s, d) for s, d in pairs if route[s] == route[d]),
        "all": tuple(pairs),
    }


class Machine:
    """Ranks that run a lowered table; every value has a name and is used up by whom it is for."""

    def __init__(self, schedule, blocking):
        self.schedule, self.blocking = schedule, blocking
        self.held = [Counter() for _ in schedule.ranks]
        self.posted = [Counter() for _ in schedule.ranks]
        self.sent = Counter()

    def run(self):
        """Return what went from rank to rank, and how often."""
        rows = [list(row) for row in self.schedule.ranks]
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while row and self.step(rank, row[0]):
                    row.pop(0)
                    moved = True
        assert not any(rows), rows
        assert not any(+held for held in (*self.held, *self.posted))
        return self.sent

    def step(self, rank, action):
        op, stage, microbatch, peer = action
        last = self.schedule.num_stages - 1
        skips = self.schedule.skips
        into = [stage - 1] * (stage > 0) + [s for s, d in skips if d == stage]
        out_of = [stage + 1] * (stage < last) + [d for s, d in skips if s == stage]
        if op in (Op.SEND_F, Op.SEND_B):
            to = peer if peer is not None else stage + (1 if op is Op.SEND_F else -1)
            return self.send(rank, (op[-1], stage, to, microbatch))
        if op in (Op.RECV_F, Op.RECV_B):
            source = peer if peer is not None else stage + (1 if op is Op.RECV_B else -1)
            self.posted[rank][op[-1], source, stage, microbatch] += 1
            return True
        if op is Op.F:
            return self.compute(rank, "F", stage, microbatch, into, out_of)
        if op in (Op.B, Op.I):
            return self.compute(rank, "B", stage, microbatch, out_of, into)
        return True

    def send(self, rank, value):
        _, _, to, microbatch = value
        receiver = self.schedule.placement.rank_of(to, microbatch)
        if self.blocking and not self.posted[receiver][value]:
            return False
        assert self.held[rank][value] == 1, f"rank {rank} has no {value} to send"
        assert receiver != rank
        del self.held[rank][value]
        self.held[receiver]["came", value] += 1
        self.sent[(rank, receiver, *value)] += 1
        return True

    def compute(self, rank, direction, stage, microbatch, sources, users):
        place = self.schedule.placement
        needs = []
        for source in sources:
            value = (direction, source, stage, microbatch)
            own = place.rank_of(source, microbatch) == rank
            needs.append(value if own else ("came", value))
            assert own or self.posted[rank][value] == 1, f"{value} is not posted"
        if not all(self.held[rank][need] == 1 for need in needs):
            return False
        for need in needs:
            del self.held[rank][need]
            if need[0] == "came":
                del self.posted[rank][need[1]]
        self.held[rank].update((direction, stage, user, microbatch) for user in users)
        return True


def expected_traffic(schedule, directions):
    """Each value straight from its rank to its user's, once; nothing within a rank."""
    place, pairs = schedule.placement, list(schedule.skips)
    pairs += [(stage, stage + 1) for stage in range(schedule.num_stages - 1)]
    found = Counter()
    for microbatch in range(schedule.num_microbatches):
        for pair in pairs:
            for direction in directions:
                source, to = pair if direction == "F" else pair[::-1]
                ranks = place.rank_of(source, microbatch), place.rank_of(to, microbatch)
                if ranks[0] != ranks[1]:
                    found[(*ranks, direction, source, to, microbatch)] += 1
    return found


def with_skips(name, options, ranks, microbatches, which, recompute="never"):
    bare = build(name, ranks=ranks, microbatches=microbatches, recompute=recompute, **options)
    return replace(bare, skips=skip_sets(bare.placement)[which])


@pytest.mark.parametrize("which", ["one", "fan", "nested", "within a rank", "all"])
def test_each_skip_goes_once_and_straight_in_every_schedule(variant, which):
    name, options = variant
    ran = 0
    for microbatches, recompute in ((1, "always"), (4, "except_last"), (8, "never")):
        if microbatches < options.get("replications", 0) * 2:
            continue
        bare = with_skips(name, options, 4, microbatches, which, recompute)
        check(bare)
        lowered = lower(bare)
        check(lowered)
        assert lowered.skips == bare.skips
        compute = "FBIWR"
        assert [[a for a in row if a.op in compute] for row in lowered.ranks] == [
            list(row) for row in bare.ranks
        ]
        for blocking in (False, True):
            assert Machine(lowered, blocking).run() == expected_traffic(lowered, "FB")
        evaluation = lower(forward_only(bare))
        check(evaluation)
        assert Machine(evaluation, True).run() == expected_traffic(evaluation, "F")
        read = from_text(to_text(lowered))
        assert (read.ranks, read.skips) == (lowered.ranks, lowered.skips)
        check(read)
        ran += 1
    assert ran >= 2


def test_a_table_of_three_ranks_in_full():
    bare = replace(build("gpipe", ranks=3, microbatches=1), skips=((0, 2),))
    assert to_text(lower(bare)) == (
        "0RECV_B0,0RECV_B0@2,0F0,0SEND_F0,0SEND_F0@2,0B0,0REDUCE_GRAD\n"
        "1RECV_F0,1RECV_B0,1F0,1SEND_F0,1B0,1SEND_B0,1REDUCE_GRAD\n"
        "2RECV_F0@0,2RECV_F0,2F0,2B0,2SEND_B0,2SEND_B0@0,2REDUCE_GRAD\n"
        "skips,0>2\n"
    )


@pytest.mark.parametrize("skips", [((0, 1),), ((2, 0),), ((0, 4),), ((-1, 2),), ((1, 1),)])
def test_skips_that_cannot_be_are_refused(skips):
    bare = build("gpipe", ranks=4, microbatches=1)
    with pytest.raises(
        ScheduleError, match=r"invalid skip \(.*stages of 0 to 3 that are at least two apart"
    ):
        replace(bare, skips=skips)


@pytest.mark.parametrize("skips", [((1, 3), (0, 2)), ((0, 2), (0, 2))])
def test_skips_are_in_order_and_named_once(skips):
    with pytest.raises(ScheduleError, match=r"skips must be sorted and unique"):
        replace(build("gpipe", ranks=4, microbatches=1), skips=skips)


def test_the_digest_sees_skips():
    bare = build("gpipe", ranks=4, microbatches=2)
    skipping = [replace(bare, skips=skips) for skips in ((), ((0, 2),), ((0, 3),))]
    assert len(set(map(digest, skipping))) == 3
    assert digest(skipping[0]) == digest(bare)


TABLES = [
    lower(with_skips("one_f_one_b", {}, 4, 3, "all")),
    lower(with_skips("interleaved", {}, 2, 2, "nested")),
    lower(with_skips("chimera", {}, 4, 4, "fan")),
    lower(with_skips("zb_v", {}, 2, 2, "all")),
]


def mutants(schedule):
    """Yield what goes wrong with one action over a skip, and the table with it."""

    def edited(rank, row):
        return replace(
            schedule, ranks=(*schedule.ranks[:rank], tuple(row), *schedule.ranks[rank + 1 :])
        )

    for rank, row in enumerate(schedule.ranks):
        over = [at for at, action in enumerate(row) if action.peer is not None]
        last_of = {}
        for at in over:
            action = row[at]
            yield f"{action} dropped", edited(rank, (*row[:at], *row[at + 1 :]))
            yield f"{action} twice", edited(rank, (*row[:at], action, *row[at:]))
            for peer in {*range(-1, schedule.num_stages + 1), None} - {action.peer}:
                wrong = action._replace(peer=peer)
                yield f"{action} as {wrong}", edited(rank, (*row[:at], wrong, *row[at + 1 :]))
            before = last_of.get((action.op, action.stage, action.peer))
            if before is not None and same_route(schedule, row[before], action):
                swapped = list(row)
                swapped[before], swapped[at] = action, row[before]
                yield f"{row[before]} and {action} swapped", edited(rank, swapped)
            last_of[action.op, action.stage, action.peer] = at


def same_route(schedule, one, other):
    routes = schedule.placement.route_of
    return routes[one.microbatch] == routes[other.microbatch]


@pytest.mark.parametrize("schedule", TABLES, ids=lambda schedule: schedule.name)
def test_no_wrong_transfer_passes(schedule):
    check(schedule)
    kinds = Counter()
    for what, mutant in mutants(schedule):
        kinds[what.split()[-1] if "as" not in what.split() else "peer"] += 1
        with pytest.raises(ScheduleError, match="rank"):
            check(mutant)
            pytest.fail(what)
    assert all(kinds[kind] >= 8 for kind in ("dropped", "twice", "peer"))
    assert kinds["swapped"] > 0


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (0, "0SEND_F0@2", "0SEND_F0@3", r"uses the skip 0 to 3, but the table declares 0 to 2"),
        (0, "0SEND_F0@2", "", r"2RECV_F0@0: waits for 0SEND_F0@2, which is missing"),
        (2, "2RECV_F0@0", "", r"2F0: waits for 2RECV_F0@0, which is missing"),
        (2, "2SEND_B0@0", "2SEND_B0@1", r"the skip 1 to 2, but the table declares 0 to 2"),
        (0, "0SEND_F0@2", "0SEND_F0@2 0SEND_F0@2", r"0SEND_F0@2 occurs twice"),
    ],
)
def test_refusals_name_the_skip(rank, old, new, message):
    schedule = lower(replace(build("gpipe", ranks=3, microbatches=1), skips=((0, 2),)))
    text = " ".join(map(str, schedule.ranks[rank]))
    assert text.count(old) == 1
    rows = list(schedule.ranks)
    rows[rank] = tuple(map(parse_action, text.replace(old, new).split()))
    with pytest.raises(ScheduleError, match=message):
        check(replace(schedule, ranks=tuple(rows)))


def test_compute_has_no_peer():
    bare = build("gpipe", ranks=3, microbatches=1)
    row = (Action(Op.F, 0, 0, 2), *bare.ranks[0][1:])
    with pytest.raises(ScheduleError, match="only SEND and RECV take a peer, got 2"):
        check(replace(bare, ranks=(row, *bare.ranks[1:]), skips=((0, 2),)))
    with pytest.raises(ScheduleError, match="only SEND and RECV take a peer such as @2"):
        parse_action("0F0@2")


def test_a_skip_of_a_mirrored_placement_crosses_ranks_on_one_route_only():
    placement = Placement(((0, 1, 0), (1, 0, 2)), (0, 1))
    rows = [[], [], []]
    for op, stages in ((Op.F, (0, 1, 2)), (Op.B, (2, 1, 0))):
        for microbatch in (0, 1):
            for stage in stages:
                row = rows[placement.rank_of(stage, microbatch)]
                row.append(Action(op, stage, microbatch))
    bare = Schedule("two ways", placement, tuple(map(tuple, rows)), skips=((0, 2),))
    lowered = lower(bare)
    check(lowered)
    over = [str(a) for row in lowered.ranks for a in row if a.peer is not None]
    assert sorted(over) == ["0RECV_B1@2", "0SEND_F1@2", "2RECV_F1@0", "2SEND_B1@0"]
