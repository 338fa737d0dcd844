"""`python -m tests.fuzz TARGET DIRECTORY [options of libFuzzer]`: atheris on one target; what it has found stays in the directory."""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ps_protocol", "tests.fuzz"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Writes the examples into the directory, and runs until libFuzzer has had enough, or has found something."""
    name, directory, *options = sys.argv[1:]
    target, corpus = TARGETS[name], Path(directory)
    corpus.mkdir(parents=True, exist_ok=True)
    for number, example in enumerate(target.examples):
        (corpus / f"example-{number}").write_bytes(example)
    atheris.Setup([sys.argv[0], *options, str(corpus)], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
