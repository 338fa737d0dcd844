"""`lockstep k8s render`: its objects fit the published schemas, roles understand what they are told, and wrong flags get one sentence."""

import copy
import functools
import itertools
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import latest_version, validate

from chief.config import ChiefConfig
from chief.config import parse_config as parse_chief
from ps_protocol.process import options
from ps_protocol.process.options import CALLER, Given
from ps_server.config import parse_config as parse_server
from tests.support.processes.commands import lockstep_here
from tests.support.repository import printed

BASE = "--name job --image registry/job:1 --ps 2 --workers 4"
VOLUME = "--checkpoint-dir /checkpoints --checkpoint-claim ckpt"
COMMAND = ["python", "train.py", "--rate", "0.1", "a b", "ü$(X)", "{{x}}"]
EVERYTHING = (
    "--namespace training --max-steps 900 --min-replicas 2 --checkpoint-interval 30 --checkpoint-size 10Gi --ps-cpu 2 --ps-memory 8Gi"
    " --worker-cpu 500m --worker-memory 64Gi --worker-gpus 1 --worker-node pool=gpu --worker-node zone=a --spot --env A=1 --env B=x=y"
    " --env-secret keys --mount data=/data --user 1000 --cert-manager ClusterIssuer/own --metrics-namespace monitoring --log-format json"
)


@functools.cache
def rendered(more: str = "", *, place: str = VOLUME) -> list[dict[str, Any]]:
    """The objects, as another parser of YAML reads them."""
    ended = lockstep_here("k8s", "render", *f"{BASE} {place} {more}".split(), "--", *COMMAND)
    assert (ended.returncode, ended.stderr) == (0, "")
    return [*yaml.safe_load_all(ended.stdout)]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


def pods_of(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each role's pods are made of, by role: of StatefulSets and a Job, or of a JobSet."""
    holders = [one["spec"] for one in objects if one["kind"] in ("StatefulSet", "Job")]
    for jobset in of_kind(objects, "JobSet"):
        holders += [job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]]
    templates = [holder["template"] for holder in holders]
    return {template["metadata"]["labels"]["app.kubernetes.io/component"]: template["spec"] for template in templates}


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    return dict(container)


def environment_of(pod: dict[str, Any], *, index: int) -> dict[str, str]:
    """The variables of a pod that has this completion index."""
    told = {}
    for variable in container_of(pod)["env"]:
        field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        assert field in (None, "metadata.annotations['batch.kubernetes.io/job-completion-index']")
        told[variable["name"]] = str(index) if field else variable["value"]
    assert len(told) == len(container_of(pod)["env"])
    return told


def role_words(command: list[str], *, hostname: str) -> list[str]:
    """What the role itself is called with, as a shell passes it on: `lockstep` only prints its words here."""
    program = 'lockstep() { printf "%s\\n" "$@"; }; '
    if command[0] == "sh":
        script = command[2].replace("exec ", "")
        run = subprocess.run(
            ["bash", "-c", program + script, *command[3:]], env={"HOSTNAME": hostname}, capture_output=True, text=True, timeout=20
        )
        assert run.returncode == 0, run.stderr
        return run.stdout.splitlines()
    return command[1:]


@pytest.mark.parametrize("version", ["1.27", "newest"])
@pytest.mark.parametrize("more", ["", EVERYTHING])
def test_objects_fit_the_published_schemas(more: str, version: str) -> None:
    objects = rendered(more)
    kinds = ["Service", "StatefulSet", "Service", "StatefulSet", "Job", "PodDisruptionBudget", "NetworkPolicy"]
    assert [one["kind"] for one in objects if one["kind"] not in ("PersistentVolumeClaim", "Certificate")] == kinds
    for one in objects:
        if one["kind"] != "Certificate":
            validate(one, latest_version() if version == "newest" else version, strict=True)


