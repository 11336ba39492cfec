"""All phrases of the corpus, loaded from its data files into the grammar's rules.

Take RULES from here, not from `grammar`, where they are still empty. `style` is a house's own: it always makes the same
choices. In `wording` it mostly does. `vocabulary` is common to all, the frequent words first; `rarities` come once.
"""

from __future__ import annotations

from paclm.worlds.clinic.grammar import RULES, add_rules
from paclm.worlds.clinic.tables import read_rules

__all__ = ["RULES"]

add_rules(read_rules("style"), habit=1.0)
add_rules(read_rules("wording"), habit=0.8)
add_rules(read_rules("vocabulary"), habit=0.0)
add_rules(read_rules("rarities"), habit=None)
