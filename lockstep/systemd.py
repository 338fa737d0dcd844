"""Units of systemd for the roles of a cluster on bare hosts, and the commands that install them. Knows their settings; writes no file."""

import shlex
import sys
from collections.abc import Mapping, Sequence

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.process import options
from ps_protocol.process.options import SERVER, options_of
from ps_protocol.roles.identity import parse_address

# As under `lockstep up`: a role that fails again and again stays down. A chief that was asked to end saves a checkpoint first.
_UNIT = """\
[Unit]
Description={description}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=60
StartLimitBurst=6

[Service]
{service}
Restart=on-failure
RestartSec=1
TimeoutStopSec=60
NoNewPrivileges=yes

[Install]
WantedBy=multi-user.target
"""
_LOCKED = ("ProtectSystem=strict", "ProtectHome=read-only", "PrivateTmp=yes")


@light_dataclass(frozen=True, slots=True, kw_only=True)
class SystemdSpec:
    """A cluster on bare hosts. `told`: what the chief is told, by LOCKSTEP_* variable; parameter servers are told what concerns them.

    `user` runs everything. `certs_dir`: where each host has its files of `lockstep certs create`; empty: there are none. `directory`: where
    workers run `command`; without a command there is no unit for workers.
    """

    told: Mapping[str, str]
    user: str
    certs_dir: str
    directory: str
    command: Sequence[str]

    @property
    def cluster(self) -> str:
        """The name of the cluster, with which the units' names begin."""
        return self.told.get(options.CLUSTER.variable, options.CLUSTER.default)

    @property
    def chief(self) -> str:
        """The address at which the others find the chief."""
        return self.told.get(options.ADDRESS.variable, "")

    @property
    def servers(self) -> list[str]:
        """The addresses of the parameter servers, by index."""
        return [address.strip() for address in self.told.get(options.PS_ADDRESSES.variable, "").split(",") if address.strip()]


def units_of(spec: SystemdSpec) -> dict[str, str]:
    """Returns the text of each unit by the name of its file. Raises InvalidSpec for addresses that other hosts cannot reach."""
    for flag, address in (("--address", spec.chief), *(("--ps", one) for one in spec.servers)):
        if not address or parse_address(address).is_unix:
            raise InvalidSpec(f"{flag}: got {address!r}, want where the other hosts reach it: HOST:PORT")
    variables = {option.variable for option in options_of(SERVER)}
    common = {name: text for name, text in spec.told.items() if name in variables and name != options.METRICS.variable}
    servers = {
        f"ps-{index}": _role(spec, "ps", {**common, options.INDEX.variable: str(index)}, address, f"parameter server {index}")
        for index, address in enumerate(spec.servers)
    }
    found = {**servers, "chief": _role(spec, "chief", {**spec.told, options.ADVERTISE.variable: spec.chief}, spec.chief, "chief")}
    if spec.command:
        found["worker@"] = _worker(spec)
    return {f"lockstep-{spec.cluster}-{name}.service": text for name, text in found.items()}


def files_of(role: str) -> dict[str, str]:
    """Returns the files of `lockstep certs create` that a role has, by the variable that names each."""
    common = {"LOCKSTEP_TOKEN_FILE": "worker.token" if role == "worker" else "tokens", "LOCKSTEP_TLS_CA": "ca.pem"}
    return common if role == "worker" else {**common, "LOCKSTEP_TLS_CERT": f"{role}.pem", "LOCKSTEP_TLS_KEY": f"{role}.key"}


def commands_of(spec: SystemdSpec, directory: str) -> str:
    """Returns the commands that install and start the units from this directory, and those that look at the cluster."""
    places = {f"ps-{index}": address for index, address in enumerate(spec.servers)} | {"chief": spec.chief}
    lines = []
    for name, address in places.items():
        host, unit = address.rpartition(":")[0].strip("[]"), f"lockstep-{spec.cluster}-{name}.service"
        to = f"[{host}]" if ":" in host else host
        lines += [f"scp {shlex.quote(f'{directory}/{unit}')} {to}:/etc/systemd/system/", f"ssh {host} systemctl enable --now {unit}"]
    if spec.command:
        unit = f"lockstep-{spec.cluster}-worker@"
        lines += [f"scp {shlex.quote(f'{directory}/{unit}.service')} WORKER-HOST:/etc/systemd/system/"]
        lines += [f"ssh WORKER-HOST systemctl enable --now {unit}0    # the next has 1, and so on"]
    return "\n".join([*lines, f"lockstep why --chief {spec.chief}    # journalctl -u {f'lockstep-{spec.cluster}-*'!r} has their words"])


def _role(spec: SystemdSpec, role: str, told: Mapping[str, str], address: str, words: str) -> str:
    told = {**told, options.ADDRESS.variable: f"0.0.0.0:{address.rpartition(':')[2]}"}
    place = told.get(options.CHECKPOINT_DIR.variable, "")
    # The chief before has surely ended, so the next one takes its place at once.
    command = [sys.executable, "-P", "-m", *(["chief", "--takeover"] if role == "chief" else ["ps_server"])]
    paths = [path for path in (place, told.get(options.HISTORY.variable, "")) if path.startswith("/")]
    settings = [*_LOCKED, *(f"ReadWritePaths={_escaped(path)}" for path in paths)]
    return _unit(spec, f"Lockstep's {words} of {spec.cluster}", command, told, files_of(role), settings)


def _worker(spec: SystemdSpec) -> str:
    told = {"LOCKSTEP_CHIEF": spec.chief, options.CLUSTER.variable: spec.cluster, "LOCKSTEP_WORKER_INDEX": "%i", "LOCKSTEP_TAKEOVER": "1"}
    settings = [f"WorkingDirectory={_escaped(spec.directory)}"] if spec.directory else []
    return _unit(spec, f"worker %i of {spec.cluster}", spec.command, told, files_of("worker"), settings)


def _unit(
    spec: SystemdSpec, words: str, command: Sequence[str], told: Mapping[str, str], files: Mapping[str, str], settings: Sequence[str]
) -> str:
    lines = [f"User={spec.user}", *settings]
    if spec.certs_dir:
        lines += [f"LoadCredential={file}:{_escaped(spec.certs_dir)}/{file}" for file in files.values()]
    lines += [f'Environment="{name}={text if text == "%i" else _escaped(text)}"' for name, text in told.items()]
    if spec.certs_dir:
        lines += [f'Environment="{name}=%d/{file}"' for name, file in files.items()]
    words_of = " ".join(f'"{_escaped(word).replace("$", "$$")}"' for word in command)
    return _UNIT.format(description=words, service="\n".join([*lines, f"ExecStart={words_of}"]))


def _escaped(text: str) -> str:
    """Returns a text as units have it, in which % and backslashes mean something."""
    if not text.isprintable():
        raise InvalidSpec(f"{text!r}: a unit of systemd holds one line of printable characters; leave the others out")
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
