"""The paper's own numbers, all that are printed beside ours: by table, then by the row and column of our results.

Numbers are as printed in the paper. `tab:pmixed-full` and `tab:pmixed-full-eps2` share theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paclm.study.results import Row, Value

ACCURACY_STDERR = 0.0036  # of an accuracy under Gumbel, from the paper's text; it gives none for paired differences
SPREAD_OF_RATIO = 0.061  # standard deviation of leak ÷ charge across budgets, in percentage points
CANARIES = "gaps within ±0.12 nats, ranks 87–157 (C-COMMON) and about 26,000–33,000 (C-OOD) for both, no votes"
COST_SETUP = "128 worlds of GPT-2-small on an H100"


@dataclass(frozen=True, slots=True)
class Numbers:
    """The paper's numbers for one table."""

    by: tuple[str, ...]  # columns of our rows that say which row of the paper belongs beside one of ours
    rows: Mapping[tuple[Value, ...], Row]

    def beside(self, row: Row) -> Row:
        """The paper's values for one of our rows, by column; none for a second collection of worlds."""
        if row.get("collection", 1) != 1:
            return {}
        return self.rows.get(tuple(row.get(name) for name in self.by), {})


def _numbers(by: str, columns: str, *rows: tuple[Value, ...]) -> Numbers:
    names, keys = columns.split(), by.split()
    size = len(keys)
    return Numbers(tuple(keys), {row[:size]: dict(zip(names, row[size:], strict=True)) for row in rows})


