"""The one table of options: flag, variable, type, default, words, and which programs take it. Knows texts; reads no file or environment.

To add an option, write its entry below and read it where it counts: `given[MAX_STEPS]`. Parsers, --help, LOCKSTEP_* variables and what a
launcher passes on to its roles follow from the entry.
"""

import argparse
import enum
import math
import re
import shlex
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.merging import MEAN, MergeSpec, merge_of
from ps_protocol.model.misspelling import did_you_mean
from ps_protocol.model.policy import KINDS, MAX_GRACE_S, MAX_REPLICAS, MAX_TOKENS, PolicyName, PolicySpec, TokenMode, TooStale, users_text
from ps_protocol.security.options import Security, check_token

T = TypeVar("T")
D = TypeVar("D")
Member = TypeVar("Member", bound=enum.Enum)

DEFAULT_ADDRESS = "127.0.0.1:0"
# The words of `ps_protocol.roles.checkpoint.Durability`, which imports NumPy.
DURABILITIES = ("none", "interval", "step")
LOG_FORMATS = ("text", "json")
_MAX_SHOWN, _MAX_DIGITS = 40, 20
_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no")


class Program(enum.Enum):
    """The programs that take options. A launcher passes the roles' options on to them; only launchers ignore the environment."""

    SERVER = "server"
    CHIEF = "chief"
    UP = "up"
    CHANGE = "policy"
    CALLER = "caller"


SERVER, CHIEF, UP, CHANGE, CALLER = Program
_ROLES, _ALL_BUT_UP = (SERVER, CHIEF), (SERVER, CHIEF, CALLER)


@light_dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """What may be given: how its text is read, and what holds without one."""

    parse: Callable[[str], T]
    default: T


@light_dataclass(frozen=True, slots=True, eq=False)
class Option(Generic[T]):
    """One option. `usage`: its flag, and what that takes; a switch takes nothing. `otherwise`: what holds without it, in words.

    `variable_name`: None: LOCKSTEP_ and the name; empty: there is none. `needs_place`: it makes no sense without --checkpoint-dir.
    `is_usual`: --help has it, and not only --help-all. `is_of_machine`: it is about the machine and not about one cluster, so a launcher
    lets the variable reach its processes.
    """

    usage: str
    words: str
    programs: tuple[Program, ...]
    kind: Kind[T]
    otherwise: str = ""
    group: str = ""
    variable_name: str | None = None
    has_flag: bool = True
    is_usual: bool = False
    needs_place: bool = False
    is_of_machine: bool = False

    @property
    def default(self) -> T:
        """Its value where it is not given."""
        return self.kind.default

    @property
    def flag(self) -> str:
        """Its name on a command line."""
        return self.usage.partition(" ")[0]

    @property
    def metavar(self) -> str:
        """What the flag takes, as --help names it; empty: nothing."""
        return self.usage.partition(" ")[2]

    @property
    def key(self) -> str:
        """Its name in Python."""
        return self.flag[2:].replace("-", "_")

    @property
    def variable(self) -> str:
        """Its name in the environment; empty: it has none."""
        if self.programs == (UP,):
            return ""
        return f"LOCKSTEP_{self.key.upper()}" if self.variable_name is None else self.variable_name

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return not self.metavar

    def help_text(self, *, has_variable: bool, default: str = "") -> str:
        """Returns words, variable and default, for argparse. `default`: empty: that of the table."""
        variable = f" [{self.variable}{'=1' * self.is_switch}]" if has_variable and self.variable else ""
        default = default or default_text(self)
        return (f"{self.words}{variable}" + (f" (default: {default})" if default else "")).replace("%", "%%")


def default_text(option: Option[Any]) -> str:
    """Returns the default of an option in words; empty: there is none."""
    return option.otherwise or ("" if option.default is None or option.is_switch else text_of(option.default))


