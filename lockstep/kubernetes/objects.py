"""The objects of the API of Kubernetes that make a cluster, from its spec. Knows their fields and what roles are told; writes no text."""

from collections.abc import Mapping
from typing import Any

from lockstep.kubernetes.spec import KubernetesSpec, pairs
from lockstep.kubernetes.yaml_text import Verbatim

Object = dict[str, Any]

PORT, METRICS_PORT, PAGE_PORT = 5000, 9090, 8080
_INDEX = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
# Kubernetes waits five minutes for a node that does not answer.
_LOST_NODE = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
_LOST = [{"key": f"node.kubernetes.io/{state}", **_LOST_NODE} for state in ("not-ready", "unreachable")]
# A pod that asks for none has the least part of a busy node, and all wait for the chief.
_CHIEF_CPU = "250m"
# For `sh`: runs a role, and fails where it ends because it was asked to, also while it starts. A Job would take it for done, and start no
# other pod.
_FAIL_WHEN_ASKED = (
    'trap \'t=143; [ -z "$c" ] || kill -TERM $c\' TERM; "$@" & c=$!; [ -z "$t" ] || kill -TERM $c; '
    'wait $c; r=$?; if [ "$t" ]; then wait $c; r=$t; fi; exit $r'
)
# How nodes that may be taken away are labelled, and tainted, by GKE, EKS, AKS and Karpenter.
_SPOT = {
    "cloud.google.com/gke-spot": "true",
    "eks.amazonaws.com/capacityType": "SPOT",
    "kubernetes.azure.com/scalesetpriority": "spot",
    "karpenter.sh/capacity-type": "spot",
}
# No other directory than _TEMPORARY can be written to.
_SECRETS, _PRIVATE, _TEMPORARY = "/secrets", 0o440, "/tmp"
_TLS_FILES = {"ca.crt": "ca.pem", "tls.crt": "cert.pem", "tls.key": "cert.key"}


def objects_of(spec: KubernetesSpec) -> list[Object]:
    """Returns all objects of a cluster, in the order in which they are created."""
    storage = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": spec.checkpoint_size}}}
    claims = [_object(spec, "v1", "PersistentVolumeClaim", spec.checkpoint_claim, storage)] if spec.checkpoint_size else []
    certificates = [_certificate(spec, role) for role in ("ps", "chief")] if spec.cert_manager else []
    workers = _object(spec, "batch/v1", "Job", f"{spec.name}-worker", _job(spec, "worker"))
    if spec.is_jobset:
        roles = _train_job(spec) if spec.kind == "trainjob" else [_jobset(spec)]
    else:
        roles = [*_stateful_set(spec, "ps"), *_stateful_set(spec, "chief"), workers]
    return [*claims, *certificates, *roles, _disruption_budget(spec), _network_policy(spec)]


def hosts_of(spec: KubernetesSpec) -> list[str]:
    """Returns the names by which the chief and parameter servers are called: the chief's, and theirs by index."""
    if spec.is_jobset:
        return [f"{spec.name}-{pod}.{spec.name}" for pod in ("chief-0-0", *(f"ps-0-{index}" for index in range(spec.ps)))]
    return [f"{spec.name}-chief", *(f"{spec.name}-ps-{index}.{spec.name}-ps" for index in range(spec.ps))]


def _stateful_set(spec: KubernetesSpec, role: str) -> list[Object]:
    """Returns it with its headless service."""
    name, labels = f"{spec.name}-{role}", _labels(spec, role)
    ports = [{"name": "grpc", "port": PORT}, {"name": "metrics", "port": METRICS_PORT}]
    found = {"# It is to be found before it is ready.": None, "publishNotReadyAddresses": True}
    one = "# One, and never two: the next pod starts when the last one is surely gone, so --takeover is right."
    number = {one: None, "replicas": 1} if role == "chief" else {"replicas": spec.ps, "podManagementPolicy": "Parallel"}
    pods = {"serviceName": name, **number, "selector": {"matchLabels": labels}, "template": _server_pod(spec, role)}
    service = {"clusterIP": "None", **found, "selector": labels, "ports": ports}
    return [_object(spec, "v1", "Service", name, service), _object(spec, "apps/v1", "StatefulSet", name, pods)]


