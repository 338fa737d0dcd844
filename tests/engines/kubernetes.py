"""A real Kubernetes on this machine, with a node on each host of a network, which runs what `lockstep k8s render` writes.

The API server and its controllers run here, and each host has a containerd and a kubelet. KUBERNETES_BIN is a directory with
programs of Kubernetes that are not in PATH. Pods are reached by routes, and services by a server of names here; no NetworkPolicy holds.
"""

import hashlib
import json
import os
import re
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import tarfile
import threading
import urllib.request
from contextlib import ExitStack, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.kubernetes.head import LEAST_MINOR
from tests.engines.demo import Demo, recovery
from tests.engines.network import Network, network, why_not
from tests.engines.ssh import LOCKSTEP
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

_PATH = os.pathsep.join([os.environ.get("KUBERNETES_BIN", ""), os.environ["PATH"]])
_PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl", "etcd", "containerd", "ctr", "openssl")
_PLUGINS = Path("/usr/lib/cni")
_PORT, _TOKEN, _IMAGE = 16443, "admin-of-a-test", "lockstep:test"
_WHO = f"""apiVersion: v1
kind: Config
clusters: [{{name: here, cluster: {{server: "https://10.77.0.254:{_PORT}", insecure-skip-tls-verify: true}}}}]
users: [{{name: admin, user: {{token: {_TOKEN}}}}}]
contexts: [{{name: here, context: {{cluster: here, user: admin}}}}]
current-context: here
"""
_VOLUME = """apiVersion: v1
kind: PersistentVolume
metadata: {{name: kept}}
spec: {{capacity: {{storage: 1Gi}}, accessModes: [ReadWriteMany], hostPath: {{path: {path}}}}}
"""
# What a kubelet, containerd and its plugins keep at places of their own, of which there is one on a machine.
_OWN = "/run /var/log/pods /var/log/containers /var/lib/cni"
_NODE = f"""set -e
for place in {_OWN}; do mkdir -p $place; mount -t tmpfs tmpfs $place; done
mount --bind $STATE/logs /var/log/pods
# Pods that ask for no processors would have the least part of a busy machine. This is where containerd has them all.
mkdir -p /sys/fs/cgroup/cpu/k8s.io && echo 100000 > /sys/fs/cgroup/cpu/k8s.io/cpu.shares
echo $$ > /sys/fs/cgroup/cpu/k8s.io/cgroup.procs
containerd --config $STATE/containerd.toml &
until ctr --address $STATE/c.sock version; do sleep 0.1; done
ctr --address $STATE/c.sock --namespace k8s.io images import $IMAGE
exec kubelet --config $STATE/kubelet.json --kubeconfig $KUBECONFIG --hostname-override $NAME --node-ip $ADDRESS \\
  --root-dir $STATE/kubelet --cert-dir $STATE/certs
"""
_CONTAINERD = """version = 2
root = "{state}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
address = "{state}/c.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{image}"
# Root in a container may not lower it.
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{state}/cni"
"""