class Given:
    """The options given to a process: each by its flag, else its variable, else its default. Checks a text when it is read."""

    def __init__(self, flags: Mapping[str, object], environment: Mapping[str, str]) -> None:
        self._flags = flags
        self._environment = environment

    def __contains__(self, option: Option[Any]) -> bool:
        """Whether the option was given, by flag or variable."""
        return bool(self.source(option))

    def __getitem__(self, option: Option[T]) -> T:
        """Returns the value. Raises InvalidSpec, which names the flag or the variable, for a text that means nothing."""
        source = self.source(option)
        if not source:
            return option.default
        text = self._text(option)
        try:
            return option.kind.parse(text)
        except ValueError as error:
            raise InvalidSpec(f"{source}: got {text[:_MAX_SHOWN]!r}, want {error}") from None

    def for_fields(self, config: type, *programs: Program) -> dict[str, Any]:
        """Returns the values of those options of these programs that have the name of a dataclass's field."""
        names = {one.name for one in fields(config)}
        return {one.key: self[one] for one in options_of(*programs) if one.key in names}

    def source(self, option: Option[Any]) -> str:
        """Returns the flag or the variable that says it; empty: neither does."""
        if self._flags.get(option.key) is not None:
            return option.flag
        return option.variable if self._environment.get(option.variable, "").strip() else ""

    def flag_of(self, option: Option[Any]) -> str | None:
        """Returns the text of the flag; None if there is no flag. The environment does not count."""
        text = self._flags.get(option.key)
        return None if text is None else str(text)

    def _text(self, option: Option[Any]) -> str:
        text = self.flag_of(option)
        return self._environment[option.variable].strip() if text is None else text


_INVALID_CHOICE = re.compile(r"(.*invalid choice: '(.*)') \(choose from (.*)\)")


class _ShowAll(argparse.Action):
    """Prints the help with all flags, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        if isinstance(parser, Parser):
            parser.folded.clear()
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Shows the usual flags and examples for --help, and all flags for --help-all. Flags cannot be shortened.

    Raises InvalidSpec for arguments that a program does not take, in one line, with the nearest flag for a misspelt one.
    """

    def __init__(self, *, prog: str, usage: str, description: str, examples: Sequence[str], epilog: str | None = None) -> None:
        super().__init__(prog=prog, usage=usage, description=description, epilog=epilog, allow_abbrev=False, add_help=False)
        self.examples = examples
        # What only --help-all explains.
        self.folded: list[argparse.Action] = []
        self.add_argument("-h", "--help", action="help", help="show this help")
        # The help itself names it, where flags are left out.
        self.add_argument("--help-all", action=_ShowAll, nargs=0, help=argparse.SUPPRESS)

    def format_help(self) -> str:
        """Returns the text of --help."""
        words = [(action, action.help) for action in self.folded]
        for action in self.folded:
            action.help = argparse.SUPPRESS
        text = super().format_help()
        for action, said in words:
            action.help = said
        if words:
            flags = " ".join(action.option_strings[-1] for action, _ in words)
            width = max(40, shutil.get_terminal_size().columns - 2)
            text += f"\n{textwrap.fill(f'--help-all also explains: {flags}', width, subsequent_indent='  ', break_on_hyphens=False)}\n"
        return text + "".join(["\nexamples:\n", *(f"  {one}\n" for one in self.examples)] if self.examples else [])

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing the usage and ending the process."""
        if wrong := _INVALID_CHOICE.fullmatch(message):
            meant = did_you_mean(wrong[2], re.findall(r"[\w-]+", wrong[3]))
            message = f"{wrong[1]}{meant}" if meant else message
        raise InvalidSpec(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses all arguments. Fails for an unknown one."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            hint = _where_else(flag) or did_you_mean(flag, self._option_string_actions)
            self.error(f"no such argument: {' '.join(unknown)}{hint}")
        return known, []


def _where_else(flag: str) -> str:
    """Returns which program takes a flag whose variable reaches it from a launcher's environment; empty: none does."""
    found = next((one for one in TABLE if one.flag == flag and one.is_of_machine), None)
    return f"; the {found.programs[0].value} takes it, also from the variable {found.variable}" if found else ""


def read_options(
    program: Program,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    prog: str,
    description: str,
    examples: Sequence[str] = (),
    epilog: str | None = None,
) -> Given:
    """Returns the options given to a role. Raises InvalidSpec for arguments that it doesn't take."""
    parser = Parser(prog=prog, usage=f"{prog} [flags]", description=description, examples=examples, epilog=epilog)
    add_options(parser, options_of(program))
    return Given(split_range(vars(parser.parse_args(arguments))), environment)


