"""The documents agree with the repository: links have targets, commands and flags exist. Reads text; runs no cluster."""

import ast
import dataclasses
import functools
import inspect
import json
import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import worker_client
from ps_protocol.encodings.formats import FORMATS
from ps_protocol.model.optimizers import GRADIENT_OPTIMIZERS, SCHEDULES
from ps_protocol.model.policy import PolicyName
from ps_protocol.process.options import TABLE
from ps_protocol.roles.shard import ShardReport
from tests.repo import made_docs
from tests.support.repository import ROOT
from worker_client import strategy

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS, *sorted((ROOT / "benchmarks").glob("*.md"))]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _on(pages: Iterable[Path], find: Callable[[Path], Iterable[str]]) -> dict[str, list[str]]:
    """What `find` finds on each page, without the pages on which it finds nothing."""
    return {_name(page): found for page in pages if (found := sorted(find(page)))}


@functools.cache
def _helps() -> dict[str, str]:
    words = [sys.executable, "-m", "tests.repo.command_helps"]
    helps: dict[str, str] = json.loads(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=50, check=True).stdout)
    return helps


def _targets(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)#\s]+)[^)]*\)", _text(page))


def test_tests_that_a_page_names_are_there() -> None:
    def missing(page: Path) -> Iterable[str]:
        for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", _text(page)):
            if not (ROOT / path).exists() or f"def {name}(" not in _text(ROOT / path):
                yield f"{path}::{name}"

    assert _on(PAGES, missing) == {}


def test_links_of_the_readme_lead_to_existing_headings() -> None:
    """Of the page that the site does not have; `make check-docs` checks the others."""
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", _text(ROOT / "README.md")):
        if not target.startswith("https://"):
            path = ROOT / (target or "README.md")
            assert path.exists(), target
            assert not anchor or anchor in map(_slug, re.findall(r"^#+ (.+)$", _text(path), flags=re.MULTILINE)), anchor


def _slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"\]\([^)]*\)|[\[\]`*]", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def test_programs_in_documents_are_valid_python() -> None:
    for page in PAGES:
        for program in re.findall(r"```python\n(.*?)```", _text(page), flags=re.DOTALL):
            ast.parse(textwrap.dedent(program), filename=_name(page))


def test_every_page_can_be_reached_from_the_index() -> None:
    reached, to_follow = set(), [ROOT / "docs" / "index.md"]
    while to_follow:
        page = to_follow.pop()
        reached.add(page)
        for target in _targets(page):
            path = (page.parent / target).resolve()
            to_follow += [path] if path.suffix == ".md" and path.exists() and path not in reached else []
    lost = [_name(page) for page in DOCS if page not in reached]
    assert not lost, lost


def test_the_navigation_of_the_site_has_25_entries_at_most() -> None:
    hooks = runpy.run_path(str(ROOT / "docs/site/hooks.py"))
    home, *sections = hooks["navigation"]((ROOT / "docs/index.md").read_text(encoding="utf-8"))
    assert len(sections) > 3
    assert len(home) + sum(len(pages) for section in sections for pages in section.values()) <= 25


def test_a_page_for_users_is_in_the_navigation_and_all_of_them_have_45_000_words_at_most() -> None:
    home, *sections = runpy.run_path(str(ROOT / "docs/site/hooks.py"))["navigation"](_text(ROOT / "docs/index.md"))
    pages = {*home.values(), *(path for section in sections for pages in section.values() for page in pages for path in page.values())}
    apart = {"glossary.md", *(path for path in pages if path.startswith("contributing"))}
    ours = {str(path.relative_to(ROOT / "docs")) for path in DOCS if path.parts[-2] not in ("contributing", "decisions")}
    assert ours - apart == pages
    assert sum(len(_text(ROOT / "docs" / page).split()) for page in pages) <= 45_000


