"""Hooks of mkdocs: navigation, pages from outside docs/, and reference pages made from the code. Changes no file of the repository."""

import inspect
import json
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import worker_client
from lockstep import errors

ROOT = Path(__file__).resolve().parents[2]
# Pages of the repository that the site has too, at the same place.
OUTSIDE = ("SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/figures.md", "benchmarks/lab-notebook.md")
# Pages that are made here, linked at the end of those that they go with.
_MORE = {
    "reference/api.md": "[Every name of the API](names.md), with its docstring.",
    "reference/cli.md": "[Help texts](help.md) of all commands.",
}
# Elements that a browser fetches by itself, from another host.
_LOADED = re.compile(r"<(?:script|img|iframe|link\b(?=[^>]*stylesheet))\b[^>]*\b(?:src|href)=[\"']?https?://[^>]*")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Makes the navigation from docs/index.md, so that a page is named in one place."""
    config.nav = navigation((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    return config


def navigation(index: str) -> list[Any]:
    """Returns the index itself and the first page of each item of its lists, by section. The section "More" is no part of it."""
    sections: list[Any] = [{"Home": "index.md"}]
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", index, flags=re.DOTALL | re.MULTILINE):
        if title != "More" and (pages := re.findall(r"^- \[([^\]]*)\]\(([^)#\s]+\.md)\)", body, flags=re.MULTILINE)):
            sections.append({title: [{text: path} for text, path in pages]})
    return sections


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the pages that are not files of docs/."""
    from mkdocs.structure.files import File

    made = {
        **{name: (ROOT / name).read_text(encoding="utf-8") for name in OUTSIDE},
        "reference/names.md": names_page(),
        "reference/help.md": help_page(),
    }
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Leads links to where the site has the page. What is only in the repository is named, or linked if its address is known."""
    source = page.file.src_uri
    # Where the page lies in the repository decides what its links mean.
    place = posixpath.dirname(source if source in OUTSIDE else f"docs/{source}")

    def led(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(place, target))
        on_site = path.removeprefix("docs/") if path.startswith("docs/") else path
        if (on_site != path or path in OUTSIDE) and files.get_file_from_path(on_site):
            return f"[{text}]({posixpath.relpath(on_site, posixpath.dirname(source) or '.')}{anchor})"
        if path.startswith("docs/") or not (ROOT / path).exists():
            return link[0]  # mkdocs says what is wrong with it
        return f"[{text}]({config.repo_url}/blob/main/{path}{anchor})" if config.repo_url else text

    text = "".join(part if code else _LINK.sub(led, part) for code, part in _split_at_code(markdown))
    return f"{text}\n{_MORE[source]}\n" if source in _MORE else text


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Fails the build where a page would load something from another host."""
    from mkdocs.exceptions import PluginError

    if found := _LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} has {found[0]}>, and the site must work without a network")
    return output


def _split_at_code(markdown: str) -> Iterable[tuple[bool, str]]:
    """Yields fenced blocks (True) and what stands between them."""
    for number, part in enumerate(re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)):
        yield bool(number % 2), part


def names_page() -> str:
    """Every name that a program may import, by the module that defines it, with its signature and docstring."""
    by_module: dict[str, list[str]] = {}
    aliases = []
    for name in sorted({*worker_client.__all__, "DNNClassifier", "DNNRegressor"}):
        value = getattr(worker_client, name)
        module = getattr(value, "__module__", None)
        if inspect.isclass(value) or inspect.isfunction(value):
            by_module.setdefault(str(module), []).append(value.__name__)
        else:
            aliases.append(name)
    lines = [
        "# Every name of the API",
        "",
        "What `import lockstep` offers, with the docstrings of the code. [Python API](api.md) explains how it is used.",
    ]
    headings = {
        "worker_client.opening": "Connecting",
        "worker_client.session.session": "Session",
        "worker_client.session.observer": "Observer",
        "worker_client.model.declarations": "Declaring a model",
        "worker_client.model.optimizers": "Optimizers and schedules",
        "worker_client.model.policies": "Policies and averages",
    }
    for module in sorted(by_module, key=lambda name: (list(headings).index(name) if name in headings else len(headings), name)):
        lines += ["", f"## {headings.get(module, '`' + module + '`')}"]
        for name in by_module[module]:
            lines += ["", f"::: {module}.{name}", "    options:", f"      heading: lockstep.{name}", f"      toc_label: {name}"]
    if aliases:
        lines += ["", "## Type aliases", "", ", ".join(f"`{name}`" for name in aliases)]
    lines += [
        "",
        "## Errors",
        "",
        "`lockstep.errors` has them; [all errors](../how-to/troubleshoot.md#all-errors) says what to do about each.",
        "",
    ]
    lines += [f"- `{name}`: {_first_line(getattr(errors, name))}" for name in sorted(errors.__all__)]
    return "\n".join(lines) + "\n"


def help_page() -> str:
    """What each command prints for --help-all."""
    words = [sys.executable, "-m", "tests.repo.command_helps"]
    helps: dict[str, str] = json.loads(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout)
    lines = ["# Help texts", "", "What each command prints for `--help-all`."]
    for name in sorted(helps):
        lines += ["", f"## {name.strip()}", "", "```text", helps[name].rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _first_line(value: Any) -> str:
    return (inspect.getdoc(value) or "").split("\n", 1)[0]