def split_range(flags: Mapping[str, object]) -> Mapping[str, object]:
    """Returns flags with a range of workers as its end, and its begin as the number that a step needs at least. Raises InvalidSpec."""
    begin, colon, end = str(flags.get(NUM_WORKERS.key) or "").partition(":")
    if not colon:
        return flags
    if not (begin.isdecimal() and end.isdecimal() and 1 <= int(begin) <= int(end)):
        raise InvalidSpec(f"{NUM_WORKERS.flag}: got {flags[NUM_WORKERS.key]!r}, want a number, or LEAST:MOST")
    if flags.get(MIN_REPLICAS.key) is not None:
        words = f"{NUM_WORKERS.flag} {begin}:{end} and {MIN_REPLICAS.flag}"
        raise InvalidSpec(f"{words} say the same in two ways; give one of them")
    return {**flags, NUM_WORKERS.key: end, MIN_REPLICAS.key: begin}


def add_options(
    parser: argparse.ArgumentParser,
    options: Sequence[Option[Any]],
    *,
    has_variables: bool = True,
    are_folded: bool = True,
    defaults: Mapping[Option[Any], str] | None = None,
) -> None:
    """Adds flags to a parser, in the table's groups; texts stay texts, for `Given`.

    `has_variables`: --help names them. `are_folded`: --help leaves out those that are not usual. `defaults`: the program's own, in words.
    """
    groups: dict[str, Any] = {"": parser}
    for option in options:
        if not option.has_flag:
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        words = option.help_text(has_variable=has_variables, default=(defaults or {}).get(option, ""))
        if option.is_switch:
            action = groups[option.group].add_argument(option.flag, action="store_const", const="1", help=words)
        else:
            action = groups[option.group].add_argument(option.flag, metavar=option.metavar, help=words)
        if are_folded and not option.is_usual and isinstance(parser, Parser):
            parser.folded.append(action)


def options_of(*programs: Program, group: str | None = None) -> tuple[Option[Any], ...]:
    """Returns the options that all of these programs take, in the table's order; `group`: only the options of this group."""
    return tuple(one for one in TABLE if {*programs} <= {*one.programs} and group in (None, one.group))


def cluster_variables() -> tuple[str, ...]:
    """Returns the variables that describe one cluster to roles: those of a launcher's shell may be about another one."""
    return tuple(dict.fromkeys(one.variable for one in TABLE if {*_ROLES} & {*one.programs} and one.variable and not one.is_of_machine))


def _stripped(text: str) -> str:
    return text.strip()


def _page(text: str) -> str:
    return "" if text.strip() == "none" else text.strip()


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",")) if text.strip() else ()


