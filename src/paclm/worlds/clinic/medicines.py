"""Medicines with the doses they come in, lowest first. Knows nothing about who takes them.

The doses are of a plausible size so that the notes read well; nothing here is medical advice.
"""

from __future__ import annotations

from dataclasses import dataclass

from paclm.worlds.clinic.tables import read_lines


@dataclass(frozen=True, slots=True)
class Medicine:
    """A medicine, its ladder of doses, how it is given and how often."""

    name: str
    doses: tuple[str, ...]
    form: str
    rhythms: tuple[str, ...]


def _parse(line: str) -> Medicine:
    name, _, rest = line.partition(":")
    doses, form, rhythms = (part.strip() for part in rest.split(";"))
    return Medicine(name.strip(), tuple(doses.split(", ")), form, tuple(rhythms.split(", ")))


MEDICINES = {medicine.name: medicine for medicine in map(_parse, read_lines("medicines"))}
