"""The Python of README.md runs as it is pasted, in one process and on two ranks."""

import re

import pytest


@pytest.fixture
def example(repository, tmp_path):
    """Write README's script to example.py; return its path."""
    text = (repository / "README.md").read_text("utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    path = tmp_path / "example.py"
    path.write_text(block)
    return path


def printed(output):
    # Ranks that print at the same time may join their lines.
    (loss,) = set(re.findall(r"loss (\d+\.\d{6})", output))
    return float(loss)


def test_the_library_example_trains_the_same_in_one_process_and_on_two_ranks(
    example, start, start_ranks
):
    alone = start(module="example").wait(60)
    assert alone.code == 0, alone.output
    ranks = start_ranks(2, module="example").wait(60)
    assert ranks.codes == [0, 0], ranks.outputs
    losses = [printed(output) for output in (alone.output, *ranks.outputs)]
    assert losses[0] < 0.5 and losses == [losses[0]] * 3


@pytest.mark.slow
def test_torchrun_runs_the_library_example_as_the_page_says(example, torchrun, repository):
    line = "torchrun --standalone --nproc_per_node 2 example.py"
    assert f"`{line}`" in (repository / "README.md").read_text("utf-8").replace("\n", " ")
    launch = torchrun(["--standalone", "--nproc_per_node", "2"], module="example")
    assert launch.wait(90) == 0 and launch.output.count("loss ") == 2, launch.output
    assert printed(launch.output) < 0.5