def parse_words(text: str) -> tuple[str, ...]:
    """Returns the words of a text as a shell divides it. Raises ValueError."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"words as in a shell: {error}") from error


def _whole(default: D, *, least: int, most: int | None = None) -> "Kind[int | D]":
    def parse(text: str) -> int:
        try:
            value = int(text) if len(text) <= _MAX_DIGITS else None
        except ValueError:
            value = None
        if value is None or value < least or (most is not None and value > most):
            digits = f", of {_MAX_DIGITS} digits at most" if len(text) > _MAX_DIGITS else ""
            raise ValueError(f"a whole number >= {least}{digits}" if most is None else f"a whole number from {least} to {most}")
        return value

    return Kind(parse, default)


def _positive_seconds(default: float) -> "Kind[float]":
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise ValueError("a number of seconds > 0")
        return value

    return Kind(parse, default)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_GRACE_S:
        raise ValueError(f"a number of seconds from 0 to {MAX_GRACE_S}")
    return value


def _merge(text: str) -> MergeSpec:
    try:
        return merge_of(text)
    except InvalidSpec as error:
        raise ValueError(f"a way to merge ({error.message})") from error


def _one_of(default: str, words: Sequence[str]) -> "Kind[str]":
    def parse(text: str) -> str:
        if text.strip().lower() not in words:
            raise ValueError(" or ".join(words))
        return text.strip().lower()

    return Kind(parse, default)


def _member_like(default: Member) -> "Kind[Member]":
    members = type(default)
    word = _one_of("", [member.name.lower() for member in members])
    return Kind(lambda text: members[word.parse(text).upper()], default)


def parse_truth(text: str) -> bool:
    """Returns the bool of a yes or no. Raises ValueError."""
    word = text.strip().lower()
    if word not in (*_TRUE, *_FALSE):
        raise ValueError("1 or 0")
    return word in _TRUE


def text_of(value: object) -> str:
    """Returns the text by which an option is given this value."""
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- The table, in the order of --help.

_POLICY = (CHIEF, UP, CHANGE)
_KEPT = (CHIEF, UP)
POLICY_GROUP = "coordination of the workers"
_KEPT_GROUP = "checkpoints and recovery"
SECURITY_GROUP = "security"
_SWITCH, _TEXT, _PATH, _LIST = Kind(parse_truth, False), Kind(_stripped, ""), Kind(_path, None), Kind[tuple[str, ...]](_parts, ())
_AS_IT_IS = Kind(str, "")

CHIEF_ADDRESS = Option(
    "--chief ADDRESS",
    "address of the chief, host:port or unix:/path; without it, that of the one cluster that `lockstep up` runs here",
    (CALLER,),
    _TEXT,
    is_usual=True,
)
INDEX = Option(
    "--index I",
    "which parameter server this is, from 0",
    (SERVER,),
    _whole(None, least=0, most=(1 << 32) - 1),
    variable_name="LOCKSTEP_PS_INDEX",
    is_usual=True,
)
WORKER_INDEX = Option(
    "--worker-index I", "which worker this is, from 0", (CALLER,), _whole(None, least=0), otherwise="the chief gives it one", has_flag=False
)
ADDRESS = Option(
    "--address ADDRESS",
    "where to listen, host:port or unix:/path; port 0: any free one",
    _ROLES,
    _AS_IT_IS,
    otherwise="127.0.0.1:0",
    is_usual=True,
)
ADVERTISE = Option(
    "--advertise ADDRESS",
    "address at which workers that have lost their chief find this one; port 0: the port of --address",
    (CHIEF,),
    _AS_IT_IS,
    otherwise="the address that it listens at; if that is all addresses, the one by which this machine reaches the parameter servers",
)
PS_ADDRESSES = Option(
    "--ps ADDRESSES", "addresses of the parameter servers in order of index, separated by commas", (CHIEF,), _LIST, is_usual=True
)
NUM_PS = Option("--ps N", "number of parameter servers", (UP,), _whole(None, least=1), otherwise="1", is_usual=True)
STANDBY_ADDRESSES = Option(
    "--standbys ADDRESSES",
    "addresses of the parameter servers' standbys in order of index, separated by commas; an empty part: no standby",
    (CHIEF,),
    _LIST,
    otherwise="none",
)
CLUSTER = Option(
    "--cluster NAME", "name of the cluster; callers of another cluster are refused", _ROLES, Kind(str, "lockstep"), is_usual=True
)
CALLED_CLUSTER = Option(
    "--cluster NAME",
    "name that the cluster there must have, so that no other one is meant",
    (CALLER,),
    _AS_IT_IS,
    otherwise="any name",
    is_usual=True,
)
EXPECTED_WORKERS = Option(
    "--workers M",
    "number of workers expected; LEAST:MOST sets --min-replicas, too",
    (CHIEF,),
    _whole(None, least=1, most=MAX_REPLICAS),
    otherwise="any number",
    variable_name="LOCKSTEP_NUM_WORKERS",
    is_usual=True,
)
NUM_WORKERS = Option(
    "--workers M",
    "number of workers; LEAST:MOST sets --min-replicas, too",
    (UP,),
    _whole(None, least=1, most=MAX_REPLICAS),
    otherwise="1",
    is_usual=True,
)
BACKUP_WORKERS = Option(
    "--backup-workers B",
    "sync: a step does not wait for the slowest B of the workers",
    (CHIEF, UP, CHANGE),
    _whole(None, least=0),
    otherwise="0",
    is_usual=True,
)
CONTRIBUTIONS = Option(
    "--replicas-to-aggregate R",
    "sync: contributions that a step needs, if not --workers minus --backup-workers; may exceed the number of workers",
    (CHIEF, UP, CHANGE),
    _whole(None, least=1, most=MAX_REPLICAS),
    otherwise="that difference; 1 without --workers",
)
MAX_STEPS = Option(
    "--max-steps N", "training finishes at this step", (CHIEF, UP), _whole(None, least=1), otherwise="when the workers do", is_usual=True
)
LEASE = Option("--lease SECONDS", "a worker that is silent for this long counts as lost", (CHIEF, UP), _positive_seconds(10.0))
REJECT_NONFINITE = Option(
    "--reject-nonfinite",
    "refuse a gradient that has infinities or NaN when it is pushed",
    (CHIEF, UP),
    _SWITCH,
    otherwise="such a gradient counts like any other",
)
MAX_MEMORY_BYTES = Option(
    "--max-memory-bytes N",
    "memory for variables, slots and contributions, without files in --table-dir",
    (SERVER,),
    _whole(None, least=1),
    otherwise="all memory of the machine",
    is_of_machine=True,
)
TABLE_DIR = Option(
    "--table-dir DIR",
    "keep the rows of tables with keys in files there, on a local disk; memory has those in use",
    (SERVER,),
    _PATH,
    otherwise="rows are in memory",
    is_of_machine=True,
)
APPLY_THREADS = Option(
    "--apply-threads N",
    "threads that share the work of a step",
    (SERVER,),
    _whole(None, least=1, most=256),
    otherwise="one for each processor that it may use, up to 8",
    is_of_machine=True,
)
DATA_PORT = Option(
    "--data-port PORT",
    "port for data sockets, on the host of --address; 0: any that is free",
    (SERVER,),
    _whole(0, least=0, most=65_535),
    is_of_machine=True,
)
POLICY = Option(
    f"--policy {'|'.join(name.name.lower() for name in PolicyName)}",
    "how workers are coordinated; may be changed while training",
    (CHIEF, UP),
    _member_like(PolicyName.SYNC),
    group=POLICY_GROUP,
    is_usual=True,
)
TOKENS = Option(
    "--tokens strict|fifo",
    "sync: strict: a token is always of the open step; fifo: the token queue of SyncReplicasOptimizer",
    _POLICY,
    _member_like(TokenMode.STRICT),
    group=POLICY_GROUP,
)
NUM_TOKENS = Option(
    "--num-tokens N",
    "fifo: number of tokens at the start; -1: as many as a step needs contributions. Each one beyond those of the first step gives a"
    " gradient that is dropped, as in SyncReplicasOptimizer",
    _POLICY,
    _whole(-1, least=-1, most=MAX_TOKENS),
    group=POLICY_GROUP,
)
STALENESS = Option(
    "--staleness S",
    "ssp: how many contributions a worker may be ahead of the slowest",
    _POLICY,
    _whole(0, least=0),
    group=POLICY_GROUP,
    is_usual=True,
)
GRACE = Option(
    "--grace SECONDS",
    "outer: how long a step that has enough contributions waits for those of the other workers",
    _POLICY,
    Kind(_seconds, 0.0),
    group=POLICY_GROUP,
)
MERGE = Option(
    "--merge HOW",
    "sync and outer: how contributions become one gradient: mean, radial_mean, or for example trimmed_mean:0.25 or bounded_mean:3",
    _POLICY,
    Kind(_merge, MEAN),
    group=POLICY_GROUP,
)
NO_LOCKING = Option(
    "--no-locking", "async: servers apply on arrival without a lock; concurrent updates may be lost", _POLICY, _SWITCH, group=POLICY_GROUP
)
MAX_STALENESS = Option(
    "--max-staleness N",
    "ssp, async and outer: a contribution is too stale if it is more than N steps old",
    _POLICY,
    _whole(None, least=0),
    otherwise="none",
    group=POLICY_GROUP,
)
TOO_STALE = Option(
    "--too-stale drop|scale",
    "what to do with a contribution beyond --max-staleness: drop it, or apply it with weight 1 / (1 + excess)",
    _POLICY,
    _member_like(TooStale.DROP),
    group=POLICY_GROUP,
)
CHECKPOINT_DIR = Option(
    "--checkpoint-dir PLACE",
    "where checkpoints are kept: a directory or a URL, the same for all roles",
    (SERVER, CHIEF, UP),
    _TEXT,
    otherwise="none: there are no checkpoints",
    group=_KEPT_GROUP,
    is_usual=True,
)
DURABILITY = Option(
    "--durability none|interval|step",
    "what the loss of a parameter server may cost: all steps, those since the last checkpoint, or none",
    _KEPT,
    _one_of("interval", DURABILITIES),
    group=_KEPT_GROUP,
    needs_place=True,
)
CHECKPOINT_INTERVAL = Option(
    "--checkpoint-interval SECONDS",
    "time between checkpoints",
    _KEPT,
    _positive_seconds(60.0),
    group=_KEPT_GROUP,
    needs_place=True,
    is_usual=True,
)
CHECKPOINT_STEPS = Option(
    "--checkpoint-steps N",
    "steps between checkpoints",
    _KEPT,
    _whole(None, least=1),
    otherwise="by time alone",
    group=_KEPT_GROUP,
    needs_place=True,
)
FULL_EVERY = Option(
    "--full-every N",
    "every Nth checkpoint is full, those between have the rows that changed",
    _KEPT,
    _whole(1, least=1),
    group=_KEPT_GROUP,
    needs_place=True,
)
KEEP_CHECKPOINTS = Option(
    "--keep-checkpoints K",
    "how many full checkpoints are kept, each with the deltas on it",
    _KEPT,
    _whole(3, least=1),
    group=_KEPT_GROUP,
    needs_place=True,
)
RESTORE = Option(
    "--restore latest|none|TAG",
    "which checkpoint to start from, if there is one",
    _KEPT,
    Kind(_stripped, "latest"),
    group=_KEPT_GROUP,
    needs_place=True,
    is_usual=True,
)
MIN_REPLICAS = Option(
    "--min-replicas M",
    "sync: when workers are gone, a step needs only as many contributions as there are workers left, but at least M",
    _KEPT,
    _whole(None, least=1),
    otherwise="a step always needs the same number",
    group=_KEPT_GROUP,
)
RESTART_WORKERS = Option(
    "--restart-workers N",
    "how many times each worker is started again after a failure",
    (UP,),
    _whole(0, least=0),
    group=_KEPT_GROUP,
    is_usual=True,
)
WORKER_GPUS = Option("--worker-gpus N", "GPUs for each worker alone, by CUDA_VISIBLE_DEVICES", (UP,), _whole(0, least=0), variable_name="")
MAX_RESTARTS = Option(
    "--max-restarts N",
    "how many times in quick succession a chief that was killed is started again, and with checkpoints a parameter server",
    (UP,),
    _whole(5, least=0),
    group=_KEPT_GROUP,
)
TAKEOVER = Option(
    "--takeover",
    "take the parameter servers over from their present chief at once, even if it is still running",
    (CHIEF,),
    _SWITCH,
    variable_name="",
    group=_KEPT_GROUP,
)
HISTORY = Option(
    "--history DIR",
    "directory for a record of all steps that `lockstep audit DIR` checks",
    (SERVER, CHIEF, UP),
    _PATH,
    otherwise="none",
    group=_KEPT_GROUP,
)
HISTORY_MAX_BYTES = Option(
    "--history-max-bytes N",
    "how much of the history each process keeps; the oldest records go",
    (SERVER, CHIEF, UP),
    _whole(1 << 30, least=1 << 16),
    group=_KEPT_GROUP,
)
ANNOUNCE = Option("--announce FILE", "file to write the address to, once the process serves", _ROLES, _PATH, variable_name="")
PAGE = Option(
    "--page ADDRESS",
    "address of the chief's page for a browser, HOST:PORT (port 0: any that is free), or none",
    (CHIEF, UP),
    Kind(_page, None),
    otherwise="none for a chief of its own; a launcher takes a free port that only this machine reaches",
    is_usual=True,
)
ENABLE_FAILPOINTS = Option("--enable-failpoints", "for tests: do what LOCKSTEP_FAILPOINTS says", _ROLES, _SWITCH)
TENSORBOARD = Option(
    "--tensorboard DIR",
    "directory for event files that TensorBoard reads: metrics, steps per second, staleness",
    (UP,),
    _PATH,
    otherwise="none",
    is_usual=True,
)
METRICS = Option(
    "--metrics ADDRESS",
    "where to serve /metrics for Prometheus over HTTP, host:port; port 0: any free one",
    _ROLES,
    _TEXT,
    otherwise="not at all",
)
LOG_FORMAT = Option(
    "--log-format text|json",
    "how a role writes its log: lines of text, or one JSON object on each line",
    (SERVER, CHIEF, UP),
    _one_of("text", LOG_FORMATS),
    is_of_machine=True,
)
ALLOW_INSECURE_NETWORK = Option(
    "--allow-insecure-network", "listen without encryption at an address that other machines can reach", _ROLES, _SWITCH
)
TCP = Option("--tcp", "use loopback ports chosen by the system, instead of Unix sockets", (UP,), _SWITCH, variable_name="")
CHIEF_IN_PS = Option("--chief-in-ps", "run the chief in the process of parameter server 0", (UP,), _SWITCH, variable_name="")
STANDBYS = Option(
    "--standbys",
    "start a second server beside each parameter server, which takes its place if it is lost",
    (UP,),
    _SWITCH,
    variable_name="",
    is_usual=True,
)
HOSTS = Option(
    "--hosts NAME[=ADDRESS],…",
    "machines that ssh reaches by these names without a password: the first runs the chief, servers and workers take turns",
    (UP,),
    _TEXT,
    otherwise="this machine",
    variable_name="",
    is_usual=True,
)
ENGINE = Option(
    "--engine slurm|ray|skypilot",
    "whose job this is: it says which machines there are, and how many workers unless --workers does",
    (UP,),
    _TEXT,
    otherwise="none",
    variable_name="",
    is_usual=True,
)
HOST_PYTHON = Option(
    "--host-python PATH",
    "the Python that has Lockstep on each of --hosts or of the --engine",
    (UP,),
    _TEXT,
    otherwise="the path of this one",
    variable_name="",
)
HOST_DIR = Option(
    "--host-dir DIR",
    "the working directory of the workers on each of --hosts, with the program in it",
    (UP,),
    _TEXT,
    otherwise="the path of this one",
    variable_name="",
)
HOST_ENV = Option(
    "--host-env NAME,…", "variables of this environment that workers on --hosts get, too", (UP,), _LIST, otherwise="none", variable_name=""
)
TRANSPORT = Option(
    "--transport WORD",
    "how gradients and variables are transferred: auto, grpc, sockets or shared_memory",
    (CALLER,),
    Kind(_stripped, None),
    otherwise="auto",
    has_flag=False,
)
WIRE = Option(
    "--wire FORMAT",
    "how gradients and variables are encoded where they are sent, for example bfloat16, int4 or top_k:0.05",
    (CALLER,),
    Kind(_stripped, None),
    has_flag=False,
    otherwise="no encoding",
)
OTEL = Option("--otel", "make OpenTelemetry spans of a worker's steps; the program sets up an SDK", (CALLER,), _SWITCH, has_flag=False)
TAKE_PLACE = Option(
    "--takeover",
    "as a worker, take the place of any process that has this index; a launcher says so where the host of the last one is lost",
    (CALLER,),
    _SWITCH,
    has_flag=False,
)
UP_FLAGS = Option(
    "--up FLAGS",
    "the flags of `lockstep up` for the cluster that rank 0 starts in a program of torchrun or mpirun",
    (CALLER,),
    Kind[tuple[str, ...]](parse_words, ()),
    has_flag=False,
)
TOKEN = Option(
    "--token TOKEN", "the token that this process sends, alone and without its role", (CALLER,), _TEXT, group=SECURITY_GROUP, has_flag=False
)
TOKEN_FILE = Option(
    "--token-file FILE",
    "lines `role token`: who may call, and what this process sends; read again when it changes",
    _ALL_BUT_UP,
    _PATH,
    group=SECURITY_GROUP,
)
TLS = Option(
    "--tls",
    "encrypt calls; without --tls-ca, trust the system's certificate authorities",
    (CALLER,),
    Kind[bool | None](parse_truth, None),
    group=SECURITY_GROUP,
    has_flag=False,
)
TLS_CA = Option(
    "--tls-ca FILE", "certificate of the authority that signed the other processes' certificates", _ALL_BUT_UP, _PATH, group=SECURITY_GROUP
)
TLS_CERT = Option("--tls-cert FILE", "certificate of this process", _ALL_BUT_UP, _PATH, group=SECURITY_GROUP)
TLS_KEY = Option("--tls-key FILE", "private key of --tls-cert", _ALL_BUT_UP, _PATH, group=SECURITY_GROUP)
TLS_SERVER_NAME = Option(
    "--tls-server-name NAME", "name in the servers' certificates, if not the address", _ALL_BUT_UP, _TEXT, group=SECURITY_GROUP
)
VERIFY_CLIENTS = Option(
    "--verify-clients", "callers need a certificate of --tls-ca for this cluster and their role", _ROLES, _SWITCH, group=SECURITY_GROUP
)

TABLE: tuple[Option[Any], ...] = tuple(entry for entry in [*vars().values()] if isinstance(entry, Option))
SECURITY_VARIABLES = tuple(option.variable for option in TABLE if option.group == SECURITY_GROUP)


def policy_of(given: Given, *, name: PolicyName | None = None, contributions: int | None = None) -> PolicySpec:
    """Returns the policy; `name` in place of --policy. Raises InvalidSpec, also for a number that the policy has no use for."""
    name = name or given[POLICY]
    for option, parameter in _PARAMETERS.items():
        if given[option] != option.default and parameter not in KINDS[name].parameters:
            raise InvalidSpec(f"{given.source(option)}: it is for the policy {users_text(parameter)}, not {name.name.lower()}")
    if NUM_TOKENS in given and given[TOKENS] is not TokenMode.FIFO:
        raise InvalidSpec(f"{given.source(NUM_TOKENS)}: only --tokens fifo has it")
    if TOO_STALE in given and given[MAX_STALENESS] is None:
        raise InvalidSpec(f"{given.source(TOO_STALE)}: give --max-staleness, beyond which a contribution is too stale")
    numbers: dict[str, Any] = {parameter: given[option] for option, parameter in _PARAMETERS.items()}
    numbers["use_locking"] = not given[NO_LOCKING]
    return PolicySpec(name=name, replicas_to_aggregate=contributions, **numbers)


def contributions_of(given: Given, policy: PolicyName, *, num_workers: int | None) -> int | None:
    """Returns how many contributions a step needs; None: no option says so. Raises InvalidSpec for numbers that contradict each other."""
    backups, required = given[BACKUP_WORKERS], given[CONTRIBUTIONS]
    for option in (BACKUP_WORKERS, CONTRIBUTIONS):
        if given[option] and not KINDS[policy].has_common_steps:
            raise InvalidSpec(f"{given.source(option)}: only sync and outer have steps of several contributions, not {policy.name.lower()}")
    if backups is None:
        return required
    flag = given.source(BACKUP_WORKERS)
    if required is not None:
        raise InvalidSpec(f"{flag} and {given.source(CONTRIBUTIONS)} say the same in two ways; give one of them")
    if num_workers is None:
        raise InvalidSpec(f"{flag}: of how many workers? nothing says how many there are; give {CONTRIBUTIONS.flag} instead")
    if backups >= num_workers:
        raise InvalidSpec(f"{flag}: got {backups}, want 0 to {num_workers - 1}: there are {num_workers} workers, and a step needs one")
    return num_workers - backups


def check_least(given: Given, policy: PolicySpec, *, num_required: int) -> None:
    """Raises InvalidSpec if a step is to need more contributions once workers are lost than before."""
    least = given[MIN_REPLICAS]
    if least is not None and not (policy.has_common_steps and least <= num_required):
        want = f"1 to {num_required}, which a step needs when no worker is lost" if policy.has_common_steps else "the policy sync or outer"
        raise InvalidSpec(f"{given.source(MIN_REPLICAS)}: got {least}, want {want}")


# The numbers of a PolicySpec by the options that give them.
_PARAMETERS: dict[Option[Any], str] = {
    TOKENS: "tokens",
    NUM_TOKENS: "num_tokens",
    STALENESS: "staleness",
    NO_LOCKING: "use_locking",
    MAX_STALENESS: "max_staleness",
    GRACE: "grace_s",
    MERGE: "merge",
    TOO_STALE: "too_stale",
}


def security_of(given: Given, *, is_server: bool = False) -> Security:
    """Returns tokens, certificates and keys. Raises InvalidSpec for parts that contradict each other."""
    token_file = given[TOKEN_FILE]
    # A server's own token is a line of its file; the variable is a caller's.
    token = "" if is_server or token_file is not None else given[TOKEN]
    if token:
        check_token(token, given.source(TOKEN))
    return Security(
        token=token,
        token_file=token_file,
        tls=None if is_server else given[TLS],
        tls_ca=given[TLS_CA],
        tls_cert=given[TLS_CERT],
        tls_key=given[TLS_KEY],
        tls_server_name=given[TLS_SERVER_NAME],
        verify_clients=is_server and given[VERIFY_CLIENTS],
    )


def check_place(given: Given) -> None:
    """Raises InvalidSpec for a flag about checkpoints that have no place."""
    for option in TABLE:
        # The environment may have options of other roles.
        if option.needs_place and given.flag_of(option) not in (None, "none") and not given[CHECKPOINT_DIR]:
            raise InvalidSpec(f"{option.flag}: where do checkpoints lie? give --checkpoint-dir too, to all roles")
