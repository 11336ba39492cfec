"""All phrases of the corpus, loaded from its data files into the grammar's rules.

Take RULES and LINES from here, not from `grammar`, where they are still empty.
"""

from __future__ import annotations

from paclm.worlds.clinic.grammar import LINES, RULES, add_rules
from paclm.worlds.clinic.tables import read_rules

__all__ = ["LINES", "RULES"]

for _file in ("vocabulary", "history", "examination", "plan", "registers"):
    add_rules(read_rules(_file))
for _file in ("even", "rarities"):
    add_rules(read_rules(_file), is_flat=True)
