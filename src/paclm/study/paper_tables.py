"""The tables of the paper's evaluation as data: label, regime, caption and columns; `tables.py` has those beyond it."""

from __future__ import annotations

from paclm.study import table_rows as rows
from paclm.study.cell import Column
from paclm.study.computed_tables import CANARY, EVAL_REGIMES, PMIXED_FULL, PMIXED_FULL_EPS2, SETUP
from paclm.study.paper_numbers import CANARIES, COST_SETUP
from paclm.study.table import quantities_table, rows_table

_VOTERS = {"realized": "realized world", "full": "full corpus", "public": "public model"}
PAPER_TABLES = (
    SETUP,
    EVAL_REGIMES,
    rows_table(
        "tab:census",
        "census",
        "Stability census, greedy votes of {worlds} worlds. a: distinct votes at a position. Coverage is averaged over "
        "worlds; median and 5th percentile are over positions. β: the largest probability with which any coupling "
        "could make all worlds agree, on the renormalised support. In brackets: the paper.",
        (
            Column("k", "{support_size:,}{of_collection}"),
            Column("positions", "positions"),
            Column("unanimity", "unanimity ±", ".3f"),
            Column("median a", "median_distinct", ".0f"),
            Column("p95 a", "p95_distinct", ".0f"),
            Column("argmax coverage", "argmax_coverage ±", ".3f"),
            Column("mass coverage", "mass_coverage ±", ".3f"),
            Column("median mass", "mass_coverage_median", ".3f"),
            Column("p5 mass", "mass_coverage_p5", ".3f"),
            Column("β", "ceiling ±", ".3f"),
        ),
        notes=rows.own_notes,
    ),
    quantities_table(
        "tab:accuracy",
        "accuracy",
        "Teacher-forced next-token accuracy on {positions_greedy:,} (greedy) and {positions_gumbel:,} (Gumbel) "
        "positions. Decoders are not comparable with each other. Gains and costs are in percentage points, errors over "
        "passages. In brackets: the paper.",
        (
            Column("public model", "accuracy_public ± stderr_public", ".2%"),
            Column("full corpus (not private)", "accuracy_full ± stderr_full", ".2%"),
            Column("b = ∞ (subsampled, no noise)", "accuracy_noiseless ± stderr_noiseless", ".2%"),
            Column("PAC at b = 2^-32", "accuracy_private ± stderr_private", ".2%"),
            Column("fine-tuning gain", "gain_points ± gain_stderr", ".2%"),
            Column("subsampling cost", "subsampling_points ± subsampling_stderr", ".2%"),
            Column("noise cost", "noise_points ± noise_stderr", ".2%"),
            Column("retained gain", "retained_gain ±", ".2%"),
        ),
        rows.by_decoder,
        rows.own_notes,
    ),
    rows_table(
        "tab:accuracy-budgets",
        "accuracy",
        "Teacher-forced accuracy of the paper's release at every budget; all rows of a decoder have the same votes. "
        "Cost of noise in percentage points, errors over passages.",
        (
            Column("decoder", "{decoder}{of_collection}"),
            Column("b", "{budget}"),
            Column("accuracy", "accuracy_private ± stderr_private", ".2%"),
            Column("noise cost", "noise_points ± noise_stderr", ".2%"),
            Column("retained gain", "retained_gain ±", ".1%"),
            Column("flip | dissent", "flip_dissent", ".4f"),
        ),
        notes=rows.own_notes,
    ),
    rows_table(
        "tab:flatness",
        "flatness",
        "Budget flatness: {scale[positions]:,} teacher-forced positions, under Gumbel with {scale[draws]} draws of "
        "coins. σ is the square root of the largest eigenvalue of the noise covariance, over positions with dissent; a "
        "flip is a released token that is not the realized world's vote. In brackets: the paper (coupled Gumbel).",
        (
            Column("decoder", "{decoder}{of_collection}"),
            Column("b", "{b}"),
            Column("σ median", "sigma_median", ".3g"),
            Column("σ max", "sigma_max", ".3g"),
            Column("accuracy", "accuracy ±", ".4f"),
            Column("flip (all)", "flip", ".4f"),
            Column("flip | unanimous", "flip_unanimous", ".4f"),
            Column("flip | dissent", "flip_dissent ±", ".4f"),
        ),
        rows.without_errors_of_no_noise,
        rows.own_notes,
    ),
    quantities_table(
        "tab:flatness-closing",
        "flatness",
        "What noise can do to accuracy. It changes a token only where there is dissent, and in the limit the release "
        "ignores the vote. Majority lines are over positions with dissent and a vote for the truth. The dissent "
        "fraction times the change there is the observed change, by construction. In brackets: the paper.",
        (
            Column("dissent fraction", "dissent_fraction", ".4f"),
            Column("mean distinct votes ā | dissent", "mean_distinct_given_dissent", ".2f"),
            Column("flip limit 1 − 1/ā", "flip_limit", ".3f"),
            Column("mean of 1 − 1/a", "flip_limit_per_position", ".3f"),
            Column("flip | dissent at 2^-4", "flip_dissent_loose ±", ".3f"),
            Column("flip | dissent at 2^-32", "flip_dissent ±", ".3f"),
            Column("accuracy | dissent, no noise", "accuracy_dissent_noiseless ±", ".4f"),
            Column("accuracy | dissent at 2^-32", "accuracy_dissent ±", ".4f"),
            Column("Δ accuracy | dissent", "change_dissent ±", ".4f"),
            Column("dissent fraction × Δ | dissent", "change_by_arithmetic", ".5f"),
            Column("Δ accuracy, observed", "change ±", ".5f"),
            Column("no vote for the truth | dissent", "truth_not_voted_given_dissent", ".1%"),
            Column("f: majority right | truth voted", "majority_right_given_voted ±", ".3f"),
            Column("Δ accuracy | majority right", "change_majority_right ±", ".1%"),
            Column("Δ accuracy | majority wrong", "change_majority_wrong ±", ".1%"),
        ),
        rows.at_both_ends,
    ),
    rows_table(
        "tab:sweep",
        "sweep",
        "Per-sequence sweep, greedy. Bounds are those of the realized length (fixed by the total, so a guarantee) and "
        "of the nominal one, as the paper prints them; ours are rounded up. In brackets: the paper.",
        (
            Column("T", "length"),
            Column("b", "{budget}{of_collection}"),
            Column("trials", "trials"),
            Column("realized", "realized_length", mark="† is_stopped"),
            Column("world", "world_rate ± world_stderr", ".3f", mark="! is_violation"),
            Column("bound", "world_bound", ".3f", is_bound=True),
            Column("nominal bound", "world_nominal_bound", ".3f", is_bound=True),
            Column("membership", "membership_rate ± membership_stderr", ".3f"),
            Column("bound ", "membership_bound", ".3f", is_bound=True),
            Column("nominal bound ", "membership_nominal_bound", ".3f", is_bound=True),
            Column("unanimity", "unanimity ±", ".3f"),
            Column("smaller p", "smaller_p", ".2g"),
        ),
        lambda result: [{**row, "smaller_p": min(row["world_p"], row["membership_p"])} for row in result.rows],
        rows.sweep_notes,
    ),
    rows_table(
        "tab:session",
        "sessions",
        "Persistent-secret sessions, coupled Gumbel, {sessions} sessions per budget; errors are over sessions (a rate "
        "of zero has none). Membership and world: how often an attack guesses right, and its bound, rounded up. In "
        "brackets: the paper.",
        (
            Column("b", "{budget}{of_collection}"),
            Column("T", "horizon"),
            Column("charged (nats)", "charged_nats", ".2e"),
            Column("leak, by entropy", "leaked_nats ± leaked_stderr", ".2e"),
            Column("leak, by truth", "leaked_by_truth_nats ± leaked_by_truth_stderr", ".2e"),
            Column("Σ of steps", "step_information_nats", ".2e"),
            Column("leak ÷ charged", "leaked_over_charged ±", ".2%"),
            Column("dissent", "dissent ±", ".2%"),
            Column("difference", "gap ±", ".2%"),
            Column("membership", "membership_rate ± membership_stderr", ".3f"),
            Column("bound", "membership_bound", ".3f", is_bound=True),
            Column("world", "world_rate ± world_stderr", ".3f"),
            Column("bound ", "world_bound", ".3f", is_bound=True),
        ),
        notes=rows.session_notes,
    ),
    rows_table(
        "tab:session-accuracy",
        "sessions",
        "Accuracy over the long run. Accuracy: the first token of each query against the text its prompt was cut from "
        "(the only token whose context is the text's own). Agreement: all released tokens against each voter's choice "
        "on the same context with the same coins.",
        (
            Column("b", "{budget}{of_collection}"),
            Column("tokens of the session", "{stretch}"),
            Column("accuracy, released", "accuracy_released ±", ".1%"),
            *(Column(f"accuracy, {name}", f"accuracy_{voter} ±", ".1%") for voter, name in _VOTERS.items()),
            *(Column(f"agreement, {name}", f"agreement_{voter} ±", ".2%") for voter, name in _VOTERS.items()),
        ),
        rows.with_stretch,
    ),
    rows_table(
        "tab:generation",
        "generation",
        "Generated text by length, {sequences} sequences each; errors by a bootstrap over sequences. Perplexity is the "
        "public model's; its ratio is to the full-corpus model's text under the same decoder at equal length. In "
        "brackets: the paper.",
        (
            Column("text", "{text}{of_collection}"),
            Column("T", "length"),
            Column("rep-3", "rep3 ±", ".3f"),
            Column("distinct-1", "distinct1 ±", ".3f"),
            Column("perplexity", "perplexity ±", ".2f"),
            Column("ratio", "ratio ±", ".3f"),
            Column("unanimity", "unanimity ±", ".3f"),
        ),
        rows.with_names,
        (
            "Under greedy decoding unanimity rises with T and the ratio falls, because text falls into loops: a low "
            "measured cost at long lengths is no merit of the mechanism.",
        ),
    ),
    rows_table(
        "tab:ablation",
        "ablation",
        "Rules of voting, {trials} trials of {scale[length]} tokens per cell, paired in prompt, world, noise seed and "
        "coins. a: distinct votes. Ratios are to each rule's own reference. In brackets: the paper, which gives rep-3 "
        "and distinct-1 once per rule.",
        (
            Column("rule", "{variant}{of_collection}"),
            Column("b", "{budget}"),
            Column("unanimity", "unanimity ±", ".3f"),
            Column("a | dissent", "distinct_given_dissent ±", ".2f"),
            Column("p95 of a | dissent", "p95_distinct", ".0f"),
            Column("perplexity ratio", "ratio ±", ".2f"),
            Column("rep-3", "rep3 ±", ".3f"),
            Column("distinct-1", "distinct1 ±", ".3f"),
        ),
    ),
    CANARY,
    rows_table(
        "tab:canary-organic",
        "canaries",
        "Organic memorization at the canary trigger: the payload's first token in worlds that hold the canary against "
        f"those that do not; errors over worlds. The paper: {CANARIES}.",
        (
            Column("kind", "{kind}"),
            Column("repetitions", "repetitions"),
            Column("gap, nats", "gap_nats ± gap_stderr", ".3f"),
            Column("rank, members", "rank_member", ",.0f"),
            Column("rank, others", "rank_other", ",.0f"),
            Column("difference", "rank_difference ± rank_stderr", ",.1f"),
            Column("votes, members", "vote_share_member_gumbel", ".2%"),
            Column("votes, others", "vote_share_other_gumbel", ".2%"),
            Column("in support", "in_support"),
        ),
        rows.organic,
        rows.own_notes,
    ),
    rows_table(
        "tab:capacity",
        "capacity",
        "Capacity pilot: adapters with one canary against a clean control on identical data, over the tokens of the "
        "payload. Gap in nats a token; rank 1 is the first choice. In brackets, where it has one: the paper's.",
        (
            Column("setting", "r = {rank}, {epochs} epochs"),
            Column("kind", "{kind}"),
            Column("repetitions", "repetitions"),
            Column("gap", "gap_nats ± gap_stderr", ".2f"),
            Column("median rank", "median_rank", ",.1f"),
            Column("rank in control", "median_rank_control", ",.1f"),
            Column("argmax", "argmax_share", ".0%"),
        ),
        notes=rows.own_notes,
    ),
    quantities_table(
        "tab:cost",
        "cost",
        f"What a private token costs with {{worlds}} worlds ({{machine}}). In brackets: the paper, {COST_SETUP}.",
        (
            Column("forward pass of all worlds (ms a step)", "forward_ms", ".2f"),
            Column("mechanism (ms a token)", "mechanism_ms", ".3f"),
            Column("mechanism ÷ (forward + mechanism)", "mechanism_share", ".2%"),
            Column("ledger, durable (ms a step)", "ledger_ms", ".2f"),
            Column("tokens a second, ledger included", "tokens_per_second", ".1f"),
            Column("tokens a second, without ledger", "tokens_per_second_without_ledger", ".1f"),
            Column("peak memory (GB)", "memory_gb", ".2f"),
            Column("one model (ms a step)", "one_model_ms", ".2f"),
            Column("all worlds ÷ one model", "times_one_model", ".1f"),
            Column("worlds one by one ÷ all in one pass", "cheaper_than_one_by_one", ".1f"),
        ),
        rows.by_sequences,
        rows.own_notes,
    ),
    rows_table(
        "tab:operations",
        "cost",
        "Operations per release: noise over the whole vocabulary, m·d·min(m, d) + d², against noise on the distinct "
        "votes, m·k + a³ + m·a. Model evaluations are not in either. In brackets: the paper.",
        (
            Column("", "{sizes}"),
            Column("sizes", "m = {worlds}, d = {vocabulary:,}, k = {support_size}, a = {distinct}"),
            Column("over the vocabulary", "dense", ".3g"),
            Column("on distinct votes", "collapsed", ".3g"),
            Column("factor", "factor", ".3g"),
        ),
        rows.operations,
    ),
    rows_table(
        "tab:precision",
        "precision",
        "The same {positions:,} positions, coins and adapters in two arithmetics; accuracy is the mean over worlds.",
        (
            Column("", "{decoder}, {name}"),
            Column("float32", "float32", ".2%"),
            Column("bfloat16", "bfloat16", ".2%"),
            Column("difference", "difference ± stderr", ".3%"),
        ),
        rows.by_arithmetic,
    ),
    rows_table(
        "tab:pmixed-val",
        "pmixed",
        "PMixED without sampling at a generous ε = 2, T = 1024, order 2. Public model: accuracy {accuracy_public:.4f}, "
        "perplexity {perplexity_public:.2f}. Accuracy: the mean probability of the true token; headroom is the share "
        "of the plain average's gain that survives. Interval and error are over passages of the text. In brackets: the "
        "paper.",
        (
            Column("N", "{num_shards}"),
            Column("accuracy", "accuracy", ".4f"),
            Column("perplexity", "perplexity", ".2f"),
            Column("gain", "gain", "+.4f"),
            Column("95% interval", "[{gain_low:+.4f}, {gain_high:+.4f}]"),
            Column("mean λ", "mean_weight", ".3f"),
            Column("headroom", "headroom ±", ".1%"),
            Column("least probability", "least_probability", ".1e"),
        ),
        lambda result: result.select(kind="validation"),
        rows.at_floor,
    ),
    PMIXED_FULL,
    PMIXED_FULL_EPS2,
)