def test_pictures_are_used() -> None:
    texts = "".join(map(_text, PAGES))
    unused = [path.name for path in (ROOT / "docs" / "images").iterdir() if f"images/{path.name}" not in texts]
    assert not unused, unused


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", _text(ROOT / "Makefile"), flags=re.MULTILINE))
    assert not _on(PAGES, lambda page: set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", _text(page), flags=re.MULTILINE)) - targets)


PAGES_WITH_FLAGS = [
    ROOT / name
    for name in (
        *(f"docs/how-to/{page}.md" for page in ("running", "resume", "tls", "troubleshoot", "compression", "monitor", "watch")),
        *(f"docs/reference/{page}.md" for page in ("cli", "api")),
        *(f"docs/explanation/{page}.md" for page in ("policies", "reliability", "performance")),
        "docs/tutorials/first-cluster.md",
        "benchmarks/README.md",
        "README.md",
    )
]


def test_flags_exist() -> None:
    known = {flag for text in _helps().values() for flag in re.findall(r"--[a-z][a-z-]+", text)}
    sbatch = {"--nodes", "--ntasks-per-node", "--no-kill", "--requeue", "--open-mode", "--signal", "--partition", "--time"}
    foreign = sbatch | {
        "--gpus-per-task",
        "--nproc-per-node",
        "--nnodes",
        "--help-all",
        "--build",
        "--scale",
        "--volumes",
        "--its",
        "--version",
        "--logdir",
    }  # of docker, TensorBoard, an example, `lockstep`
    assert not _on(PAGES_WITH_FLAGS, lambda page: set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", _text(page))) - known - foreign)


def test_every_variable_that_the_code_reads_is_documented() -> None:
    text = _text(ROOT / "docs" / "reference" / "cli.md")
    packages = ("ps_protocol", "ps_server", "chief", "worker_client", "lockstep")
    sources = (path for package in packages for path in (ROOT / package).rglob("*.py"))
    read = {name for path in sources for name in re.findall(r"\bLOCKSTEP_[A-Z_]+\b", _text(path))}
    read |= {option.variable for option in TABLE if option.variable}
    internal = {
        "LOCKSTEP_RUN",
        "LOCKSTEP_LAUNCHER_SAYS",
        "LOCKSTEP_RAY_BRIDGE",
        "LOCKSTEP_RAY_FUNCTION",
        "LOCKSTEP_RAY_TRAIN",
        "LOCKSTEP_STANDIN_TELLS",
        "LOCKSTEP_STANDIN_WATCHES",
        "LOCKSTEP_",
    }  # a launcher's words to its own processes; what all names begin with
    assert not {name for name in read - internal if name not in text}


# Signatures that the reference shows as they are: names and defaults, without types.
SHOWN = (
    *GRADIENT_OPTIMIZERS,
    *(name for name in SCHEDULES if name != "constant"),
    *(f"{name.name.lower()}_policy" for name in PolicyName),
    "moving_average",
)


def test_reference_shows_the_signature_of_every_optimizer_schedule_and_policy() -> None:
    wanted = []
    for name in SHOWN:
        signature = inspect.signature(getattr(worker_client, name))
        plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
        wanted.append(f"{name}{inspect.Signature(plain)}")
    lines = _text(ROOT / "docs" / "reference" / "optimizers.md").splitlines()
    missing = [line for line in wanted if line not in lines]
    assert not missing, f"docs/reference/optimizers.md: want the lines {missing}"


def test_reference_shows_how_a_session_is_opened() -> None:
    shown = [_signature(opened) for opened in (worker_client.connect, worker_client.observe, worker_client.local)]
    assert not [signature for signature in shown if signature not in _api()]


@pytest.mark.parametrize("kind", [worker_client.Session, worker_client.Observer], ids=lambda kind: str(kind.__name__))
def test_reference_shows_every_method_and_property(kind: type) -> None:
    public = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
    shown = {name: f"`{name}`" if isinstance(value, property) else f"`{_signature(value)}`" for name, value in public.items()}
    section = _api().partition("An observer: ")[2 if kind is worker_client.Observer else 0]
    missing = [text for text in shown.values() if text not in section]
    assert not missing, f"docs/reference/api.md: {missing}"


def test_every_encoding_has_its_row() -> None:
    section = (ROOT / "docs" / "how-to" / "compression.md").read_text(encoding="utf-8").partition("## The formats")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)[^`]*`(, gradients only)? \|", section, flags=re.MULTILINE))
    encoded = [one for one in FORMATS.values() if one.coding is not None]
    assert rows == {one.name: "" if one.is_for_variables else ", gradients only" for one in encoded}


def test_reference_has_a_row_for_all_that_a_parameter_server_reports() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    fields = [field.name for field in dataclasses.fields(ShardReport)]
    assert [name for name in re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE) if name in fields] == fields


def _signature(function: Callable[..., object]) -> str:
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in inspect.signature(function).parameters.values()]
    return f"{function.__name__}{inspect.Signature([one for one in parameters if one.name != 'self'])}".replace("'", '"')


def _api() -> str:
    return " ".join(_text(ROOT / "docs" / "reference" / "api.md").split())


