"""Names of people and places, the common ones first. Knows nothing about who bears them.

Given names and surnames are ordinary words of many languages, put together by chance; the towns are invented.
"""

from __future__ import annotations

from paclm.worlds.clinic.tables import read_blocks

_NAMES = {title: tuple(" ".join(lines).split()) for title, lines in read_blocks("names")}

WOMEN = _NAMES["women"]
MEN = _NAMES["men"]
SURNAMES = _NAMES["surnames"]
TOWN_STARTS = _NAMES["town_starts"]
TOWN_ENDS = _NAMES["town_ends"]