class Kubernetes:
    """Nodes h1, h2 and h3."""

    survives: tuple[str, ...] = ("worker 2", "ps 1", "chief")
    ends_with: tuple[str, ...] = ()
    is_ended = False

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.net, self._directory, self._stack = stack.enter_context(network(3, directory)), directory, stack
        self._environment = {**os.environ, "PATH": _PATH, "KUBECONFIG": str(directory / "kubeconfig")}
        (directory / "kubeconfig").write_text(_WHO)
        (directory / "tokens").write_text(f"{_TOKEN},admin,admin,system:masters\n")
        image = directory / "image.tar"
        _write_image(image)
        self._start_control()
        for index, name in enumerate(self.net.names, 1):
            _write_node(state := directory / name, f"10.78.{index}.0/24")
            node = {"STATE": state, "NAME": name, "ADDRESS": self.net.address(name), "IMAGE": image}
            told = self._environment | {key: str(value) for key, value in node.items()}
            self.net.start(name, "sh", "-c", _NODE, out=directory / f"{name}.out", environment=told)
            self._route(index, name)
        _Names(stack, self.net.gateway)
        ready = ("wait", "--for=condition=Ready", "--timeout=1s", *(f"node/{name}" for name in self.net.names))
        wait_until(lambda: self._try(*ready), what="all nodes are ready", timeout_s=120)

    @staticmethod
    def why_not() -> str:
        if why := why_not():
            return why
        if missing := [program for program in _PROGRAMS if shutil.which(program, path=_PATH) is None]:
            return f"no {', '.join(missing)} in PATH or KUBERNETES_BIN; Debian has etcd-server, kubernetes-client and containerd"
        if not (_PLUGINS / "bridge").exists():
            return f"no {_PLUGINS}/bridge; Debian has it in containernetworking-plugins"
        said = subprocess.run(["kubelet", "--version"], env={"PATH": _PATH}, capture_output=True, text=True, check=True).stdout
        return "" if int(said.split(".")[1]) >= LEAST_MINOR else f"{said.strip()}; manifests are for 1.{LEAST_MINOR} or newer"

    def _start_control(self) -> None:
        state, here, who = self._directory, self.net.gateway, ("--kubeconfig", str(self._directory / "kubeconfig"))
        key = str(state / "accounts.key")
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        peers, clients = "http://127.0.0.1:12380", "http://127.0.0.1:12379"
        store = ("--data-dir", str(state / "etcd"), "--listen-client-urls", clients, "--advertise-client-urls", clients)
        self._begin("etcd", *store, "--listen-peer-urls", peers, "--unsafe-no-fsync")
        access = ("--token-auth-file", str(state / "tokens"), "--authorization-mode", "RBAC", "--service-account-key-file", key)
        issuer = ("--service-account-issuer", "https://kubernetes.default.svc", "--service-account-signing-key-file", key)
        listens = ("--etcd-servers", clients, "--bind-address", here, "--secure-port", str(_PORT), "--cert-dir", str(state / "certs"))
        nodes = ("--kubelet-preferred-address-types", "InternalIP", "--service-cluster-ip-range", "10.96.0.0/24", "--allow-privileged")
        self._begin("kube-apiserver", *listens, *access, *issuer, *nodes)
        wait_until(lambda: self._try("get", "--raw", "/readyz"), what="the API server is ready", timeout_s=120)
        lost = ("--node-monitor-grace-period", "10s", "--node-monitor-period", "1s")
        authority = ("--service-account-private-key-file", key, "--root-ca-file", str(state / "certs" / "apiserver.crt"))
        self._begin("kube-controller-manager", *who, "--leader-elect=false", *lost, *authority)
        self._begin("kube-scheduler", *who, "--leader-elect=false")
        wait_until(lambda: self._try("get", "serviceaccount", "default"), what="the controllers work", timeout_s=60)

    def _begin(self, *command: str) -> None:
        with (self._directory / f"{command[0]}.out").open("ab") as out:
            daemon = subprocess.Popen(command, env=self._environment, stdout=out, stderr=out)
        self._stack.callback(daemon.wait)
        self._stack.callback(daemon.kill)

    def _route(self, index: int, name: str) -> None:
        """Has this machine and the other nodes reach a node's pods."""
        way = ("ip", "route", "replace", f"10.78.{index}.0/24", "via", self.net.address(name))
        subprocess.run(way, check=True)
        for other in {*self.net.names} - {name}:
            subprocess.run(["nsenter", f"--net=/run/netns/lockstep-{other}", *way], check=True)

    def kubectl(self, *words: str) -> str:
        """Returns what kubectl prints."""
        return subprocess.run(["kubectl", *words], env=self._environment, capture_output=True, text=True, check=False).stdout

    def complaint(self, *words: str) -> str:
        """Returns what kubectl says of a mistake, or warns of; empty: nothing."""
        return subprocess.run(["kubectl", *words], env=self._environment, capture_output=True, text=True, check=False).stderr

    def _try(self, *words: str) -> bool:
        return subprocess.run(["kubectl", *words], env=self._environment, capture_output=True, check=False).returncode == 0

    def greet(self) -> None:
        self.kubectl("create", "job", "greeting", f"--image={_IMAGE}", "--", "sh", "-c", ":")
        assert self._try("wait", "--for=condition=Complete", "--timeout=60s", "job/greeting")
        self.kubectl("delete", "job", "greeting")

    def run(self, *flags: str, pace: float = 0.05) -> Demo:
        kept, manifests = self._directory / "kept", self._directory / "job.yaml"
        kept.mkdir()
        kept.chmod(0o777)  # pods have a user of their own
        given = [word.replace(str(kept), "/checkpoints") for word in recovery(self._directory)]
        claim = ("--checkpoint-claim", "kept", "--checkpoint-size", "1Gi")
        cluster = ("--name", "digits", "--image", _IMAGE, "--ps", "2", "--workers", "3", "--backup-workers", "1", "--max-steps", "400")
        program = ("python3", "-m", "lockstep.demo.worker", "--pace", str(pace), "--least-accuracy", "0.95")
        words = [LOCKSTEP, "k8s", "render", *cluster, *claim, *given, *flags, "--out", str(manifests), "--", *program]
        printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        (self._directory / "volume.yaml").write_text(_VOLUME.format(path=kept))
        self.kubectl("apply", "-f", str(self._directory / "volume.yaml"))
        begin, _, rest = printed.partition("lockstep certs")[2].partition("kubectl exec")
        script = f"set -e\n{LOCKSTEP} certs{begin}"
        subprocess.run(["sh", "-c", script], cwd=self._directory, env=self._environment, check=True, capture_output=True)
        (self._end,) = re.findall("kubectl (delete .*?) *#", rest)
        demo = PodsDemo(self)
        demo.num_places = lambda: len({pod["spec"]["nodeName"] for pod in self.pods("worker")})
        return demo

    def pods(self, role: str) -> list[dict[str, Any]]:
        """Those of a role, such as "ps 1", that are not about to go."""
        kind, _, index = role.partition(" ")
        asked = ("get", "pods", "-o", "json", "-l", f"app.kubernetes.io/component={kind}")
        found = [pod for pod in json.loads(self.kubectl(*asked))["items"] if "deletionTimestamp" not in pod["metadata"]]
        return [pod for pod in found if kind == "worker" or pod["metadata"]["name"].endswith(f"-{index or 0}")]

    def run_again(self) -> None:
        raise AssertionError("it ends with no host")

    def ask_to_end(self) -> None:
        self.is_ended = True
        self.kubectl(*self._end.split())

    def lose(self, role: str) -> None:
        """Loses a node that has a pod of the role: of a worker, where there is one, a node that has no other role."""
        others = {pod["spec"]["nodeName"] for other in ("chief", "ps 0", "ps 1") for pod in self.pods(other)}
        places = [pod["spec"]["nodeName"] for pod in self.pods(role)]
        self._lost = next((name for name in places if name not in others), places[0])
        self.net.kill(self._lost)

    def has_noticed(self, role: str, run: Demo) -> bool:
        """Whether the node is known to be lost; then it is removed, as the controller of a cloud does."""
        if "Unknown" not in self.kubectl("get", "node", self._lost, "-o", "jsonpath={.status.conditions[*].status}"):
            return False
        self.kubectl("delete", "node", self._lost)
        self.kubectl("delete", "pod", "--force", "--grace-period=0", "--field-selector", f"spec.nodeName={self._lost}")
        return True

    def left(self) -> list[str]:
        found = []
        for name in self.net.processes:
            words = ["ctr", "--address", str(self._directory / name / "c.sock"), "--namespace", "k8s.io", "tasks", "list", "--quiet"]
            found += subprocess.run(words, env=self._environment, capture_output=True, text=True, check=False).stdout.split()
        return found

    def is_complete(self) -> bool:
        return "True" in self.kubectl("get", "job/digits-worker", "-o", "jsonpath={.status.conditions[?(@.type=='Complete')].status}")

    def logs(self) -> list[Path]:
        """The files in which the nodes keep what containers print."""
        return [*self._directory.glob("h*/logs/*/*/*.log")]


