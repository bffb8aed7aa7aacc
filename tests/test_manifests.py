"""Consistency of the files in cluster/ that users edit, and validity of their commands."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from gpipe_hpc.config import check_config, compose_config
from tests.cluster.apptainer import arguments, definition, files, filled
from tests.kubernetes import mistakes

CLUSTER = Path(__file__).resolve().parent.parent / "cluster"


def documents(name):
    """Return the objects of a manifest by kind."""
    text = (CLUSTER / "kubernetes" / name).read_text("utf-8")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def job_of(name):
    """Return the job spec of a manifest."""
    found = documents(name)
    if "Job" in found:
        return found["Job"]["spec"]
    return found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]


def first_pod(name):
    """Return the host name of the first pod, as the other pods of a manifest see it."""
    found = documents(name)
    if "Job" in found:
        return f"{found['Job']['metadata']['name']}-0.{found['Service']['metadata']['name']}"
    jobset = found["JobSet"]
    (jobs,) = jobset["spec"]["replicatedJobs"]
    assert jobs["replicas"] == 1
    pod = f"{jobset['metadata']['name']}-{jobs['name']}-0-0"
    return f"{pod}.{jobset['spec']['network']['subdomain']}"


def objects():
    """Return all objects of all manifests."""
    texts = [path.read_text("utf-8") for path in sorted((CLUSTER / "kubernetes").glob("*.yaml"))]
    return [each for text in texts for each in yaml.safe_load_all(text)]


def parts(thing):
    """Yield an object and each map and list in it."""
    yield thing
    for value in list(thing.values() if isinstance(thing, dict) else thing):
        if isinstance(value, dict | list):
            yield from parts(value)


def test_kubernetes_knows_every_field_and_its_type():
    assert [mistake for thing in objects() for mistake in mistakes(thing)] == []


def slips(part):
    """Modify one value or name of a map or list at a time; yield its key while it is modified."""
    for key, value in list(part.items() if isinstance(part, dict) else enumerate(part)):
        others = [None, 1.5, {} if isinstance(value, list) else []]
        if not isinstance(value, dict) and key not in QUANTITIES:
            others.append(7 if isinstance(value, str) else str(value))
        for other in others:
            part[key] = other
            yield key
        part[key] = value
        if isinstance(part, dict):
            whole = dict(part)
            part[key + key[-1]] = part.pop(key)
            yield key
            part.clear()
            part.update(whole)


QUANTITIES = ("cpu", "memory", "storage", "sizeLimit", "nvidia.com/gpu")  # numbers or text


def test_a_slip_in_any_field_at_any_depth_is_found():
    """Each wrong name and type is detected, also in JobSet, which kubectl cannot check."""
    unseen, tried = [], 0
    for thing in objects():
        for part in parts(thing):
            for key in slips(part):
                tried += 1
                unseen += [] if mistakes(thing) else [(thing["kind"], key)]
        assert mistakes(thing) == [], "as it was"
    assert tried > 1000
    # Names of labels are arbitrary.
    assert {key for _, key in unseen} == {"app", "batch.kubernetes.io/job-name"}


both = pytest.mark.parametrize("name", ["job.yaml", "jobset.yaml"])
ALL = ("job.yaml", "jobset.yaml", "elastic.yaml")
each_one = pytest.mark.parametrize("name", ALL)


@both
def test_pods_find_the_first_of_them(name):
    job = job_of(name)
    flags, _ = command(name)
    assert flags["--master-addr"] == first_pod(name)
    assert job["completionMode"] == "Indexed"
    assert int(flags["--nnodes"]) == job["completions"] == job["parallelism"]
    assert flags["--node-rank"] == "$(JOB_COMPLETION_INDEX)"


def test_the_service_is_headless_and_of_the_pods_of_the_job():
    found = documents("job.yaml")
    service, job = found["Service"], found["Job"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    label = {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["selector"] == label
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert documents("jobset.yaml")["JobSet"]["spec"]["network"]["enableDNSHostnames"]


def command(name):
    """Return torchrun's options and the settings of a manifest's run."""
    (container,) = job_of(name)["template"]["spec"]["containers"]
    assert container["command"] == ["torchrun"]
    args = container["args"]
    place = args.index("-m")
    assert args[place + 1] == "gpipe_hpc.train"
    return dict(word.split("=", 1) for word in args[:place]), args[place + 2 :]


@each_one
def test_settings_compose_and_fill_all_ranks(name):
    flags, settings = command(name)
    config = compose_config(settings)
    most = flags["--nnodes"].rpartition(":")[2]
    ranks = int(most) * int(flags["--nproc-per-node"])
    assert config.pipeline.stages * config.pipeline.replicas == ranks
    (container,) = job_of(name)["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == int(flags["--nproc-per-node"])
    assert config.run.dir.startswith("/work/") and config.checkpoint.every > 0


def batch_script():
    """Return the text of train.sbatch and the settings of its command."""
    text = (CLUSTER / "slurm" / "train.sbatch").read_text("utf-8")
    words = shlex.split(re.search(r"COMMAND=\((.*?)\)\n\}", text, re.S)[1])
    assert words[:3] == ["python", "-m", "gpipe_hpc.train"]
    return text, words[3:]


@pytest.mark.parametrize("name", [*ALL, "train.sbatch"])
def test_a_sample_trains_on_tokens_of_its_model(name):
    """Regression: samples trained on bytes with the vocabulary of GPT-2."""
    settings = batch_script()[1] if name == "train.sbatch" else command(name)[1]
    config = compose_config(settings)
    assert config.model["vocab_size"] == config.data.vocab_size
    assert config.data.seq_len <= config.model["block_size"]


def test_the_batch_script_goes_on_in_the_folder_of_its_name_and_shows_what_sites_ask_for():
    """Regression: each job had its own folder, so a second job did not resume the first."""
    text, settings = batch_script()
    assert "\nRUN_DIR=runs/$SLURM_JOB_NAME\n" in text and "\n#SBATCH --job-name=" in text
    assert compose_config(settings).checkpoint.resume == "auto"
    for option in ("partition", "account", "mem"):
        assert re.search(rf"^##SBATCH --{option}=", text, re.M)


@each_one
def test_a_stopped_pod_has_time_to_save_and_is_not_counted(name):
    job = job_of(name)
    pod = job["template"]["spec"]
    flags, _ = command(name)
    assert int(flags["--shutdown-timeout"]) < pod["terminationGracePeriodSeconds"]
    assert pod["restartPolicy"] == "Never"  # required by podFailurePolicy
    (rule,) = job["podFailurePolicy"]["rules"]
    # The status must be a string.
    assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    if name != "jobset.yaml":
        assert rule["action"] == "Ignore" and job["podReplacementPolicy"] == "Failed"
        fewest = flags["--nnodes"].partition(":")[0]
        spare = job["completions"] - int(fewest)
        assert job["backoffLimitPerIndex"] > 0 and job["maxFailedIndexes"] == spare
    else:
        policy = documents(name)["JobSet"]["spec"]["failurePolicy"]
        assert rule["action"] == "FailJob" and job["backoffLimit"] == 0 < policy["maxRestarts"]
        ignored = {
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
        assert policy["rules"] == [ignored]


def assert_no_rights(pod):
    """Assert that a pod runs as the image's user and can write only to volumes."""
    dockerfile = (CLUSTER.parent / "Dockerfile").read_text("utf-8")
    (user,) = re.findall(r"^USER (\d+)$", dockerfile, re.M)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == int(user)
    (container,) = pod["containers"]
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}


