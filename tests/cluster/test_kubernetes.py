"""The manifests as kubectl's own types read them; and what their pods run, as two of them here."""

import os
import re
import signal
import subprocess
import sys

import pytest
import yaml

from tests.cluster.tools import tool
from tests.support import PAUSING_MODEL, has_begun, losses, metrics

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
    """Return the Job, the one inside of the JobSet, and the elastic one."""
    inner = documents(repository, "jobset.yaml")["JobSet"]["spec"]["replicatedJobs"][0]
    alone = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "pods"}}
    own = (documents(repository, name)["Job"] for name in ("job.yaml", "elastic.yaml"))
    job, elastic = own
    return [job, alone | inner["template"], elastic]


@pytest.mark.parametrize("number", [0, 1, 2], ids=["job", "jobset", "elastic"])
def test_kubernetes_knows_every_field_of_a_job(repository, number):
    job = jobs(repository)[number]
    # It prints what has changed alone.
    image = ".spec.template.spec.containers[0].image"
    assert lost(job, through_kubectl(job, "image", "train=another")) == [image]
    job["spec"]["template"]["spec"]["subdomian"] = "x"
    wrong = {image, ".spec.template.spec.subdomian"}
    assert set(lost(job, through_kubectl(job, "image", "train=another"))) == wrong


def test_kubernetes_knows_every_field_of_the_store(repository):
    store = documents(repository, "elastic.yaml")["Deployment"]
    found = lost(store, through_kubectl(store, "image", "store=another"))
    assert found == [".spec.template.spec.containers[0].image"]


def test_kubernetes_knows_every_field_of_the_pod_for_data(repository):
    pod = documents(repository, "data.yaml")["Pod"]
    found = lost(pod, through_kubectl(pod, "image", "data=another"))
    assert found == [".spec.containers[0].image"]


@pytest.mark.parametrize("name", ["job.yaml", "elastic.yaml"])
def test_kubernetes_knows_every_field_of_the_service(repository, name):
    service = documents(repository, name)["Service"]
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


@pytest.fixture
def store(repository, free_port):
    """Return the port of what the pod of the store runs, and what replaces that pod."""
    pod = documents(repository, "elastic.yaml")["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (program,) = container["args"]
    assert container["command"] == ["python", "-c"] and "29500" in program
    port = free_port()
    words = [sys.executable, "-c", program.replace("29500", str(port))]
    processes = [subprocess.Popen(words)]

    def replace():
        processes[-1].kill()
        processes[-1].wait()
        processes.append(subprocess.Popen(words))

    yield port, replace
    processes[-1].kill()
    processes[-1].wait()


@pytest.fixture
def elastic_pod(repository, torchrun, tiny, tmp_path, store):
    """Return a function that starts what a pod of the elastic Job runs, with one rank."""
    (tmp_path / "slow.py").write_text(PAUSING_MODEL)
    (tmp_path / "memory").mkdir()
    (container,) = jobs(repository)[2]["spec"]["template"]["spec"]["containers"]
    args = container["args"]
    flags = dict(flag.partition("=")[::2] for flag in args[: args.index("-m")])
    host, _, _ = flags["--rdzv-endpoint"].partition(":")
    assert host == "gpipe-hpc-store"
    flags |= {"--rdzv-endpoint": f"127.0.0.1:{store[0]}", "--nproc-per-node": 1}
    given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    env = {"PYTHONPATH": f"{repository}{os.pathsep}{tmp_path}"}
    env |= {"GPIPE_HPC_SECRET": "of this test" * 4} | given

    def start(job, *words):
        values = {"JOB_UID": job, "POD_IP": "127.0.0.1"}
        own = [f"{name}={value}" for name, value in flags.items()]
        own = [re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], word) for word in own]
        return torchrun(own, *tiny, *ELASTIC, *words, env=env)

    return start


ELASTIC = (
    *("model._target_=slow.build", "pipeline.stages=1", "pipeline.replicas=2", "run.dir=run"),
    *("checkpoint.every=20", "checkpoint.neighbour_every=10", "checkpoint.neighbour_dir=memory"),
    *("model.dropout=0.1", "train.steps=9999"),
)


@pytest.mark.parametrize(
    ("how", "then"),
    [(signal.SIGTERM, "deleted and applied"), (signal.SIGKILL, "store lost")],
    ids=["preempted", "killed"],
)
def test_the_pod_that_is_left_goes_on_and_the_lost_one_joins_again(
    elastic_pod, store, start, tiny, tmp_path, until, how, then
):
    """Then all pods end, and others go on to a good end; a pod that is late finds no run."""
    run = tmp_path / "run"

    def newest():
        return max((line["step"] for line in metrics(run) if "loss" in line), default=0)

    def trains_on(what):
        reached = newest()
        until(lambda: newest() > reached + 3, 60, what)

    pause = "model.pause_s=0.05"
    gone, left = (elastic_pod("one", pause) for _ in range(2))
    until(lambda: has_begun(run, 25), 120, "both train")
    if how == signal.SIGTERM:
        gone.send(how)
    else:
        for pid in gone.processes():
            os.kill(pid, how)
    assert gone.wait(60) != 0
    until(lambda: "2 ranks before, 1 now" in left.output, 120, "one was left")
    trains_on("one trains")
    back = elastic_pod("one", pause)
    until(lambda: "1 rank before, 2 now" in left.output + back.output, 120, "two again")
    trains_on("both train again")
    if then == "store lost":
        store[1]()
    else:
        for each in (left, back):
            each.send(signal.SIGTERM)
    assert 0 not in [each.wait(60) for each in (left, back)]
    end = f"train.stop_at={int((run / 'REQUEUE').read_text()) + 20}"
    job = "one" if then == "store lost" else "two"
    pods = [elastic_pod(job, end) for _ in range(2)]
    assert [each.wait(200) for each in pods] == [0, 0], "".join(each.output for each in pods)
    late = elastic_pod(job, end)
    assert late.wait(60) != 0 and "RendezvousClosedError" in late.output
    words = [word for word in ELASTIC if "neighbour" not in word]
    alone = start(*tiny, *words, end, "run.dir=alone", env={"PYTHONPATH": str(tmp_path)})
    assert alone.wait(120).code == 0, alone.output
    own, undisturbed = losses(run), losses(tmp_path / "alone")
    assert len(own) == len(undisturbed) == int(end.partition("=")[2])
    # Two replicas sum in another order than one rank.
    assert own == pytest.approx(undisturbed, rel=1e-6)
