"""The manifests as kubectl's own types read them; and what their pods run, as two of them here."""

import os
import signal
import subprocess

import pytest
import yaml

from tests.cluster.tools import tool
from tests.support import has_begun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def documents(repository, name):
    """Return the objects of a manifest, by kind."""
    text = (repository / "cluster" / "kubernetes" / name).read_text()
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def lost(given, kept, path=""):
    """Return what of an object did not come back, or came back as something else."""
    if isinstance(given, dict):
        if not isinstance(kept, dict):
            return [path]
        pairs = [(value, kept.get(key), f"{path}.{key}") for key, value in given.items()]
    elif isinstance(given, list):
        if not isinstance(kept, list) or len(kept) != len(given):
            return [path]
        pairs = [(*both, f"{path}[{i}]") for i, both in enumerate(zip(given, kept, strict=True))]
    else:
        return [] if str(given) == str(kept) else [path]
    return [each for pair in pairs for each in lost(*pair)]


def through_kubectl(thing, *command):
    """Return an object as kubectl reads it: what its types do not know is gone."""
    done = subprocess.run(
        [tool("kubectl"), "set", *command, "--local", "-f", "-", "-o", "yaml"],
        input=yaml.safe_dump(thing),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


def jobs(repository):
    """Return the Job, and the one inside of the JobSet."""
    inner = documents(repository, "jobset.yaml")["JobSet"]["spec"]["replicatedJobs"][0]
    alone = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "pods"}}
    return [documents(repository, "job.yaml")["Job"], alone | inner["template"]]


@pytest.mark.parametrize("number", [0, 1], ids=["job", "jobset"])
def test_kubernetes_knows_every_field_of_a_job(repository, number):
    job = jobs(repository)[number]
    # It prints what has changed alone.
    image = ".spec.template.spec.containers[0].image"
    assert lost(job, through_kubectl(job, "image", "train=another")) == [image]
    job["spec"]["template"]["spec"]["subdomian"] = "x"
    wrong = {image, ".spec.template.spec.subdomian"}
    assert set(lost(job, through_kubectl(job, "image", "train=another"))) == wrong


def test_kubernetes_knows_every_field_of_the_service(repository):
    service = documents(repository, "job.yaml")["Service"]
    (name,) = service["spec"]["selector"]
    found = lost(service, through_kubectl(service, "selector", f"{name}=another"))
    assert found == [f".spec.selector.{name}"]


@pytest.fixture
def pod(repository, torchrun, tiny, free_port):
    """Return a function that starts what a pod of the Job runs, on this machine."""
    port = free_port()

    def start(index, run):
        template = jobs(repository)[0]["spec"]["template"]["spec"]
        args = template["containers"][0]["args"]
        flags = dict(flag.partition("=")[::2] for flag in args[: args.index("-m")])
        assert flags["--node-rank"] == "$(JOB_COMPLETION_INDEX)"
        flags |= {"--node-rank": index, "--master-addr": "127.0.0.1", "--master-port": port}
        flags |= {"--nproc-per-node": 1}
        env = {"PYTHONPATH": str(repository), "GPIPE_HPC_SECRET": "of this test" * 4}
        words = [f"{name}={value}" for name, value in flags.items()]
        return torchrun(words, *tiny, *WORDS, f"run.dir={run}", env=env)

    return start


WORDS = ("train.steps=300", "checkpoint.every=20", "pipeline.stages=2", "model.dropout=0.1")


@pytest.mark.parametrize(
    ("how", "gone"), [(signal.SIGTERM, 0), (signal.SIGKILL, 1)], ids=["preempted", "crashed"]
)
def test_pods_end_when_one_does_and_go_on_once_all_came_anew(
    pod, start, tiny, tmp_path, until, same_end, how, gone
):
    """One for one, as the Job's controller does it, which knows of no run: the last one last."""
    run = tmp_path / "run"
    pods = [pod(index, run) for index in range(2)]
    until(lambda: has_begun(run, 40), 200, "it trained")
    if how == signal.SIGTERM:
        pods[gone].send(how)
    else:
        for pid in pods[gone].processes():
            os.kill(pid, how)
    assert 0 not in [pods[index].wait(90) for index in (gone, 1 - gone)]
    assert (run / "REQUEUE").exists() == (how == signal.SIGTERM)
    pods = [pod(index, run) for index in (gone, 1 - gone)]
    assert [each.wait(400) for each in pods] == [0, 0], "".join(each.output for each in pods)
    alone = start(*tiny, *WORDS, f"run.dir={tmp_path}/alone", "pipeline.stages=1").wait(120)
    assert alone.code == 0, alone.output
    same_end(run, tmp_path / "alone")
