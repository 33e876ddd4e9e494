"""A release turns the unreleased section of the changelog into one with a date, and into notes."""

from pathlib import Path

import pytest
from tools.release import ReleaseError, released

ROOT = Path(__file__).parent.parent
CHANGELOG = (
    "# Changelog\n\nText.\n\n## 0.2.0 - unreleased\n\n### Added\n\n- This.\n\n## 0.1.0 - 2026-01-01\n\n- That.\n"
)


def test_the_unreleased_section_gets_a_version_and_a_date() -> None:
    text, notes = released(CHANGELOG, "0.2.0", "2026-12-01")
    assert notes == "### Added\n\n- This."
    assert text == CHANGELOG.replace("0.2.0 - unreleased", "0.2.0 - 2026-12-01")


@pytest.mark.parametrize("version", ["0.1.1rc1", "0.1.1", "0.3.0a1"])
def test_versions_above_the_last_one(version: str) -> None:
    assert f"## {version} - d" in released(CHANGELOG, version, "d")[0]


@pytest.mark.parametrize(
    ("changelog", "version", "complaint"),
    [
        (CHANGELOG, "0.1.0", "not above 0.1.0"),
        (CHANGELOG, "0.1.0rc1", "not above 0.1.0"),
        (CHANGELOG, "1.0", "not a version"),
        (CHANGELOG.replace("unreleased", "2026-02-02"), "0.3.0", "does not begin with"),
        (CHANGELOG.replace("### Added\n\n- This.\n\n", ""), "0.2.0", "nothing is in"),
    ],
)
def test_what_is_no_release(changelog: str, version: str, complaint: str) -> None:
    with pytest.raises(ReleaseError, match=complaint):
        released(changelog, version, "d")


def test_our_changelog_can_be_released() -> None:
    _, notes = released((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), "99.0.0", "2026-12-01")
    assert len(notes.splitlines()) > 20