class PodsDemo(Demo):
    """A run in pods: what all of them have printed since it began. When the workers are done, it is ended as users are told to."""

    end_words, names_restarts = "finished at step", False

    def __init__(self, engine: Kubernetes) -> None:
        super().__init__(Path(), self._ended)
        self._engine, self._text, self._read = engine, "", dict[Path, int]()

    @property
    def out(self) -> str:
        for path in self._engine.logs():
            with suppress(FileNotFoundError), path.open() as lines:  # its container may have gone
                lines.seek(self._read.get(path, 0))
                for line in iter(lines.readline, ""):
                    if not line.endswith("\n"):
                        break
                    self._text += line.split(" ", 3)[3]  # after its time, its stream, and whether it is whole
                    self._read[path] = lines.tell()
        return self._text

    def _ended(self) -> int | None:
        if not self._engine.is_ended and self.out and self._engine.is_complete():
            self._engine.ask_to_end()
        return 0 if self._engine.is_ended else None


def _write_node(state: Path, pods: str) -> None:
    """Writes how a node keeps its pods, whose addresses begin so."""
    for one in ("cni", "logs"):
        (state / one).mkdir(parents=True)
    (state / "containerd.toml").write_text(_CONTAINERD.format(state=state, image=f"docker.io/library/{_IMAGE}", plugins=_PLUGINS))
    addresses = {"type": "host-local", "dataDir": "/run/cni", "ranges": [[{"subnet": pods}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "ipam": addresses}
    (state / "cni" / "pods.conflist").write_text(json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}))
    control_groups = {"cgroupDriver": "cgroupfs", "cgroupsPerQOS": False, "enforceNodeAllocatable": [], "failCgroupV1": False}
    names = {"clusterDNS": [Network.gateway], "clusterDomain": "cluster.local", "resolvConf": ""}
    room = {"failSwapOn": False, "evictionHard": {"memory.available": "100Mi"}, "imageGCHighThresholdPercent": 100}
    open_to_all = {
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
    }
    often = {"nodeStatusUpdateFrequency": "1s", "syncFrequency": "5s"}
    kubelet = {"containerRuntimeEndpoint": f"unix://{state}/c.sock", **control_groups, **names, **room, **open_to_all, **often}
    kind = {"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration"}
    (state / "kubelet.json").write_text(json.dumps(kind | kubelet))