@each_one
def test_pods_need_no_rights_and_write_to_volumes(name):
    pod = job_of(name)["template"]["spec"]
    (container,) = pod["containers"]
    assert_no_rights(pod)
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes.pop(mount["name"]) for mount in container["volumeMounts"]}
    assert not volumes and set(mounts) == {"/work", "/dev/shm", "/tmp"}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    claim = documents(name)["PersistentVolumeClaim"]
    assert mounts["/work"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    secret = container["env"][0]
    assert secret["name"] == "GPIPE_HPC_SECRET" and "secretKeyRef" in secret["valueFrom"]


def test_job_and_jobset_run_the_same():
    job, jobset = (job_of(name)["template"]["spec"] for name in ("job.yaml", "jobset.yaml"))
    del job["subdomain"]  # JobSet sets it
    assert yaml.safe_dump(job).replace(first_pod("job.yaml"), "POD") == yaml.safe_dump(
        jobset
    ).replace(first_pod("jobset.yaml"), "POD")


def test_pods_of_the_elastic_job_meet_in_the_store():
    found = documents("elastic.yaml")
    service, store = found["Service"], found["Deployment"]["spec"]
    pod = store["template"]["spec"]
    labels = store["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == store["selector"]["matchLabels"] == labels
    assert service["spec"]["clusterIP"] == "None"
    assert store["replicas"] == 1 and store["strategy"] == {"type": "Recreate"}
    assert_no_rights(pod)
    (container,) = pod["containers"]
    (program,) = container["args"]
    compile(program, "store", "exec")
    flags, _ = command("elastic.yaml")
    host, port = flags["--rdzv-endpoint"].split(":")
    assert host == service["metadata"]["name"]
    assert f'TCPStore("127.0.0.1", {port}, is_master=True' in program
    assert (
        container["image"] == job_of("elastic.yaml")["template"]["spec"]["containers"][0]["image"]
    )


def test_the_elastic_job_goes_on_with_fewer_pods_and_ends_with_the_first():
    job = job_of("elastic.yaml")
    flags, settings = command("elastic.yaml")
    fewest, most = map(int, flags["--nnodes"].split(":"))
    assert 0 < fewest < most == job["completions"] == job["parallelism"]
    assert job["completionMode"] == "Indexed"
    assert job["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    config = compose_config(settings)
    # The smallest number of pods has enough GPUs for one replica.
    assert config.pipeline.stages <= fewest * int(flags["--nproc-per-node"])
    conf = dict(pair.split("=") for pair in flags["--rdzv-conf"].split(","))
    assert conf["is_host"] == "0" and flags["--rdzv-backend"] == "c10d"
    assert int(flags["--max-restarts"]) > 0
    env = {entry["name"]: entry for entry in job["template"]["spec"]["containers"][0]["env"]}
    assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]["value"] == "1"
    named = set(re.findall(r"\$\((\w+)\)", " ".join(flags.values())))
    assert named == {"JOB_UID", "POD_IP"} and named <= env.keys()


def test_the_elastic_job_trains_what_the_other_ones_do():
    *_, settings = command("job.yaml")
    *_, elastic = command("elastic.yaml")
    assert elastic == [*settings, "checkpoint.neighbour_every=10"]
    pods = [job_of(name)["template"]["spec"] for name in ("job.yaml", "elastic.yaml")]
    for pod in pods:
        pod.pop("subdomain", None)
        for word in ("args", "env"):
            del pod["containers"][0][word]
    assert pods[0] == pods[1]


def test_the_pod_for_data_holds_the_volume_that_pods_train_on():
    found = documents("data.yaml")
    pod = found["Pod"]["spec"]
    assert_no_rights(pod)
    assert pod["securityContext"] == job_of("job.yaml")["template"]["spec"]["securityContext"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/work"}]
    claims = [documents(name)["PersistentVolumeClaim"] for name in (*ALL, "data.yaml")]
    assert all(claim == claims[0] for claim in claims)
    assert volume["persistentVolumeClaim"]["claimName"] == claims[0]["metadata"]["name"]


def test_apptainer_builds_what_the_dockerfile_does(tmp_path):
    """Its files exist, its shell scripts parse, and its versions are those of the Dockerfile."""
    found = definition(CLUSTER.parent)
    known = {"arguments", "files", "post", "environment", "runscript", "test", "help"}
    assert set(found) == {"", *known}
    header = dict(
        line.split(": ", 1) for line in found[""].splitlines() if line and line[0] not in "# "
    )
    assert header == {"Bootstrap": "docker", "From": "{{ BASE }}"}
    used = set(re.findall(r"\{\{ (\w+) \}\}", "".join(found.values())))
    assert used == set(arguments(found))
    dockerfile = (CLUSTER.parent / "Dockerfile").read_text("utf-8")
    assert f"ARG BASE={arguments(found)['BASE']}" in dockerfile
    copied = files(found)
    assert all((CLUSTER.parent / source).exists() for source, _ in copied)
    sent = (CLUSTER.parent / ".dockerignore").read_text("utf-8").split()
    assert {source for source, _ in copied} == {w[1:] for w in sent if w.startswith("!")}
    for name in ("post", "environment", "runscript", "test"):
        subprocess.run(["sh", "-n"], input=filled(found)[name], text=True, check=True)


def test_the_batch_script_is_one():
    path = CLUSTER / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text("utf-8")
    top, _, rest = text.partition("edit to here")
    assert "#SBATCH" not in rest, "Slurm reads no options below the first command"
    # Slurm reads no options after the first command.
    first = next(i for i, line in enumerate(top.splitlines()) if line and line[0] != "#")
    assert not any(line.startswith("#SBATCH") for line in top.splitlines()[first:])
    options = re.findall(r"^#SBATCH (--[\w-]+)", text, re.M)
    assert {"--requeue", "--no-kill", "--open-mode", "--signal"} <= set(options)
    (body,) = re.findall(r"^what_runs\(\) \{\s*COMMAND=\((.*?)\)\n\}", text, re.M | re.S)
    assert shlex.split(body)[:3] == ["python", "-m", "gpipe_hpc.train"]


def test_the_batch_script_keeps_the_micro_batches_with_half_of_its_nodes():
    """Regression: pipeline.replicas depended on the ranks, so a lost node changed dropout."""
    text = (CLUSTER / "slurm" / "train.sbatch").read_text("utf-8")
    (function,) = re.findall(r"^what_runs\(\) \{.*?^\}", text, re.M | re.S)
    found = []
    for ranks in (16, 8):
        script = f"{function}\nNUM_RANKS={ranks} NUM_NODES={ranks // 8}\nwhat_runs\n"
        script += 'printf "%s\\n" "${COMMAND[@]}"'
        done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=True)
        config = compose_config(done.stdout.splitlines()[3:])
        check_config(config, ranks)  # these ranks can run it
        found.append(
            (config.train.batch_size, config.pipeline.replicas * config.pipeline.microbatches)
        )
    assert found[0] == found[1]