@pytest.mark.parametrize("more", ["", EVERYTHING])
def test_a_jobset_has_the_published_fields_and_jobs_that_fit_their_schema(more: str) -> None:
    objects = rendered(f"--as jobset {more}")
    (jobset,) = of_kind(objects, "JobSet")
    assert not of_kind(objects, "StatefulSet") + of_kind(objects, "Job") + of_kind(objects, "Service")
    assert (jobset["apiVersion"], [*jobset]) == ("jobset.x-k8s.io/v1alpha2", ["apiVersion", "kind", "metadata", "spec"])
    spec = jobset["spec"]
    assert {*spec} == {"network", "successPolicy", "replicatedJobs"}
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": "job"}
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["worker"]}
    sizes = {}
    for replicated in spec["replicatedJobs"]:
        assert ({*replicated}, replicated["replicas"], {*replicated["template"]}) == ({"name", "replicas", "template"}, 1, {"spec"})
        job = replicated["template"]["spec"]
        validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": job}, "1.29", strict=True)
        sizes[replicated["name"]] = job["completions"]
        assert job["completions"] == job["parallelism"] and job["template"]["spec"]["restartPolicy"] == "Never"
    assert sizes == {"ps": 2, "chief": 1, "worker": 4}


def test_a_trainjob_of_kubeflow_is_the_jobset_with_workers_called_as_its_trainer_calls_them() -> None:
    """Its fields were compared with kubeflow-trainer-api 2.3; no Kubeflow is asked."""
    runtime, job, *others = rendered("--as trainjob")
    (jobset, *same), version = rendered("--as jobset"), "trainer.kubeflow.org/v1alpha1"
    assert (runtime["kind"], runtime["apiVersion"], job["kind"], job["apiVersion"]) == ("TrainingRuntime", version, "TrainJob", version)
    name = runtime["metadata"]["name"]
    assert job["spec"] == {"runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}}
    assert job["metadata"]["name"] == jobset["metadata"]["name"] and runtime["spec"]["mlPolicy"] == {"numNodes": 4}
    expected = copy.deepcopy(jobset["spec"])
    expected["successPolicy"]["targetReplicatedJobs"] = ["node"]
    worker = expected["replicatedJobs"][-1]
    worker["name"] = worker["template"]["spec"]["template"]["spec"]["containers"][0]["name"] = "node"
    worker["template"]["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    assert runtime["spec"]["template"] == {"spec": expected} and others == same


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_a_chart_of_helm_is_what_is_rendered_for_its_values(kind: str, tmp_path: Path) -> None:
    """A template has nothing but values and quoted braces, which this test replaces as Helm does; Helm itself is not asked."""
    words = f"k8s render {BASE} {VOLUME} --as {kind} --helm {tmp_path}".split()
    ended = lockstep_here(*words, "--", *COMMAND)
    assert f"helm install job {tmp_path}\n" in ended.stdout and ended.stdout.endswith("helm uninstall job\n"), ended.stderr
    assert yaml.safe_load((tmp_path / "values.yaml").read_text()) == {"image": "registry/job:1", "workers": 4}
    assert {*yaml.safe_load((tmp_path / "Chart.yaml").read_text())} == {"apiVersion", "name", "version", "description"}
    values = {".Values.image": "other:2", ".Values.workers": "7", "`{{`": "{{"}
    template = (tmp_path / "templates" / "cluster.yaml").read_text()
    filled = re.sub(r"{{ ?(.*?) ?}}", lambda found: values[found[1]], template)
    assert [*yaml.safe_load_all(filled)] == rendered(f"--as {kind} --image other:2 --workers 7")


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_helm_itself_makes_of_a_chart_what_is_rendered_for_its_values(kind: str, tmp_path: Path) -> None:
    helm = pytest.importorskip("helm_python", reason="no Helm here: pip install helm-python-sdk, which is Helm 4 as a library")
    lockstep_here(*f"k8s render {BASE} {VOLUME} --as {kind} --helm {tmp_path}".split(), "--", *COMMAND)
    assert helm.lint(str(tmp_path))["errors"] == []
    with helm.Chart.load(tmp_path) as chart:
        (text,) = chart.render(values={"image": "other:2", "workers": 7}, name="job").values()
    assert [*yaml.safe_load_all(text)] == rendered(f"--as {kind} --image other:2 --workers 7")


@pytest.mark.parametrize("kind", ["job", "jobset"])
@pytest.mark.parametrize("more", ["", EVERYTHING])
def test_every_role_understands_what_it_is_told(kind: str, more: str) -> None:
    pods = pods_of(rendered(f"--as {kind} {more}"))
    for index in (0, 1):
        words = role_words(container_of(pods["ps"])["command"], hostname=f"job-ps-{index}")
        server = parse_server(words[1:], environment=environment_of(pods["ps"], index=index))
        assert (words[0], server.index, server.cluster, server.checkpoint_dir) == ("server", index, "job", "/checkpoints")
    words = role_words(container_of(pods["chief"])["command"], hostname="job-chief-0")
    chief = parse_chief(words[1:], environment=environment_of(pods["chief"], index=0))
    assert (words[0], chief.is_takeover, len(chief.ps), chief.coordination.total_num_replicas) == ("chief", True, 2, 4)
    assert (chief.page, chief.checkpoint_dir) == ("127.0.0.1:8080", "/checkpoints")
    assert (chief.coordination.max_steps, chief.coordination.min_replicas) == ((900, 2) if more else (None, None))
    worker = Given({}, environment_of(pods["worker"], index=3))
    assert container_of(pods["worker"])["command"] == COMMAND
    assert (worker[options.WORKER_INDEX], worker[options.TAKE_PLACE], worker[options.CALLED_CLUSTER]) == (3, True, "job")
    assert worker[options.CHIEF_ADDRESS] == chief.advertise
    known = {option.variable for option in options.options_of(CALLER)} | {"LOCKSTEP_NUM_WORKERS"}
    assert {name for name in environment_of(pods["worker"], index=3) if name.startswith("LOCKSTEP_")} <= known


def test_servers_are_called_by_the_names_that_kubernetes_gives_their_pods() -> None:
    assert addresses(rendered()) == (("job-ps-0.job-ps:5000", "job-ps-1.job-ps:5000"), "job-chief:5000")
    assert addresses(rendered("--as jobset")) == (("job-ps-0-0.job:5000", "job-ps-0-1.job:5000"), "job-chief-0-0.job:5000")
    services = {one["metadata"]["name"]: one["spec"] for one in of_kind(rendered(), "Service")}
    assert {*services} == {"job-ps", "job-chief"}
    assert all(one["clusterIP"] == "None" and one["publishNotReadyAddresses"] for one in services.values())
    assert {one["spec"]["serviceName"] for one in of_kind(rendered(), "StatefulSet")} == {*services}


def addresses(objects: list[dict[str, Any]]) -> tuple[tuple[str, ...], str]:
    config: ChiefConfig = parse_chief([], environment=environment_of(pods_of(objects)["chief"], index=0))
    return config.ps, config.advertise


def test_selectors_find_the_pods_of_their_role_and_of_no_other_cluster() -> None:
    objects = rendered()
    for one in of_kind(objects, "StatefulSet"):
        assert one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]
    (budget,), (policy,) = of_kind(objects, "PodDisruptionBudget"), of_kind(objects, "NetworkPolicy")
    own = {"app.kubernetes.io/name": "lockstep", "app.kubernetes.io/instance": "job"}
    assert budget["spec"]["selector"]["matchLabels"] == policy["spec"]["podSelector"]["matchLabels"] == own
    assert budget["spec"]["selector"]["matchExpressions"][0]["values"] == ["ps", "chief"]
    assert budget["spec"]["minAvailable"] == 2, "of three servers"


def test_only_pods_of_the_cluster_come_in_and_a_namespace_that_reads_metrics() -> None:
    (policy,) = of_kind(rendered(), "NetworkPolicy")
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": policy["spec"]["podSelector"]}], "ports": [{"port": 5000}]}]
    (policy,) = of_kind(rendered("--metrics-namespace monitoring"), "NetworkPolicy")
    _, metrics = policy["spec"]["ingress"]
    assert metrics["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert metrics["ports"] == [{"port": 9090}]


def test_servers_are_probed_and_have_time_to_save_when_they_are_asked_to_end() -> None:
    for role in ("ps", "chief"):
        pod = pods_of(rendered())[role]
        container = container_of(pod)
        alive = ["lockstep", "health", "--address", "127.0.0.1:5000"]
        assert container["startupProbe"]["exec"]["command"] == container["livenessProbe"]["exec"]["command"] == alive
        assert container["readinessProbe"]["exec"]["command"] == [*alive, "--ready"]
        assert pod["terminationGracePeriodSeconds"] >= 30
        assert {port["name"]: port["containerPort"] for port in container["ports"]}.items() >= {"grpc": 5000, "metrics": 9090}.items()


def test_sigterm_ends_a_workers_program_which_is_not_process_1() -> None:
    assert pods_of(rendered())["worker"]["shareProcessNamespace"] is True


def test_servers_are_spread_over_nodes_and_leave_lost_ones_soon() -> None:
    pods = pods_of(rendered())
    (spread,) = pods["ps"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    for pod in pods.values():
        assert {(one["key"], one["tolerationSeconds"]) for one in pod["tolerations"]} == {
            ("node.kubernetes.io/not-ready", 30),
            ("node.kubernetes.io/unreachable", 30),
        }


def test_workers_have_what_they_ask_for() -> None:
    pod = pods_of(rendered(EVERYTHING))["worker"]
    container = container_of(pod)
    assert container["resources"]["requests"] == {"cpu": "500m", "memory": "64Gi", "nvidia.com/gpu": 1}
    assert container["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 1}
    assert pod["nodeSelector"] == {"pool": "gpu", "zone": "a"}
    assert "nvidia.com/gpu" in {one["key"] for one in pod["tolerations"]}
    told = environment_of(pod, index=0)
    assert (told["A"], told["B"], told["HOME"]) == ("1", "x=y", "/tmp")
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert {"/data", "/dev/shm", "/tmp", "/secrets"} == {mount["mountPath"] for mount in container["volumeMounts"]}
    assert pod["securityContext"]["runAsUser"] == 1000
    assert "resources" not in container_of(pods_of(rendered())["worker"])


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_the_chief_asks_for_a_part_of_a_processor_and_is_not_starved_on_a_busy_node(kind: str) -> None:
    assert container_of(pods_of(rendered(f"--as {kind}"))["chief"])["resources"]["requests"] == {"cpu": "250m"}


def test_a_worker_that_is_preempted_has_not_failed() -> None:
    (job,) = of_kind(rendered("--spot"), "Job")
    assert job["spec"]["podFailurePolicy"]["rules"] == [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ]


def test_on_spot_nodes_are_workers_alone() -> None:
    pods = pods_of(rendered("--spot"))
    terms = {role: pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] for role, pod in pods.items()}
    on = {(one["key"], *one["values"]) for term in terms["worker"]["nodeSelectorTerms"] for one in term["matchExpressions"]}
    assert ("cloud.google.com/gke-spot", "true") in on and len(terms["worker"]["nodeSelectorTerms"]) == len(on), "any one of them"
    for role in ("ps", "chief"):
        (term,) = terms[role]["nodeSelectorTerms"]
        assert {(one["key"], *one["values"]) for one in term["matchExpressions"]} == on
        assert {one["operator"] for one in term["matchExpressions"]} == {"NotIn"}
    assert not any("affinity" in pod for pod in pods_of(rendered()).values())


def test_certificates_of_cert_manager_are_good_for_every_name_and_role() -> None:
    objects = rendered("--cert-manager ClusterIssuer/own")
    ps, chief = (one["spec"] for one in of_kind(objects, "Certificate"))
    assert {"job-ps-0.job-ps", "job-ps-1.job-ps", "localhost"} == {*ps["dnsNames"]}
    assert {"job-chief", "localhost"} == {*chief["dnsNames"]} and chief["ipAddresses"] == ["127.0.0.1"]
    assert (ps["uris"], chief["uris"]) == (["lockstep://job/ps"], ["lockstep://job/chief"])
    assert ps["issuerRef"] == {"kind": "ClusterIssuer", "name": "own"}
    (issuer,) = {one["spec"]["issuerRef"]["kind"] for one in of_kind(rendered("--cert-manager own"), "Certificate")}
    assert issuer == "Issuer"
    files = {role: secret_files(pod) for role, pod in pods_of(objects).items()}
    assert files["ps"] == {"job-ps-tls": ["ca.pem", "cert.pem", "cert.key"], "job-ps": []}
    assert files["worker"] == {"job-chief-tls": ["ca.pem"], "job-worker": []}, "no key of a server"


def secret_files(pod: dict[str, Any]) -> dict[str, list[str]]:
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "secrets")
    assert volume["projected"]["defaultMode"] == 0o440
    sources = [source["secret"] for source in volume["projected"]["sources"]]
    return {source["name"]: [item["path"] for item in source.get("items", [])] for source in sources}


def test_a_url_needs_no_volume() -> None:
    pods = pods_of(rendered(place="--checkpoint-dir s3://bucket/job"))
    assert not [volume for pod in pods.values() for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert environment_of(pods["ps"], index=0)["LOCKSTEP_CHECKPOINT_DIR"] == "s3://bucket/job"


def test_the_claim_is_made_on_demand_and_mounted_by_servers_alone() -> None:
    assert not of_kind(rendered(), "PersistentVolumeClaim")
    (claim,) = of_kind(rendered("--checkpoint-size 10Gi"), "PersistentVolumeClaim")
    assert (claim["metadata"]["name"], claim["spec"]["accessModes"]) == ("ckpt", ["ReadWriteMany"])
    mounts = {role: {mount["mountPath"] for mount in container_of(pod)["volumeMounts"]} for role, pod in pods_of(rendered()).items()}
    assert [role for role in mounts if "/checkpoints" in mounts[role]] == ["ps", "chief"]


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_file_is_written_with_the_commands_to_start_watch_and_end(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    words = f"k8s render {BASE} {VOLUME} --namespace training --as {kind} --out {file} -- python train.py".split()
    said = lockstep_here(*words).stdout
    chief = "pod/job-chief-0" if kind == "job" else "job/job-chief-0"
    assert f"kubectl -n training port-forward {chief} 8080" in said and f"kubectl -n training apply -f {file}" in said
    create = next(shlex.split(line) for line in said.splitlines() if line.startswith("lockstep certs create"))
    hosts = {word for flag, word in itertools.pairwise(create) if flag == "--host"}
    ps, advertised = addresses([*yaml.safe_load_all(file.read_text())])
    assert hosts == {address.partition(":")[0] for address in (*ps, advertised)}
    head = [line.removeprefix("#   ") for line in file.read_text().splitlines() if line.startswith("#   ")]
    assert head == said.partition("\n\n")[2].splitlines()


def test_the_documented_command_writes_its_file(tmp_path: Path) -> None:
    command = printed("lockstep k8s render").replace("\\\n", "").replace("job.yaml", str(tmp_path / "job.yaml"))
    ended = lockstep_here(*shlex.split(command)[1:])
    assert ended.returncode == 0 and pods_of([*yaml.safe_load_all((tmp_path / "job.yaml").read_text())]).keys() == {"ps", "chief", "worker"}


@pytest.mark.parametrize(("kind", "code"), [("TERM", 143), ("none", 7)])
def test_a_server_in_a_jobset_fails_when_it_is_asked_to_end_and_else_ends_as_it_does(kind: str, code: int, tmp_path: Path) -> None:
    command = container_of(pods_of(rendered("--as jobset"))["ps"])["command"]
    role = tmp_path / "lockstep"
    end = "trap 'touch saved; exit 0' TERM; touch ready; while :; do sleep 0.02; done" if kind == "TERM" else "exit 7"
    role.write_text(f"#!/bin/sh\n{end}\n")
    role.chmod(0o755)
    with subprocess.Popen(command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, cwd=tmp_path) as shell:
        while kind == "TERM" and not (tmp_path / "ready").exists():
            assert shell.poll() is None
        if kind == "TERM":
            shell.send_signal(signal.SIGTERM)
        assert shell.wait(timeout=20) == code
    assert (tmp_path / "saved").exists() == (kind == "TERM")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--name Job", "--name: got 'Job', want NAME: what all names begin with"),
        ("--name a-", "--name: got 'a-'"),
        (f"--name {'a' * 41}", "--name: got 'aaa"),
        ("--image ''", "--image: got ''"),
        ("--image 'a b'", "--image: got 'a b'"),
        ("--namespace a.b", "--namespace: got 'a.b'"),
        ("--ps 0", "--ps: got '0', want a whole number >= 1"),
        ("--workers many", "--workers: got 'many'"),
        ("--max-steps -1", "--max-steps: got '-1'"),
        ("--min-replicas 9", "--min-replicas: got 9, want 1 to 4"),
        ("--policy async --backup-workers 1", "--backup-workers: only sync and outer"),
        ("--worker-memory lots", "--worker-memory: got 'lots', want SIZE: memory of each worker, such as 16Gi"),
        ("--worker-cpu 0", "--worker-cpu: got '0'"),
        ("--worker-gpus -1", "--worker-gpus: got '-1'"),
        ("--worker-gpus ''", "--worker-gpus: got ''"),
        ("--worker-node pool", "--worker-node: got 'pool', want KEY=VALUE"),
        ("--env A", "--env: got 'A', want NAME=VALUE"),
        ("--env 1A=b", "--env: got '1A=b'"),
        ("--mount data", "--mount: got 'data', want CLAIM=/PATH"),
        ("--mount data=/a --mount other=/a/", "--mount: got data=/a and other=/a/, want each claim once, each at a path of its own"),
        ("--mount data=/secrets", "--mount: got data=/secrets, want each claim once"),
        ("--user root", "--user: got 'root'"),
        ("--cert-manager Other/x", "--cert-manager: got 'Other/x'"),
        ("--checkpoint-dir s3://bucket/a", "--checkpoint-claim: s3://bucket/a needs no volume"),
        ("--checkpoint-dir here", "--checkpoint-dir: got 'here', want a directory of its own"),
        ("--checkpoint-dir /tmp/", "--checkpoint-dir: got '/tmp/'"),
        ("--checkpoint-claim ''", "--checkpoint-dir /checkpoints: give --checkpoint-claim"),
        ("--checkpoint-dir ''", "--checkpoint-dir: give one; Kubernetes moves pods"),
        ("--as deployment", "argument --as: invalid choice: 'deployment'"),
        ("--out /nowhere/job.yaml", "--out /nowhere/job.yaml: No such file or directory"),
        ("--pss 2", "--pss"),
    ],
)
def test_wrong_flags_get_one_sentence_that_names_them(words: str, complaint: str) -> None:
    ended = lockstep_here("k8s", "render", *f"{BASE} {VOLUME}".split(), *shlex.split(words), "--", *COMMAND)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("lockstep k8s: ") and complaint in ended.stderr and ended.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--"], ["--", "--rate"]])
def test_without_a_program_there_is_nothing_to_run(words: list[str]) -> None:
    ended = lockstep_here("k8s", "render", *f"{BASE} {VOLUME}".split(), *words)
    assert ended.returncode == 2 and "what should the workers run?" in ended.stderr
