"""Apptainer's definition without Apptainer: what it would run, in a root file system of Debian."""

import pytest

from tests.cluster import apptainer
from tests.support import losses

# It installs all of a run's packages.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

# As Apptainer starts what `apptainer run` names.
RUN = f'. {apptainer.ENVIRONMENT}; exec /bin/sh {apptainer.RUNSCRIPT} "$@"'


def test_what_the_definition_builds_tests_itself_and_trains(
    defined, repository, tiny, start, tmp_path
):
    """Five steps of two ranks as a user of the machine, who may write to nothing but the mounts."""
    containers, image = defined
    work = tmp_path / "work"
    work.mkdir()
    work.chmod(0o777)
    settings = (*tiny, "train.steps=5")
    said = containers.output(
        *("--network=none", f"--volume={work}:/work", "--workdir=/work", "--tmpfs=/tmp"),
        *("--user=4321:4321", "--env=OMP_NUM_THREADS=1", "--entrypoint=/bin/sh", image),
        *("-c", RUN, "run", "--standalone", "--nproc_per_node=2", "-m", "gpipe_hpc.train"),
        *(*settings, "run.dir=/work/run"),
    )
    assert "step 5/5" in said
    alone = start(*settings, f"run.dir={tmp_path}/alone").wait(120)
    assert alone.code == 0, alone.output
    assert losses(work / "run") == losses(tmp_path / "alone")