def _write_image(path: Path) -> None:
    """Writes an image that has this Python, Lockstep as it lies here, what that needs, the digits, and a shell.

    Without a command of its own it waits until it is asked to end, as a pod's first container does.
    """
    names, base, own = ["lockstep-ps", "scikit-learn"], Path(sys.base_prefix), Path(sys.prefix)
    for name in names:  # it grows
        needed = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in metadata.requires(name) or () if "extra ==" not in text]
        names += [one for one in needed if one not in names]
    parts = [Path(str(file.locate())) for name in names for file in metadata.files(name) or ()]
    parts += [*base.glob("bin/python3*"), *base.glob("lib/libpython*.so*"), *base.glob("lib/python3*")]
    parts += [ROOT / one for one in ("lockstep", "chief", "ps_server", "ps_protocol", "worker_client")]
    parts += [*own.glob("bin/python*"), own / "pyvenv.cfg"]
    files = {Path(os.path.normpath(one)) for part in parts for one in [part, *part.rglob("*")] if one.is_file() or one.is_symlink()}
    left_out = {"test", "tests", "idlelib", "ensurepip", "tkinter"}
    files = {one for one in files if one.suffix != ".a" and not left_out & {*one.parts}}
    files = {one for one in files if not (base in one.parents and "site-packages" in one.parts)}
    binaries = [*(one for one in files if ".so" in one.suffixes), Path(sys.executable).resolve(), Path("/bin/sh")]
    said = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=False).stdout
    libraries = {Path(os.path.normpath(found)) for found in re.findall(r"(/\S+) \(0x", said)} - files
    with tarfile.open(layer := path.with_name("layer.tar"), "w") as tar:
        for file in files:
            tar.add(file)
        tar.dereference = True
        for file in {*libraries, Path("/bin/sh")}:
            tar.add(file)
    with layer.open("rb") as read:
        digest = hashlib.file_digest(read, "sha256").hexdigest()
    wait = "import signal as s; s.pthread_sigmask(s.SIG_BLOCK, [s.SIGTERM]); s.sigwait([s.SIGTERM])"
    run = {"Env": [f"PATH={own / 'bin'}:/bin"], "Entrypoint": ["python3", "-ISc", wait]}
    about = {"architecture": "amd64", "os": "linux", "config": run, "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]}}
    path.with_name("config.json").write_text(json.dumps(about))
    named = [{"Config": "config.json", "RepoTags": [_IMAGE], "Layers": [layer.name]}]
    path.with_name("manifest.json").write_text(json.dumps(named))
    with tarfile.open(path, "w") as tar:
        for one in ("manifest.json", "config.json", layer.name):
            tar.add(path.with_name(one), one)
    layer.unlink()


class _Names(threading.Thread):
    """Answers pods what the addresses of headless services and their pods are, as the DNS of a cluster does."""

    def __init__(self, stack: ExitStack, address: str) -> None:
        super().__init__(daemon=True)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 53))
        self._api, self._context = f"https://{address}:{_PORT}/api/v1/endpoints", ssl._create_unverified_context()
        stack.callback(self.join)
        stack.callback(self._socket.sendto, b"", (address, 53))  # ends it
        self.start()

    def run(self) -> None:
        with self._socket:
            while query := (received := self._socket.recvfrom(4096))[0]:
                with suppress(OSError, IndexError):
                    self._socket.sendto(self._answer(query), received[1])

    def _answer(self, query: bytes) -> bytes:
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode().lower())
            at += 1 + query[at]
        is_a = query[at + 1 : at + 3] == b"\0\1"
        found = self._addresses().get(".".join(labels))
        addresses = (found or []) if is_a else []
        records = b"".join(b"\xc0\x0c\0\1\0\1" + struct.pack("!IH", 1, 4) + socket.inet_aton(one) for one in addresses)
        flags = 0x8580 | (0 if found else 3)
        return query[:2] + struct.pack("!5H", flags, 1, len(addresses), 0, 0) + query[12 : at + 5] + records

    def _addresses(self) -> dict[str, list[str]]:
        request = urllib.request.Request(self._api, headers={"Authorization": f"Bearer {_TOKEN}"})
        names: dict[str, list[str]] = {}
        with urllib.request.urlopen(request, context=self._context, timeout=5) as reply:
            for one in json.load(reply)["items"]:
                service = f"{one['metadata']['name']}.{one['metadata']['namespace']}.svc.cluster.local"
                for address in [found for subset in one.get("subsets") or () for found in subset.get("addresses") or ()]:
                    names.setdefault(service, []).append(address["ip"])
                    if "hostname" in address:
                        names[f"{address['hostname']}.{service}"] = [address["ip"]]
        return names
