"""The experiment over a slow link: its rows, its table, and a short form of it for real."""

import json

import pytest

from experiments.outer.slow_link.__main__ import measured, parsed, write
from experiments.outer.slow_link.report import seconds_to, table
from experiments.outer.slow_link.rows import BASE, COMMON, LAYOUTS, METHODS, ROWS
from experiments.outer.slow_link.running import RowResult
from gpipe_hpc.config import check_config, compose_config
from tests.support import patience


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_each_row_is_a_run_that_may_begin(row):
    config = compose_config([*COMMON, *row.overrides, f"train.validate_every={row.validate_every}"])
    ranks = sorted(rank for own in row.places for rank in own)
    check_config(config, len(ranks))
    assert ranks == list(range(len(ranks)))


def test_rows_have_names_of_their_own():
    assert len(ROWS) == len(METHODS) + len(LAYOUTS) and BASE in ROWS


def found(name, validation, *, steps=100, seconds=50.0, there=10_000_000, back=4_000_000):
    return RowResult(
        name=name,
        steps=steps,
        seconds=seconds,
        losses=[(seconds, 1.0)],
        validation=validation,
        counted_steps=steps,
        there_bytes=there,
        back_bytes=back,
        lost_packets=0,
        late_s=0.0,
    )


def test_the_table_times_rows_to_the_base_rows_last_loss():
    rows = {
        BASE: found(BASE, [(10.0, 4.0), (50.0, 3.0)]),
        "stages": found("stages", [(5.0, 3.5), (10.0, 3.0), (50.0, 2.0)], steps=400),
        "stages_of_2": found("stages_of_2", [(50.0, 3.1)], back=20_000_000),
    }
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(rows).splitlines()]
    assert [line[2:] for line in lines[2:]] == [
        ["2.00", "0.100", "3.000", "50.0", "1.00"],
        ["8.00", "0.025", "2.000", "10.0", "0.20"],
        ["2.00", "0.200", "3.100", "not reached", ""],
    ]
    assert [line[1] for line in lines[2:]] == ["2", "2", "4"]


def test_a_loss_counts_as_reached_when_it_is_validated():
    assert seconds_to([(1.0, 3.0), (2.0, 2.0)], 2.5) == 2.0
    assert seconds_to([(1.0, 3.0)], 2.5) is None


# A model of some 60 kB, on which a step takes a moment.
SMALL = (
    "model.num_layers=1",
    "model.width=32",
    "data.seq_len=16",
    "train.batch_size=8",
    "train.validate_batches=1",
)


@pytest.mark.two_hosts
@pytest.mark.timeout(600)
def test_a_short_form_gives_a_table_that_theory_agrees_with(two_hosts, tmp_path):
    """Bytes over the link: of replicas the gradients, whatever the batch; of stages activations."""
    two_hosts()  # or skip
    # On a busy machine three seconds are over before the first validation, from which it counts.
    seconds = str(3 * patience())
    args = parsed(["--seconds", seconds, "--rows", "plain,stages", "--out", str(tmp_path), *SMALL])
    rows = measured(args)
    config = compose_config([*COMMON, *SMALL])
    width, tokens = 32, config.train.batch_size * 16
    # 2 embeddings, a block of 12 width^2 + 13 width, the last norm, the head.
    parameters = 256 * width + 16 * width + 12 * width**2 + 13 * width + 2 * width + 256 * width
    gradients, activations = 4 * parameters, 4 * tokens * width
    assert gradients <= rows["plain"].step_bytes <= 1.1 * gradients + 15_000
    assert activations <= rows["stages"].step_bytes <= 1.1 * activations + 15_000
    for row in rows.values():
        assert row.steps > 2 and row.validation and row.losses[-1][1] < 5.7
    written = json.loads((tmp_path / "figures.json").read_text())
    assert list(written) == ["plain", "stages"]
    assert table(rows) in (tmp_path / "table.md").read_text()
    write(tmp_path / "again", rows, "")  # what has been written once can be written anywhere
