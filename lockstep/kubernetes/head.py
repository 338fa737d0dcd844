"""What to do with manifests, as commands: secrets, start, looking at it, end. Knows objects' names; runs nothing."""

from lockstep.kubernetes.objects import PAGE_PORT, hosts_of
from lockstep.kubernetes.spec import KubernetesSpec

# From then on Kubernetes has all that the objects use, without additions of others.
LEAST_MINOR = 27
_SERVER_FILES = " --from-file=ca.pem --from-file=cert.pem={role}.pem --from-file=cert.key={role}.key --from-file=tokens"


def commands_of(spec: KubernetesSpec, file: str, *, is_chart: bool = False) -> str:
    """Returns the commands that start a cluster from this file of manifests, or chart, and those that look at it and end it."""
    space = f" -n {spec.namespace}" if spec.namespace else ""
    kubectl = f"kubectl{space}"
    begin, end = (f"helm{space} install {spec.name} {file}", f"helm{space} uninstall {spec.name}")
    if not is_chart:
        begin, end = f"{kubectl} apply -f {file}", f"{kubectl} delete -f {file}"
    chief = f"{'job' if spec.is_jobset else 'pod'}/{spec.name}-chief-0"
    done = {
        "job": f"Complete job/{spec.name}-worker",
        "jobset": f"Completed jobset/{spec.name}",
        "trainjob": f"Complete trainjob/{spec.name}",
    }
    hosts = "".join(f" --host {host}" for host in hosts_of(spec))
    files = {role: " --from-file=tokens" if spec.cert_manager else _SERVER_FILES.format(role=role) for role in ("ps", "chief")}
    files["worker"] = " --from-file=ca.pem" * (not spec.cert_manager) + " --from-file=token=worker.token"
    lines = [
        *([f"kubectl create namespace {spec.namespace}"] if spec.namespace else []),
        f"lockstep certs create {spec.name}-certs --cluster {spec.name}{hosts}",
        f"cd {spec.name}-certs",
        *(f"{kubectl} create secret generic {spec.name}-{role}{given}" for role, given in files.items()),
        "cd -",
        begin,
        f"{kubectl} exec {chief} -- lockstep why",
        f"{kubectl} port-forward {chief} {PAGE_PORT}    # its page: https://localhost:{PAGE_PORT}, with the token of observer.token",
        f"{kubectl} wait --timeout=-1s --for=condition={done[spec.kind]}",
        end + "    # with the claim, and so with the checkpoints" * bool(spec.checkpoint_size),
    ]
    return "\n".join(lines)


def head_of(spec: KubernetesSpec, file: str) -> str:
    """Returns the comment in front of the manifests."""
    place = f" All servers write to the volume of {spec.checkpoint_claim} (ReadWriteMany)." if spec.checkpoint_claim else ""
    version = {"job": f"1.{LEAST_MINOR}", "jobset": "1.29 with JobSet", "trainjob": "1.29 with Kubeflow Trainer"}[spec.kind]
    lines = [
        f"Made by `lockstep k8s render`, for Kubernetes {version} or newer. What is lost starts again, and training continues.",
        "",
        *(f"  {line}" for line in commands_of(spec, file).splitlines()),
        "",
        "Each role is given its own secret: a worker has no key of a server and no token but its own. Put ca.key away.",
        "To change tokens, replace `tokens` in both servers' secrets: they are read again by themselves." + place,
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)
