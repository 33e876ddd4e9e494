"""What a section finds, line by line: written as it comes, so that a section that dies keeps what it had."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table."""

    section: str
    name: str
    value: float | str
    unit: str = ""
    of_roofline: float | None = None  # 1.0: the hardware's limit
    is_right: bool | None = None  # None: nothing was compared
    note: str = ""

    def line(self) -> str:
        value = f"{self.value:,.4g}" if isinstance(self.value, float) else str(self.value)
        share = "" if self.of_roofline is None else f"{self.of_roofline:.0%}"
        verdict = "" if self.is_right is None else ("right" if self.is_right else "WRONG")
        return f"{self.name:44} {value:>12} {self.unit:9} {share:>6} {verdict:6} {self.note}".rstrip()


class Report:
    """Findings of one section, appended to a file of JSON lines."""

    def __init__(self, section: str, path: Path) -> None:
        self._section, self._path = section, path

    def add(
        self,
        name: str,
        value: float | str,
        unit: str = "",
        *,
        of_roofline: float | None = None,
        is_right: bool | None = None,
        note: str = "",
    ) -> None:
        finding = Finding(
            section=self._section,
            name=name,
            value=value,
            unit=unit,
            of_roofline=of_roofline,
            is_right=is_right,
            note=note,
        )
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(finding)) + "\n")


def read_findings(path: Path) -> list[Finding]:
    """Return what was written so far; a last line that was cut off is left out."""
    if not path.is_file():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [Finding(**json.loads(line)) for line in lines if line.endswith("\n")]
