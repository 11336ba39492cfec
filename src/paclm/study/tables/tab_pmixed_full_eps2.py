"""`tab:pmixed-full-eps2`: the same comparison at ε = 2."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.study.results import Result
from paclm.study.table import Table, TableData
from paclm.study.tables.tab_pmixed_full import Line, build_at

_PAC = {
    100: (0.3092, 0.990),
    1000: (0.3087, 0.982),
    10**4: (0.3086, 0.980),
    10**5: (0.3086, 0.981),
    10**6: (0.3086, 0.98),
}
_PMIXED: Mapping[tuple[str, int], Line] = {
    ("rigorous", 10**2): (0.25668, 32, 8, 0.03, 0.375, 0.649, 0.363),
    ("rigorous", 10**3): (0.25366, 32, 64, 0.02, 0.527, 0.514, 0.278),
    ("rigorous", 10**4): (0.24845, 32, 32, 0.005, 0.848, 0.870, 0.131),
    ("rigorous", 10**5): (0.24559, 32, 64, 0.002, 0.939, 0.880, 0.051),
    ("rigorous", 10**6): (0.24433, 32, 32, 0.0005, 0.985, 0.984, 0.015),
    ("generous", 10**2): (0.26520, 16, 2, 0.1, 0.185, 0.853, 0.449),
    ("generous", 10**3): (0.25879, 32, 2, 0.03, 0.373, 0.917, 0.423),
    ("generous", 10**4): (0.25233, 32, 2, 0.02, 0.525, 0.840, 0.241),
    ("generous", 10**5): (0.24730, 32, 2, 0.01, 0.724, 0.762, 0.099),
    ("generous", 10**6): (0.24526, 32, 2, 0.005, 0.850, 0.620, 0.041),
}


def build(results: Mapping[str, Result]) -> TableData:
    """At ε = 2."""
    return build_at(results["pmixed"], 2.0, _PAC, _PMIXED)


TABLE = Table("tab:pmixed-full-eps2", ("pmixed",), build)
