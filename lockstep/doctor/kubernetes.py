"""Checks whether kubectl reaches a Kubernetes that takes what `lockstep k8s render` writes. Asks its API server; changes nothing there."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator

from lockstep.doctor.findings import Finding, fail, ok
from lockstep.kubernetes.head import LEAST_MINOR

_MADE = (
    "services",
    "secrets",
    "persistentvolumeclaims",
    "statefulsets.apps",
    "jobs.batch",
    "poddisruptionbudgets.policy",
    "networkpolicies.networking.k8s.io",
)
# What some flags of `lockstep k8s render` need, by its group of the API.
_ADDED = {"jobset.x-k8s.io": "--as jobset", "trainer.kubeflow.org": "--as trainjob", "cert-manager.io": "--cert-manager"}
_ANSWER_S = 10


def kubernetes_findings() -> Iterator[Finding]:
    """Yields findings about the cluster of kubectl's context: whether it answers, its version, who may create what, and what it adds."""
    if shutil.which("kubectl") is None:
        yield fail("kubectl", "is not in PATH", "install it: manifests of `lockstep k8s render` go to Kubernetes by it")
        return
    code, text, complaint = _kubectl("get", "--raw", "/version")
    if code:
        yield fail("kubectl", complaint, "choose a cluster that answers: kubectl config get-contexts")
        return
    version = json.loads(text)
    name, is_old = version["gitVersion"], int(re.sub(r"\D", "", version["minor"])) < LEAST_MINOR  # some say "28+"
    advice = f"manifests of `lockstep k8s render` need 1.{LEAST_MINOR} or newer"
    yield fail("kubernetes", name, advice) if is_old else ok("kubernetes", name)
    if refused := [kind for kind in _MADE if _kubectl("auth", "can-i", "create", kind)[0]]:
        advice = "choose another namespace or user of kubectl, or ask for the right"
        yield fail("permissions", f"you may not create {', '.join(refused)}", advice)
    else:
        yield ok("permissions", "you may create all that is rendered, in the namespace of kubectl")
    groups = {group["name"] for group in json.loads(_kubectl("get", "--raw", "/apis")[1] or '{"groups": []}')["groups"]}
    yield ok("additions", ", ".join(f"{flag} {'works' if group in groups else 'does not'}" for group, flag in _ADDED.items()))


def _kubectl(*words: str) -> tuple[int, str, str]:
    """Returns its exit code, what it printed, and its last words if it failed."""
    ended = subprocess.run(["kubectl", f"--request-timeout={_ANSWER_S}s", *words], capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout, (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