def test_every_path_that_a_page_names_exists() -> None:
    tops = "protos|ps_protocol|ps_server|chief|worker_client|lockstep|tests|benchmarks|docs|examples|deploy"
    named = re.compile(rf"`((?:{tops})/[\w/.-]+)`")
    assert not _on(PAGES, lambda page: [path for path in named.findall(_text(page)) if not (ROOT / path).exists()])


def test_every_folder_is_on_the_map() -> None:
    text = _text(ROOT / "docs" / "contributing" / "design.md")
    tops = ("ps_protocol", "ps_server", "chief", "worker_client", "lockstep", "tests", "benchmarks", "docs")
    folders = {path.parent.relative_to(ROOT) for top in tops for path in (ROOT / top).glob("*/*") if path.is_file()}
    modules = {path.relative_to(ROOT) for top in tops[:5] for path in (ROOT / top).glob("*.py") if not path.stem.startswith("__")}
    lost = sorted(str(path) for path in folders | modules if f"`{path}`" not in text and path.name != "__pycache__")
    assert not lost, f"docs/contributing/design.md: {lost}"


def test_every_folder_says_which_of_its_modules_to_open_for_what() -> None:
    unnamed = []
    for package in ("ps_protocol", "ps_server", "chief", "worker_client", "lockstep"):
        for init in sorted((ROOT / package).glob("*/**/__init__.py")):
            words = ast.get_docstring(ast.parse(_text(init))) or ""
            modules = [module.stem for module in init.parent.glob("*.py") if not module.stem.startswith("__") and init.parent.name != "v1"]
            unnamed += [
                f"{_name(init.parent)}/{module}" for module in modules if f"`{module}`" not in words and f"`{module}.py`" not in words
            ]
    assert not unnamed


def test_every_fault_has_a_test() -> None:
    rows = re.findall(r"^\| (F\d+) \| .* \| (.*)\|$", _text(made_docs.FAULTS), flags=re.MULTILINE)
    assert len(rows) == len(dict(rows)) > 30
    assert [fault for fault, shown in rows if "`" not in shown] == []


def test_every_fault_that_a_test_shows_has_a_row() -> None:
    marks = (mark for path in (ROOT / "tests").rglob("test_*.py") for mark in re.findall(r"mark\.shows\(([^)]*)\)", _text(path)))
    assert {fault for mark in marks for fault in re.findall(r"F\d+", mark)} <= set(re.findall(r"\bF\d+\b", _text(made_docs.FAULTS)))


def test_every_test_that_a_page_names_exists() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^ *def (test_\w+)", source, flags=re.MULTILINE))
    # The page on testing makes names up, to show good ones.
    pages = [page for page in PAGES if page.name != "testing.md"]
    assert _on(pages, lambda page: set(re.findall(r"`(test_\w+)`", _text(page))) - defined) == {}


def _sources(path: Path) -> str:
    return "\n".join(map(_text, [path] if path.is_file() else sorted(path.rglob("*.py"))))


def test_every_measure_names_a_test_that_exists() -> None:
    """`tests/…` (`words`): the words are a part of a test's name there, or of what it is run with."""
    rows = [line.rstrip(" |").rpartition(" | ")[2] for line in _text(ROOT / "SECURITY.md").splitlines() if line.startswith("| ")]
    shown = [cell for cell in rows[rows.index("tested by") :] if cell not in ("tested by", "---")]
    named = {cell: re.findall(r"`(tests/[\w/.]+)`(?: \(([^)]*)\))?", cell) for cell in shown}
    assert [cell for cell, found in named.items() if not found] == []
    for path, words in (one for found in named.values() for one in found):
        assert (ROOT / path).exists(), path
        unknown = [word for word in re.findall(r"`([\w ]+)`", words) if word not in _sources(ROOT / path)]
        assert not unknown, (path, unknown)


def test_every_command_that_runs_attacks_names_tests_that_exist() -> None:
    commands = _text(ROOT / "docs" / "contributing" / "testing.md").partition("## Run the attacks")[2]
    named = set(re.findall(r"tests/[\w/.]+", commands))
    assert len(named) > 10
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_every_public_name_and_item_of_strategies_is_on_their_page() -> None:
    page = _text(ROOT / "docs" / "reference" / "strategy.md")
    items = {name for kind in (strategy.StrategyExtended, strategy.ParameterServerStrategy, strategy.ReplicaContext) for name in vars(kind)}
    internal = {"place", "first_copy", "first_of", "reduce_copies"}  # what variables ask of their strategy
    public = {name for name in items - internal if not name.startswith("_")} | set(strategy.__all__)
    assert sorted(name for name in public if not re.search(rf"\b{name}\b", page)) == []