def _jobset(spec: KubernetesSpec) -> Object:
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": spec.name}
    success = {"operator": "All", "targetReplicatedJobs": ["worker"]}
    done = "# When the workers are done, so is all: servers and chief are removed."
    replicated = [{"name": role, "replicas": 1, "template": {"spec": _job(spec, role)}} for role in ("ps", "chief", "worker")]
    settings = {"network": network, done: None, "successPolicy": success, "replicatedJobs": replicated}
    return _object(spec, "jobset.x-k8s.io/v1alpha2", "JobSet", spec.name, settings)


def _train_job(spec: KubernetesSpec) -> list[Object]:
    """Returns a TrainJob of Kubeflow with its runtime, a JobSet whose workers are called as there."""
    jobset, metadata = _jobset(spec)["spec"], {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    node = jobset["replicatedJobs"][-1] | {"name": "node"}
    jobset["replicatedJobs"][-1] = node
    node["template"] = {"metadata": metadata, **node["template"]}
    node["template"]["spec"]["template"]["spec"]["containers"][0]["name"] = "node"
    jobset["successPolicy"]["targetReplicatedJobs"] = ["node"]
    version = "trainer.kubeflow.org/v1alpha1"
    comment = "# Servers and chief are called by the name of the TrainJob, so this runtime is for one."
    runtime = _object(spec, version, "TrainingRuntime", spec.name, {"mlPolicy": {"numNodes": spec.workers}, "template": {"spec": jobset}})
    ref = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": spec.name}
    return [runtime, _object(spec, version, "TrainJob", spec.name, {comment: None, "runtimeRef": ref})]


def _job(spec: KubernetesSpec, role: str) -> Object:
    number, retries = {"ps": (spec.ps, 1000), "chief": (1, 1000), "worker": (spec.workers, 20)}[role]
    size = {"completionMode": "Indexed", "completions": number, "parallelism": number, "backoffLimit": retries}
    reason = "# A pod whose node is drained or taken away has not failed."
    drained = {"rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]}
    pod = _worker_pod(spec) if role == "worker" else _server_pod(spec, role)
    return {**size, reason: None, "podFailurePolicy": drained, "template": pod}


def _server_pod(spec: KubernetesSpec, role: str) -> Object:
    files = {"TOKEN_FILE": "tokens", "TLS_CA": "ca.pem", "TLS_CERT": "cert.pem", "TLS_KEY": "cert.key"}
    addresses = {"CLUSTER": spec.name, "ADDRESS": f"0.0.0.0:{PORT}", "METRICS": f"0.0.0.0:{METRICS_PORT}"}
    given = addresses | {name: f"{_SECRETS}/{file}" for name, file in files.items()}
    told: Object = {f"LOCKSTEP_{name}": value for name, value in given.items()}
    told |= spec.server_variables if role == "ps" else spec.chief_variables
    if role == "chief":
        command = ["lockstep", "chief", "--takeover"]
        told["LOCKSTEP_PS"] = ",".join(f"{host}:{PORT}" for host in hosts_of(spec)[1:])
        # Not the address of the pod, of which no certificate knows. LOCKSTEP_CHIEF is for `kubectl exec`.
        told["LOCKSTEP_ADVERTISE"] = told["LOCKSTEP_CHIEF"] = f"{hosts_of(spec)[0]}:{PORT}"
        # `kubectl port-forward` reaches it there, and nobody else does.
        told["LOCKSTEP_PAGE"] = f"127.0.0.1:{PAGE_PORT}"
    elif spec.is_jobset:
        command, told["LOCKSTEP_PS_INDEX"] = ["lockstep", "server"], _INDEX
    else:
        command = ["sh", "-c", 'exec lockstep server --index "${HOSTNAME##*-}"']  # the name of the pod ends in its index
    health = ["lockstep", "health", "--address", f"127.0.0.1:{PORT}"]
    ports = {"grpc": PORT, "metrics": METRICS_PORT, **({"page": PAGE_PORT} if role == "chief" else {})}
    container = {
        "command": ["sh", "-c", _FAIL_WHEN_ASKED, "sh", *command] if spec.is_jobset else command,
        "env": _environment(told),
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "startupProbe": {"exec": {"command": health}, "periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 90},
        "readinessProbe": {"exec": {"command": [*health, "--ready"]}, "periodSeconds": 5, "timeoutSeconds": 5},
        "livenessProbe": {"exec": {"command": health}, "periodSeconds": 20, "timeoutSeconds": 10, "failureThreshold": 6},
        **(_resources(spec.ps_cpu, spec.ps_memory) if role == "ps" else _resources(_CHIEF_CPU, "")),
    }
    elsewhere = [{"key": key, "operator": "NotIn", "values": [value]} for key, value in _SPOT.items()]
    placement = _on_nodes([{"matchExpressions": elsewhere}]) if spec.spot else {}
    if role == "ps":
        spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        placement["topologySpreadConstraints"] = [{**spread, "labelSelector": {"matchLabels": _labels(spec, role)}}]
    volumes = {spec.checkpoint_claim: spec.checkpoint_dir} if spec.checkpoint_claim else {}
    # Longer than it takes to leave: up to 7 s for a last checkpoint, after which the next pod continues the training.
    return _pod(spec, role, container, volumes, {"tolerations": _LOST, **placement}, grace_s=60)


def _worker_pod(spec: KubernetesSpec) -> Object:
    told: Object = {"CHIEF": f"{hosts_of(spec)[0]}:{PORT}", "CLUSTER": spec.name, "NUM_WORKERS": _text(spec.workers)}
    told |= {"WORKER_INDEX": _INDEX, "TAKEOVER": "1", "TLS_CA": f"{_SECRETS}/ca.pem", "TOKEN_FILE": f"{_SECRETS}/token"}
    container = {
        "command": [*spec.command],
        "# LOCKSTEP_TAKEOVER: the pod before with this index is gone, so its place is free.": None,
        "env": _environment({f"LOCKSTEP_{name}": value for name, value in told.items()} | pairs(spec.env)),
        **_resources(spec.worker_cpu, spec.worker_memory, gpus=int(spec.worker_gpus)),
    }
    placement: Object = {"nodeSelector": pairs(spec.worker_node)} if spec.worker_node else {}
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}] if int(spec.worker_gpus) else []
    if spec.spot:
        placement |= _on_nodes([{"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]} for key, value in _SPOT.items()])
        tolerations += [{"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"} for key, value in _SPOT.items()]
    return _pod(spec, "worker", container, pairs(spec.mount), {"tolerations": _LOST + tolerations, **placement}, grace_s=30)


def _pod(spec: KubernetesSpec, role: str, container: Object, volumes: Mapping[str, str], placement: Object, *, grace_s: int) -> Object:
    """Returns the template of a role's pods. `volumes`: the path of each claim."""
    user = int(spec.user)
    identity = {"runAsNonRoot": user != 0, "runAsUser": user, "fsGroup": user, "seccompProfile": {"type": "RuntimeDefault"}}
    # Each volume with where it is mounted.
    mounted: list[tuple[Object, Object]] = [
        ({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}, {"mountPath": path})
        for number, (claim, path) in enumerate(volumes.items())
    ]
    mounted += [({"name": "secrets", **_secrets(spec, role)}, {"mountPath": _SECRETS, "readOnly": True})]
    mounted += [({"name": "tmp", "emptyDir": {}}, {"mountPath": _TEMPORARY})]
    mounted += [({"name": "shm", "emptyDir": {"medium": "Memory"}}, {"mountPath": "/dev/shm"})] if role == "worker" else []
    own = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    given = {"envFrom": [{"secretRef": {"name": spec.env_secret}}]} if spec.env_secret else {}
    mounts = [{"name": volume["name"], **mount} for volume, mount in mounted]
    pod = {
        **({"restartPolicy": "Never"} if spec.is_jobset or role == "worker" else {}),
        "terminationGracePeriodSeconds": grace_s,
        "# Else a program is process 1, which SIGTERM does not end, nor a role that is still starting.": None,
        "shareProcessNamespace": True,
        "# It asks nothing of Kubernetes.": None,
        "automountServiceAccountToken": False,
        "# The group owns the secrets, which nobody else may read.": None,
        "securityContext": identity,
        **placement,
        "containers": [{"name": role, "image": spec.image, **container, **given, "securityContext": own, "volumeMounts": mounts}],
        "volumes": [volume for volume, _ in mounted],
    }
    return {"metadata": {"labels": _labels(spec, role)}, "spec": pod}


def _secrets(spec: KubernetesSpec, role: str) -> Object:
    own = f"{spec.name}-{role}"
    if not spec.cert_manager:
        return {"secret": {"secretName": own, "defaultMode": _PRIVATE}}
    # A worker has no key of a server: of a server's secret it is given the authority alone.
    files, issued = (["ca.crt"], f"{spec.name}-chief-tls") if role == "worker" else ([*_TLS_FILES], f"{own}-tls")
    certificate = {"name": issued, "items": [{"key": file, "path": _TLS_FILES[file]} for file in files]}
    return {"projected": {"defaultMode": _PRIVATE, "sources": [{"secret": certificate}, {"secret": {"name": own}}]}}


def _certificate(spec: KubernetesSpec, role: str) -> Object:
    kind, _, issuer = spec.cert_manager.rpartition("/")
    hosts = hosts_of(spec)[1:] if role == "ps" else hosts_of(spec)[:1]
    names = {"dnsNames": [*hosts, "localhost"], "ipAddresses": ["127.0.0.1"], "uris": [f"lockstep://{spec.name}/{role}"]}
    given = {"secretName": f"{spec.name}-{role}-tls", "issuerRef": {"kind": kind or "Issuer", "name": issuer}}
    settings = {**given, **names, "usages": ["digital signature", "server auth", "client auth"]}
    return _object(spec, "cert-manager.io/v1", "Certificate", f"{spec.name}-{role}", settings)


def _disruption_budget(spec: KubernetesSpec) -> Object:
    roles = [{"key": "app.kubernetes.io/component", "operator": "In", "values": ["ps", "chief"]}]
    number = {"# Of parameter servers and chief, a drain takes one at a time.": None, "minAvailable": spec.ps}
    selector = {"selector": {"matchLabels": _labels(spec), "matchExpressions": roles}}
    settings = {**number, "unhealthyPodEvictionPolicy": "AlwaysAllow", **selector}
    return _object(spec, "policy/v1", "PodDisruptionBudget", f"{spec.name}-servers", settings)


def _network_policy(spec: KubernetesSpec) -> Object:
    own = {"podSelector": {"matchLabels": _labels(spec)}}
    metrics = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": spec.metrics_namespace}}}
    ways_in = {PORT: own, **({METRICS_PORT: metrics} if spec.metrics_namespace else {})}
    ingress = [{"from": [who], "ports": [{"port": port}]} for port, who in ways_in.items()]
    settings = {"# Nobody but the cluster's own pods may reach it.": None, **own, "policyTypes": ["Ingress"], "ingress": ingress}
    return _object(spec, "networking.k8s.io/v1", "NetworkPolicy", spec.name, settings)


def _object(spec: KubernetesSpec, version: str, kind: str, name: str, settings: Object) -> Object:
    namespace = {"namespace": spec.namespace} if spec.namespace else {}
    metadata = {"name": name, **namespace, "labels": _labels(spec)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": settings}


def _labels(spec: KubernetesSpec, role: str = "") -> Object:
    common = {"app.kubernetes.io/name": "lockstep", "app.kubernetes.io/instance": spec.name}
    return {**common, "app.kubernetes.io/component": role} if role else common


def _text(number: int | Verbatim) -> str:
    """Returns a number as the text that a variable has."""
    return Verbatim(f'"{number}"') if isinstance(number, Verbatim) else str(number)


def _environment(told: Mapping[str, Any]) -> list[Object]:
    told = {"HOME": _TEMPORARY, **told}
    return [{"name": name, "value" if isinstance(value, str) else "valueFrom": value} for name, value in told.items()]


def _resources(cpu: str, memory: str, *, gpus: int = 0) -> Object:
    # A limit of processors would stop a process in the middle of a step; memory is what a server reckons with.
    limits = {**({"memory": memory} if memory else {}), **({"nvidia.com/gpu": gpus} if gpus else {})}
    requests = {**({"cpu": cpu} if cpu else {}), **limits}
    return {"resources": {"requests": requests, "limits": limits}} if requests else {}


def _on_nodes(terms: list[Object]) -> Object:
    """Returns the affinity to nodes of which one of the terms is true."""
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}}