NOTHING = Numbers((), {})
PAPER: Mapping[str, Numbers] = {
    "tab:ablation": _numbers(
        "variant budget",
        "unanimity distinct_given_dissent p95_distinct ratio rep3 distinct1",
        ("greedy", "2^-8", 0.887, 2.20, 3, 1.11, 0.430, 0.391),
        ("greedy", "2^-16", 0.880, 2.20, 3, 1.28, 0.430, 0.391),
        ("Gumbel, τ = 1.0", "2^-8", 0.826, 2.17, 3, 1.16, 0.022, 0.750),
        ("Gumbel, τ = 1.0", "2^-16", 0.832, 2.20, 3, 1.10, 0.022, 0.750),
        ("Gumbel, τ = 0.8", "2^-8", 0.840, 2.17, 3, 1.02, 0.047, 0.681),
        ("Gumbel, τ = 0.8", "2^-16", 0.845, 2.16, 3, 1.02, 0.047, 0.681),
        ("hybrid, β ≥ 0.9", "2^-8", 0.837, 4.97, 28, 1.15, 0.020, 0.756),
        ("hybrid, β ≥ 0.9", "2^-16", 0.834, 5.71, 36, 1.14, 0.020, 0.756),
    ),
    "tab:accuracy": _numbers(
        "decoder budget",
        "accuracy_public accuracy_full accuracy_noiseless accuracy_private gain_points subsampling_points "
        "noise_points retained_gain",
        ("greedy", "2^-32", 0.3816, 0.4392, 0.4281, 0.4244, 0.0576, -0.0111, -0.0037, 0.743),
        ("gumbel", "2^-32", 0.2556, 0.3149, 0.3068, 0.3057, 0.0593, -0.0081, -0.0012, 0.844),
    ),
    "tab:canary": _numbers(
        "decoder others budget",
        "first_canary second_canary",
        ("greedy", "agree", "inf", 1.000, 1.000),
        ("greedy", "agree", "2^-4", 0.281, 0.260),
        ("greedy", "agree", "2^-8", 0.092, 0.120),
        ("greedy", "agree", "2^-16", -0.003, 0.006),
        ("gumbel", "agree", "inf", 0.999, 1.000),
        ("gumbel", "agree", "2^-4", 0.281, 0.261),
        ("gumbel", "agree", "2^-8", 0.058, 0.109),
        ("gumbel", "agree", "2^-16", -0.017, -0.007),
    ),
    "tab:capacity": _numbers(
        "rank kind repetitions",
        "gap_nats median_rank argmax_share",
        (32, "C-COMMON", 1024, 0.33, 62.5, 0.0),
        (32, "C-COMMON", 4096, 1.14, 52.5, 0.0),
    ),
    "tab:census": _numbers(
        "support_size",
        "positions unanimity median_distinct p95_distinct argmax_coverage mass_coverage mass_coverage_median "
        "mass_coverage_p5 ceiling",
        (50, 65_053, 0.835, 1, 2, 0.974, 0.799, None, None, 0.881),
        (200, 65_053, 0.834, 1, 2, 0.986, 0.885, 0.931, 0.615, 0.878),
        (1000, 19_982, 0.827, 1, 2, 0.995, 0.953, None, None, 0.874),
    ),
    "tab:cost": _numbers(
        "sequences",
        "forward_ms mechanism_ms mechanism_share tokens_per_second_without_ledger memory_gb one_model_ms "
        "times_one_model cheaper_than_one_by_one",
        (1, 29.71, 0.223, 0.0074, 33.4, 2.23, 5.92, 5.0, 25.5),
    ),
    "tab:flatness": _numbers(
        "decoder budget",
        "sigma_median sigma_max accuracy flip flip_unanimous flip_dissent",
        ("gumbel", "inf", 0, 0, 0.3063, 0.0, 0.0, 0.0),
        ("gumbel", "2^-4", 1.29, 2.84, 0.3058, 0.0419, 0.0, 0.2600),
        ("gumbel", "2^-8", 5.15, 11.3, 0.3053, 0.0715, 0.0, 0.4442),
        ("gumbel", "2^-16", 82.3, 182, 0.3051, 0.0835, 0.0, 0.5181),
        ("gumbel", "2^-24", 1.32e3, 2.91e3, 0.3051, 0.0848, 0.0, 0.5262),
        ("gumbel", "2^-32", 2.11e4, 4.65e4, 0.3051, 0.0839, 0.0, 0.5206),
    ),
    "tab:flatness-closing": _numbers(
        "decoder",
        "dissent_fraction flip_dissent_loose flip_dissent change mean_distinct_given_dissent flip_limit "
        "accuracy_dissent_noiseless accuracy_dissent change_dissent change_by_arithmetic "
        "truth_not_voted_given_dissent majority_right_given_voted change_majority_right change_majority_wrong",
        ("greedy", 0.1460, 0.256, 0.521, -0.00060, *[None] * 10),
        (
            *("gumbel", 0.1611, 0.260, 0.521, -0.00116, 2.19, 0.543, 0.1473, 0.1400, -0.0072, -0.00116),
            *(0.70, 0.52, -0.341, 0.318),
        ),
    ),
    "tab:generation": _numbers(
        "source decoder budget length",
        "rep3 distinct1 ratio unanimity",
        ("private", "greedy", "2^-16", 16, None, None, "1.13–1.19", 0.825),
        ("private", "greedy", "2^-16", 64, None, None, None, 0.887),
        ("private", "greedy", "2^-16", 256, 0.825, None, "1.06–1.09", 0.961),
        ("public", "greedy", None, 256, 0.831, None, None, None),
        ("full", "greedy", None, 256, 0.836, None, None, None),
        ("private", "gumbel", "2^-16", 256, 0.053, 0.574, "1.11–1.16", None),
        ("private", "gumbel", "2^-24", 256, 0.050, 0.571, "1.11–1.16", None),
        ("human", None, None, 256, 0.047, 0.573, None, None),
    ),
    "tab:operations": _numbers("sizes", "dense collapsed factor", ("the paper's sizes", 3.35e9, 2.59e4, 1.3e5)),
    "tab:pmixed-full, PAC": _numbers(
        "epsilon release queries",
        "accuracy headroom",
        (1.0, "gaussian", 10**2, 0.3089, 0.984),
        (1.0, "gaussian", 10**3, 0.3086, 0.980),
        (1.0, "gaussian", 10**4, 0.3086, 0.981),
        (1.0, "gaussian", 10**5, 0.3086, 0.980),
        (1.0, "gaussian", 10**6, 0.3086, 0.98),
        (2.0, "gaussian", 10**2, 0.3092, 0.990),
        (2.0, "gaussian", 10**3, 0.3087, 0.982),
        (2.0, "gaussian", 10**4, 0.3086, 0.980),
        (2.0, "gaussian", 10**5, 0.3086, 0.981),
        (2.0, "gaussian", 10**6, 0.3086, 0.98),
    ),
    "tab:pmixed-full, PMixED": _numbers(
        "epsilon reading queries",
        "accuracy num_shards order rate empty mean_weight headroom",
        (1.0, "rigorous", 10**2, 0.25550, 32, 16, 0.02, 0.524, 0.626, 0.330),
        (1.0, "rigorous", 10**3, 0.25205, 32, 32, 0.01, 0.728, 0.743, 0.233),
        (1.0, "rigorous", 10**4, 0.24695, 32, 64, 0.005, 0.856, 0.685, 0.089),
        (1.0, "rigorous", 10**5, 0.24482, 32, 64, 0.001, 0.971, 0.970, 0.029),
        (1.0, "rigorous", 10**6, 0.24413, 32, 64, 0.0005, 0.984, 0.773, 0.009),
        (1.0, "generous", 10**2, 0.26355, 32, 2, 0.05, 0.190, 0.927, 0.557),
        (1.0, "generous", 10**3, 0.25691, 32, 2, 0.03, 0.373, 0.887, 0.370),
        (1.0, "generous", 10**4, 0.25062, 32, 2, 0.02, 0.525, 0.767, 0.193),
        (1.0, "generous", 10**5, 0.24648, 32, 2, 0.01, 0.724, 0.649, 0.076),
        (1.0, "generous", 10**6, 0.24487, 32, 2, 0.005, 0.850, 0.483, 0.030),
        (2.0, "rigorous", 10**2, 0.25668, 32, 8, 0.03, 0.375, 0.649, 0.363),
        (2.0, "rigorous", 10**3, 0.25366, 32, 64, 0.02, 0.527, 0.514, 0.278),
        (2.0, "rigorous", 10**4, 0.24845, 32, 32, 0.005, 0.848, 0.870, 0.131),
        (2.0, "rigorous", 10**5, 0.24559, 32, 64, 0.002, 0.939, 0.880, 0.051),
        (2.0, "rigorous", 10**6, 0.24433, 32, 32, 0.0005, 0.985, 0.984, 0.015),
        (2.0, "generous", 10**2, 0.26520, 16, 2, 0.1, 0.185, 0.853, 0.449),
        (2.0, "generous", 10**3, 0.25879, 32, 2, 0.03, 0.373, 0.917, 0.423),
        (2.0, "generous", 10**4, 0.25233, 32, 2, 0.02, 0.525, 0.840, 0.241),
        (2.0, "generous", 10**5, 0.24730, 32, 2, 0.01, 0.724, 0.762, 0.099),
        (2.0, "generous", 10**6, 0.24526, 32, 2, 0.005, 0.850, 0.620, 0.041),
    ),
    "tab:pmixed-val": _numbers(
        "num_shards",
        "accuracy perplexity gain mean_weight headroom",
        (8, 0.2459, 27.19, 0.0021, 0.151, 0.037),
        (16, 0.2471, 26.68, 0.0033, 0.221, 0.069),
        (32, 0.2480, 26.20, 0.0042, 0.334, 0.118),
    ),
    "tab:session": _numbers(
        "budget horizon",
        "leaked_nats leaked_over_charged membership_rate membership_bound world_rate world_bound",
        ("2^-16", 64, 1.83e-4, 0.188, 0.504, 0.522, 0.000, 0.012),
        ("2^-16", 1024, 2.67e-3, 0.171, 0.503, 0.588, 0.000, 0.028),
        ("2^-16", 4096, 1.08e-2, 0.173, 0.506, 0.675, 0.030, 0.056),
        ("2^-20", 4096, 6.72e-4, 0.172, 0.502, 0.544, 0.010, 0.017),
        ("2^-24", 4096, 4.23e-5, 0.173, 0.497, 0.511, 0.010, 0.010),
    ),
    "tab:sweep": _numbers(
        "length budget",
        "world_rate world_nominal_bound membership_rate membership_nominal_bound unanimity",
        (64, "2^-4", 0.024, 0.894, 0.519, 1.000, 0.827),
        (64, "2^-8", 0.010, 0.130, 0.508, 0.838, 0.888),
        (64, "2^-16", 0.007, 0.012, 0.501, 0.522, 0.887),
        (64, "2^-32", 0.011, 0.008, 0.500, 0.500, 0.886),
        (256, "2^-8", 0.010, 0.337, 0.507, 1.000, 0.961),
    ),
}
SETUP = {  # tab:setup, by component
    "worlds": "m = 128; each record in exactly 64",
    "prior": "uniform over worlds; 1/2 per record",
    "universe": "2,048 WikiText-103 articles + 16 canaries",
    "held out": "512 articles",
    "base model": "GPT-2-small (124M), frozen, fp32",
    "adapters": "LoRA r = 8, α = 16, c_attn and c_proj, about 0.6M parameters",
    "training": "AdamW, lr 2×10^-4, 2 epochs, identical for every world",
    "support": "k = 200",
    "decoders": "greedy; coupled Gumbel at τ = 1",
    "budgets": "2^-4 … 2^-32 nats a token",
    "arithmetic of the release": "float64",
    "collections": "1 (seed 101)",
}
