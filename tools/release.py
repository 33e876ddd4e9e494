"""Make a release of what the changelog calls unreleased: version, changelog, notes.

    python -m tools.release 0.2.0            write src/octavo/_version.py and CHANGELOG.md, print the notes
    python -m tools.release 0.2.0 --check    say what would be written, and write nothing

Commit and tag are left to you; the last lines say how.
"""

import argparse
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSION, CHANGELOG = "src/octavo/_version.py", "CHANGELOG.md"
_HEADING = re.compile(r"^## (\d+\.\d+\.\d+(?:[ab]\d+|rc\d+)?) - (\S+)$", re.MULTILINE)
_NUMBER = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")


class ReleaseError(Exception):
    """Why there is no release."""


def released(changelog: str, version: str, date: str) -> tuple[str, str]:
    """Return the changelog with its first section as this release, and the section's text: the notes.

    Raises ReleaseError: there is nothing unreleased, or the version is not above the last one.
    """
    headings = list(_HEADING.finditer(changelog))
    if not headings or headings[0][2] != "unreleased":
        raise ReleaseError(f"{CHANGELOG} does not begin with a section `## VERSION - unreleased`")
    if not _NUMBER.fullmatch(version):
        raise ReleaseError(f"{version} is not a version such as 1.2.3 or 1.2.3rc1")
    first, end = headings[0], headings[1].start() if len(headings) > 1 else len(changelog)
    notes = changelog[first.end() : end].strip()
    if not notes:
        raise ReleaseError("nothing is in the unreleased section")
    if len(headings) > 1 and _key(version) <= _key(headings[1][1]):
        raise ReleaseError(f"{version} is not above {headings[1][1]}")
    return f"{changelog[: first.start()]}## {version} - {date}{changelog[first.end() :]}", notes


def _key(version: str) -> tuple[tuple[int, ...], tuple[int, str, int]]:
    """Order versions: 1.2.3a1, 1.2.3b1, 1.2.3rc1, 1.2.3."""
    found = re.fullmatch(r"([\d.]+)(?:(a|b|rc)(\d+))?", version)
    assert found is not None
    numbers = tuple(map(int, found[1].split(".")))
    return numbers, (1, "", 0) if found[2] is None else (0, found[2], int(found[3]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    version, date = arguments.version, f"{datetime.now(UTC):%Y-%m-%d}"
    try:
        changelog, notes = released((ROOT / CHANGELOG).read_text(encoding="utf-8"), version, date)
        changes = ["git", "status", "--porcelain"]
        if not arguments.check and subprocess.run(changes, cwd=ROOT, check=True, capture_output=True).stdout:
            raise ReleaseError("there are changes that are not committed")
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 2
    print(f"# Octavo {version}\n\n{notes}\n")
    if arguments.check:
        return 0
    (ROOT / CHANGELOG).write_text(changelog, encoding="utf-8")
    (ROOT / VERSION).write_text(f'__version__ = "{version}"\n', encoding="utf-8")
    print(
        f"git commit -am 'release: {version}' && git tag -a v{version} -m 'Octavo {version}' && make wheel",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
