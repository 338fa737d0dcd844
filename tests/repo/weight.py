"""`make weight`: lines of code by place, and words of documents, without generated stubs; ARGS=REF shows an earlier commit beside it."""

import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Sequence

from tests.support.repository import ROOT

PRODUCT = ("ps_protocol", "ps_server", "chief", "worker_client", "lockstep")
_CODE = (*PRODUCT, "tests", "benchmarks", "examples", "docs")
# What must not change where lines become fewer: else they are only longer, or say less.
SHARES = ("characters a line", "comments, % of lines")


def weight(ref: str) -> dict[str, float]:
    """Returns what a commit's files weigh: for each place its lines, for documents their words."""
    archive = subprocess.run(["git", "archive", ref], cwd=ROOT, capture_output=True, check=True).stdout
    found: Counter[str] = Counter()
    characters = comments = 0
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file, top = tar.extractfile(member), member.name.split("/")[0]
            if file is None or "_pb2" in member.name or member.name.endswith("wire/coders.py"):
                continue
            if member.name.endswith(".md"):
                place = member.name.rpartition("/")[0] or "README and others"
                found[f"words: {place}"] += (words := len(file.read().decode().split()))
                found["words in all"] += words
            elif top in _CODE and member.name.endswith((".py", ".html")):
                lines = file.read().decode().splitlines()
                group = "the five packages" if top in PRODUCT else top
                for place in {group, _place(member.name)}:
                    found[place] += len(lines)
                if group == "the five packages":
                    characters += sum(map(len, lines))
                    comments += sum(line.lstrip().startswith(("#", '"""')) for line in lines)
            elif top == "Makefile":
                found[top] += len(file.read().splitlines())
    total = found["the five packages"]
    return {**found, SHARES[0]: round(characters / total, 1), SHARES[1]: round(100 * comments / total, 1)}


def _place(name: str) -> str:
    folders = name.split("/")[:-1]
    return "/".join(folders[:2]) if len(folders) > 1 else f"{folders[0]}/*.py"


def main(refs: Sequence[str]) -> int:
    """Prints a row for each place, with a column for each commit and the difference of the first and the last; returns 0."""
    weights = [weight(ref) for ref in refs]
    places = {place for one in weights for place in one}
    print(f"{'':40}" + "".join(f"{ref[:12]:>14}" for ref in refs))
    for place in sorted(
        places, key=lambda place: (place in SHARES, place.startswith("words"), re.sub(r"^(the five packages)", r"!\1", place))
    ):
        row = [one.get(place, 0) for one in weights]
        change = f"{round(row[-1] - row[0], 1):>+14,}" if len(row) > 1 else ""
        print(f"{place:40}" + "".join(f"{number:>14,}" for number in row) + change)
    return 0


if __name__ == "__main__":
    sys.exit(main([*sys.argv[1:], "HEAD"]))
