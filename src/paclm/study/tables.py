"""The tables as data: label, regime, caption and columns. To add one, append it to `_TABLES`.

Those of the paper's evaluation are in `paper_tables.py`. `table_rows.py` selects the rows of a table where it does not
show all of them as they are, `computed_tables.py` makes the tables that are more than columns, and `paper_numbers.py`
has the paper's numbers. Long files, because they are lists: nothing in them is executed but the constructors.
"""

from __future__ import annotations

from paclm.study import table_rows as rows
from paclm.study.cell import Column
from paclm.study.computed_tables import DP, KNOWLEDGE
from paclm.study.paper_tables import PAPER_TABLES
from paclm.study.regimes.releases import TARGET
from paclm.study.regimes.worlds import TARGET as WORLDS_TARGET
from paclm.study.student_tables import STUDENT_TABLES
from paclm.study.table import Table, quantities_table, rows_table


def all_tables() -> list[Table]:
    """Every table, by label."""
    return sorted(_TABLES, key=lambda table: table.label)


def table_named(label: str) -> Table:
    """The table of that label."""
    return next(table for table in _TABLES if table.label == label)


_TABLES = (
    *PAPER_TABLES,
    rows_table(
        "tab:invisible-ink",
        "pmixed",
        "InvisibleInk on the same disjoint shards and positions, at δ = 1e-5: the number of shards B that is selected "
        "at every point. Neighbours: any, a record may change its shard model in any way; public, its shard falls back "
        "to the public model, as its authors have it. The last two columns give the ε of the same setting under each. "
        "Accuracy: the mean probability of the true token, exact. Public model and ceiling (no clipping) are at the "
        "setting's own temperature and support. Errors are over passages of the text.",
        (
            Column("ε", "{epsilon:g}"),
            Column("T", "{queries:,}"),
            Column("neighbours", "{adjacency}"),
            Column("settings", "{way}"),
            Column("B", "{num_shards}"),
            Column("C", "clip", ".3g"),
            Column("τ", "temperature", ".2g"),
            Column("clipped", "{score}"),
            Column("k", "{support}"),
            Column("accuracy", "accuracy ± stderr", ".5f"),
            Column("public", "accuracy_public", ".5f"),
            Column("ceiling", "accuracy_ceiling", ".5f"),
            Column("headroom", "headroom ±", ".1%"),
            Column("ε, any", "epsilon_any", ".3g"),
            Column("ε, public", "epsilon_public", ".3g"),
        ),
        rows.invisible_ink,
    ),
    rows_table(
        "tab:pmixed-neighbours",
        "pmixed",
        "The first {queries:,} positions of the test text as {queries:,} queries. Disjoint shards: N = {num_shards}. "
        "Public and ceiling are each method's own: over the vocabulary for mixtures of distributions, with coupled "
        "coins in the top 200 for PAC. Errors are over passages of the text; so few positions have very few passages, "
        "and their errors are rough.",
        (
            Column("method", "{method}"),
            Column("accuracy", "accuracy ± stderr", ".4f"),
            Column("public", "accuracy_public", ".4f"),
            Column("ceiling", "accuracy_ceiling", ".4f"),
            Column("headroom", "headroom ±", ".1%"),
            Column("ε", "epsilon", ".3g"),
            Column("private answers", "private_share", ".0%"),
            Column("what its guarantee is", "{guarantee}"),
        ),
        rows.neighbours,
        (
            "ε of PAC is the one its bound on membership inference is matched to. Data-dependent ε are computed from "
            "private records and may not be published as they are.",
            "GNMax chooses among the public top 200 alone, so that neither public model nor ceiling is its own.",
        ),
    ),
    rows_table(
        "tab:releases",
        "releases",
        "All releases, coupled Gumbel votes: {sessions} sessions of {tokens_per_session:,} tokens; errors of the first "
        "three columns are over passages of the text; the lead is over gaussian at 2^-32, paired; nats are per "
        "session: leak by the belief's entropy, by its value at the secret, and Σ I, the sum of what each step can "
        "leak (computed for channel, an upper bound for gaussian, what the release declares for others; mean and error "
        "are over sessions). Last columns: "
        f"tokens until a total that bounds membership inference at {TARGET:.0%} is used up, every token charged, "
        "and what is promised about whether a record is in the corpus at all. Public model, "
        "full corpus and DP adapters are the same for every world and leak nothing about which was realized; those of "
        "dp are scored at all positions, without sessions.",
        (
            Column("release", "{release}{of_collection}"),
            Column("b", "{budget}"),
            Column("accuracy", "accuracy ±", ".2%"),
            Column("retained gain", "retained_gain ±", ".0%"),
            Column("lead in accuracy", "lead_points ± lead_stderr", ".2%"),
            Column("leak (entropy)", "leaked_nats ± leaked_stderr", ".3g"),
            Column("leak (truth)", "leaked_nats_by_truth ± leaked_stderr_by_truth", ".3g"),
            Column("Σ I", "can_tell_nats ± can_tell_stderr", ".3g"),
            Column("charged: every token", "charged_every_token", ".3g"),
            Column("charged: dissent", "charged_dissent", ".3g"),
            Column(f"tokens to {TARGET:.0%}", "tokens_until_every_token"),
            Column("about the corpus", "{corpus}"),
        ),
        rows.with_end,
        rows.notes_of_releases,
        rows.with_plain_adapters,
    ),
    KNOWLEDGE,
    rows_table(
        "tab:knowledge-examples",
        "knowledge",
        "Questions drawn at random, of all kinds in turn, and how public model and release go on (greedy; "
        "strokes stand for line ends). What is right in the last column alone is known from the records.",
        (
            Column("kind", "{kind}"),
            Column("the prompt ends with", "{prompt}"),
            Column("the records say", "{answer}"),
            Column("public model", "{said_public}"),
            Column("private, gaussian at 2^-16", "{said_gaussian}"),
        ),
        lambda result: result.select(part="example", collection=1),
    ),
    DP,
    *STUDENT_TABLES,
    rows_table(
        "tab:attacks",
        "attacks",
        "Attacks on the same {sessions} sessions of {horizon:,} tokens. The best-scored world is named, and every "
        "record is declared a member where the scores give its worlds more than one half; ties count as fair guesses. "
        "Bounds are at the charge of every token, errors over sessions.",
        (
            Column("attack", "{attack}{of_collection}"),
            Column("package", "{package}"),
            Column("what it sees", "{sees}"),
            Column("release", "{release}"),
            Column("b", "{budget}"),
            Column("record", "membership_rate ± membership_stderr", ".3f"),
            Column("record: bound", "membership_bound", ".3f", is_bound=True),
            Column("world", "world_rate ± world_stderr", ".3f"),
            Column("world: bound", "world_bound", ".3f", is_bound=True),
        ),
    ),
    rows_table(
        "tab:baselines",
        "baselines",
        "Methods on the same {positions:,} positions, coupled Gumbel votes: next-token accuracy, share of the gain of "
        "the full-corpus adapter over the public model, and what each guarantees. Errors are over passages.",
        (
            Column("method", "{method}{of_collection}"),
            Column("package", "{package}"),
            Column("accuracy", "accuracy ±", ".2%"),
            Column("retained gain", "retained_gain ±", ".0%"),
            Column("guarantee", "{guarantee}"),
        ),
        notes=rows.own_notes,
    ),
    rows_table(
        "tab:lm-eval",
        "lm_eval",
        "Tasks of lm-eval (not private: research mode). Scores and errors are lm-eval's. τ: temperature of votes in "
        "log-likelihoods; generated text follows the task.",
        (
            Column("task", "{task}"),
            Column("metric", "{metric}, {filter}"),
            Column("source", "{source}"),
            Column("b", "{budget}"),
            Column("τ", "temperature", ".2g"),
            Column("protocol", "{protocol}"),
            Column("shots", "shots"),
            Column("documents", "documents"),
            Column("score", "score ±", ".4g"),
        ),
        notes=rows.own_notes,
    ),
    rows_table(
        "tab:forgetting",
        "forgetting",
        "Noise calibrated to the belief (tracking) against noise for the uniform prior at every step (forgetting). The "
        "observer's belief is exact in both. Σ I: what the steps can have leaked, a Gaussian bound at the belief of "
        "the moment; for the tracking curator it is what is charged under dissent, for the forgetting one nothing "
        "limits it (worst: the session with the largest ratio). Horizons and curators share secrets.",
        (
            Column("b", "{budget}"),
            Column("tokens", "{tokens:,}"),
            Column("curator", "{curator}{of_collection}"),
            Column("leak (entropy)", "leaked_nats ± leaked_stderr", ".3g"),
            Column("leak (truth)", "leaked_nats_by_truth ± leaked_stderr_by_truth", ".3g"),
            Column("Σ I", "can_tell_nats ± can_tell_stderr", ".3g"),
            Column("worst Σ I ÷ charged", "can_tell_over_charged_most", ".3f"),
            Column("charged: dissent", "charged_dissent_nats", ".3g"),
            Column("world found", "world_id_rate", ".1%"),
            Column("accuracy", "accuracy ±", ".2%"),
        ),
    ),
    quantities_table(
        "tab:coupling",
        "coupling",
        "The same worlds trained from one start in one order (coupled), and each from its own start in its own order "
        "(uncoupled). Same text and coins. The ceiling is over other positions than the rows above it: "
        "the first few of every held-out record, where little is settled.",
        (
            Column("unanimity", "unanimity ±", ".1%"),
            Column("distinct votes given dissent", "distinct_given_dissent ±", ".2f"),
            Column("their 95th percentile", "distinct_p95", ".0f"),
            Column("accuracy of a world", "accuracy_world ±", ".2%"),
            Column("accuracy released at 2^-32", "accuracy_private ±", ".2%"),
            Column("retained gain at 2^-32", "retained_gain ±", ".1%"),
            Column("coupling ceiling β (τ = 1)", "ceiling ±", ".3f"),
        ),
        rows.by_training,
        rows.own_notes,
    ),
    rows_table(
        "tab:worlds",
        "worlds",
        "How many worlds: {positions:,} teacher-forced positions (greedy). Kept: the share of the gain of the full "
        "corpus that remains; between draws: standard deviation over draws of so many worlds. The leak of a token is "
        "its charge b times the dissent. Bound on naming the world: at the total that bounds membership inference at "
        f"{WORLDS_TARGET:.0%}. Spread of record priors: standard deviation of the share of worlds that a record is in.",
        (
            Column("decoder", "{decoder}"),
            Column("worlds", "worlds"),
            Column("drawn as", "{design}"),
            Column("dissent", "dissent ±", ".1%"),
            Column("distinct votes given dissent", "distinct_given_dissent", ".2f"),
            Column("kept, no noise", "retained_gain_noiseless ±", ".1%"),
            Column("kept, 2^-8", "retained_gain_at_8 ±", ".1%"),
            Column("kept, 2^-32", "retained_gain_at_32 ±", ".1%"),
            Column("between draws", "retained_gain_between", ".1%"),
            Column("kept, plurality", "retained_gain_plurality ±", ".1%"),
            Column("flips given dissent, 2^-32", "flip_dissent", ".3f"),
            Column("leak a token at 2^-32", "leak_per_token", ".3g"),
            Column("world prior", "world_prior", ".4f"),
            Column("bound on naming the world", "world_bound", ".4f", is_bound=True),
            Column("spread of record priors", "record_prior_sd", ".3f"),
        ),
        notes=rows.own_notes,
    ),
    rows_table(
        "tab:controls",
        "controls",
        "Controls of the gain: adapters trained in the same way on other text, and on as many records of the same "
        "source that are not in the workspace. {positions:,} teacher-forced positions (greedy). Share: of the gain of "
        "as many private records; left: by how many points these gain more. Both are paired by position, with errors "
        "over passages.",
        (
            Column("decoder", "{decoder}"),
            Column("trained on", "{trained_on}"),
            Column("adapters", "adapters"),
            Column("texts each", "records", ",.0f"),
            Column("tokens each", "tokens", ",.0f"),
            Column("accuracy", "accuracy ±", ".2%"),
            Column("gain", "gain_points ± gain_stderr", ".2%"),
            Column("of the full corpus's gain", "of_full ±", ".1%"),
            Column("share", "share ±", ".1%"),
            Column("left", "left_points ± left_stderr", ".2%"),
        ),
        notes=rows.own_notes,
    ),
    rows_table(
        "tab:temperature",
        "temperature",
        "Adaptive temperature: at each of {positions:,} positions the largest τ of the ladder at which at most so many "
        "worlds dissent from the plurality, or else the first or last τ, beside one τ everywhere; coupled Gumbel, the "
        "same coins. Distance: share of votes that are not those of τ = 1. Differences are to fixed τ at an equal "
        "distance (two mixed by a public coin): of dissent and of the lead over the public model in percentage "
        "points. Errors are over passages.",
        (
            Column("rule", "{rule}{of_collection}"),
            Column("mean τ", "temperature", ".2f"),
            Column("distance", "distance ±", ".1%"),
            Column("dissent", "dissent ±", ".1%"),
            Column("less fixed", "dissent_change ±", "+.1%"),
            Column("accuracy, public", "accuracy_public", ".1%"),
            Column("accuracy, 2^-32", "accuracy_at_32 ±", ".1%"),
            Column("kept, no noise", "retained_gain_noiseless ±", ".0%"),
            Column("kept, plurality", "retained_gain_plurality ±", ".0%"),
            Column("kept, 2^-32", "retained_gain_at_32 ±", ".0%"),
            Column("kept less fixed, 2^-32", "kept_change_at_32 ±", "+.1%"),
            Column("lead less fixed, no noise", "lead_change_noiseless ±", "+.2%"),
            Column("lead less fixed, 2^-32", "lead_change_at_32 ±", "+.2%"),
        ),
        notes=rows.own_notes,
    ),
    rows_table(
        "tab:content",
        "content",
        "A quorum: a vote is released only if, for every one of {records:,} records, at least so many worlds without "
        "the record cast it too; others are replaced by the plurality of those. {positions:,} teacher-forced positions "
        "(greedy). Kept: the share of the gain of the full corpus. Change: of accuracy against no quorum, in "
        "percentage points, paired. Factor: the most by which a record can raise the probability of a token over its "
        "mean among the worlds without it, the public model's own apart. Errors are over passages.",
        (
            Column("decoder", "{decoder}{of_collection}"),
            Column("quorum", "quorum"),
            Column("dissent", "dissent ±", ".1%"),
            Column("votes replaced", "replaced ±", ".2%"),
            Column("kept, no noise", "retained_gain_noiseless ±", ".1%"),
            Column("kept, plurality", "retained_gain_plurality ±", ".1%"),
            Column("kept, 2^-8", "retained_gain_at_8 ±", ".1%"),
            Column("kept, 2^-32", "retained_gain_at_32 ±", ".1%"),
            Column("change, no noise", "change_noiseless ±", "+.2%"),
            Column("change, 2^-32", "change_at_32 ±", "+.2%"),
            Column("factor", "most_times", ".3g"),
        ),
        lambda result: result.select(part="text"),
        rows.own_notes,
    ),
    rows_table(
        "tab:content-canaries",
        "content",
        "Forced canaries under a quorum: exactly the worlds that hold one vote for its payload, the others alike or as "
        "they did; one token at 2^-16 under a uniform belief. Lacking: trials in which neither enough worlds "
        "without the canary nor the public model vote for the payload (quorum 0: none at all). Can be emitted: with "
        "some secret and some noise.",
        (
            Column("canary", "{canary}{of_collection}"),
            Column("decoder", "{decoder}"),
            Column("others", "{others}"),
            Column("quorum", "quorum"),
            Column("trials", "trials"),
            Column("payload emitted", "emitted ±", ".2%"),
            Column("can be emitted", "can_emit", ".2%"),
            Column("lacking", "lacking"),
            Column("emitted though lacking", "emitted_lacking"),
        ),
        lambda result: result.select(part="forced"),
    ),
    rows_table(
        "tab:tokens-only",
        "tokens_only",
        "Leak of the tokens beside the leak of the history: {sessions} sessions of {tokens:,} tokens, Gumbel votes on "
        "test text, uniform belief at the start. Leaks in nats; attacks as success rates.",
        (
            Column("release, b", "{release}, {budget}"),
            Column("charged", "charged_nats", ".3g"),
            Column("leak of the history", "leaked_history_nats ± leaked_history_stderr", ".3g"),
            Column("leak of the tokens", "leaked_tokens_nats ± leaked_tokens_stderr", ".3g", mark="† is_estimate"),
            Column("tokens ÷ history", "tokens_over_history ±", ".1%"),
            Column("world found, history", "world_history", ".1%"),
            Column("world found, tokens", "world_tokens", ".1%"),
            Column("membership, history", "membership_history ±", ".1%"),
            Column("membership, tokens", "membership_tokens ±", ".1%"),
        ),
        lambda result: [{**row, "is_estimate": not row["is_exact"]} for row in result.select(collection=1)],
        (
            "†: a lower bound in expectation, log m + E log q(S | tokens), reached by an attack that can be carried "
            "out (a particle filter over the curator's hidden beliefs). The truth lies between it and the history's.",
            "channel: tokens and history are the same, so their leaks are; both are means over these sessions. As "
            "budgets fall the share of gaussian goes to 2/π ≈ 64 % where two votes are cast, because the token is the "
            "sign of R, and to less where there are more.",
        ),
    ),
    rows_table(
        "tab:chosen-prompts",
        "chosen_prompts",
        "Prompts chosen to find out whether one record was used: leak as a share of the charge, and how often the "
        "membership is guessed. Errors are over records; the worst record is chosen on one half of the sessions and "
        "measured on the other.",
        (
            Column("target", "{target}{of_collection}"),
            Column("attacker", "{attacker}"),
            Column("prompts", "{pool}, {choice}"),
            Column("release", "{released}"),
            Column("b", "{budget}"),
            Column("tokens", "tokens", ",d"),
            Column("leak about the record ÷ charge", "record_over_charged ±", ".2%"),
            Column("worst record", "worst_over_charged ±", ".1%"),
            Column("leak about the world ÷ charge", "secret_over_charged ±", ".1%"),
            Column("guessed right", "membership_expected ±", ".4f"),
            Column("worst record guessed", "worst_membership_rate ±", ".3f"),
            Column("bound", "membership_bound", ".4f", is_bound=True),
        ),
        lambda result: [{**row, "released": row["broken"] or "gaussian"} for row in result.rows if row["is_last"]],
        (
            "belief: knows the curator's belief and every vote before asking, an upper envelope. tokens: sees tokens "
            "on greedy votes; the leaks of these rows are lower bounds, reached by an attack that can be carried out.",
            "all records: prefixes of training records and canaries. forced votes: exactly the worlds with the record "
            "vote for something. random: no choice, and most prompts are unanimous.",
            "Guessed right: the curator's belief in the guess, whose mean is the success rate. Rows of a broken "
            "mechanism must exceed their bounds; they are computed at the budget that it claims.",
        ),
    ),
    rows_table(
        "tab:universe",
        "universe",
        "Is a record in the corpus at all? {members} members against {others} held-out records. The guarantee does not "
        "cover this question.",
        (
            Column("attacker", "{attacker}{of_collection}"),
            Column("score", "{score}"),
            Column("AUC", "auc ±", ".3f"),
            Column("members found at 1 % false positives", "true_positives ±", ".1%"),
        ),
        rows.scores,
        rows.own_notes,
    ),
    rows_table(
        "tab:meter",
        "meter",
        "Does a bill or a token say that a record is in the corpus? {members} members against {others} held-out "
        "records; every prefix prompted {queries} times for one token. Rate: how often a query was charged, or "
        "answered by the record's own next token.",
        (
            Column("what the caller sees", "{source}"),
            Column("attack", "{attack}"),
            Column("rate, members", "rate_members", ".1%"),
            Column("rate, others", "rate_others", ".1%"),
            Column("AUC", "auc ±", ".3f"),
            Column("members found at 1 % false positives", "true_positives ±", ".1%"),
            Column("at 0.1 %", "rare_true_positives ±", ".1%"),
        ),
        lambda result: result.select(part="score"),
        rows.own_notes,
    ),
    rows_table(
        "tab:choices",
        "choices",
        "Does an answer limited to a few values say more about the corpus than free text? {members} members against "
        "{others} held-out records, {queries:.0f} queries of one token per record and line; score: how much more often "
        "than the public model would. Gain: AUC less that of free text.",
        (
            Column("release", "{source}"),
            Column("decoder", "{decoder}"),
            Column("answer", "{asked}"),
            Column("rate, members", "rate_members", ".1%"),
            Column("rate, others", "rate_others", ".1%"),
            Column("AUC", "auc ±", ".3f"),
            Column("gain", "gain ±", "+.3f"),
            Column("members found at 1 % false positives", "true_positives ±", ".1%"),
        ),
        lambda result: result.select(attack="reference"),
        rows.own_notes,
    ),
    rows_table(
        "tab:depth",
        "depth",
        "Adapters in the last layers only, of {num_layers} layers, {worlds} worlds, {positions:,} teacher-forced "
        "positions. Gain: accuracy of the full-corpus adapter less that of the public model; private gain: the same "
        "of the release at 2^-32; kept: its share of the gain; errors over passages. − all: difference to all layers, "
        "position by position. Gains and differences are in percentage points. Leak ÷ charged: {scale[sessions]} "
        "sessions of {scale[tokens]:,} tokens at 2^-16, every token charged. Speed of the engine: {streams} sequences "
        "of {context} tokens with {timed_worlds} worlds ({machine}). Cache: keys and values of a token of one "
        "sequence with that many worlds.",
        (
            Column("decoder", "{decoder}"),
            Column("layers", "{layers}"),
            Column("rank", "{rank}"),
            Column("alpha", "alpha", "g"),
            Column("learning rate", "learning_rate", ".4g"),
            Column("private gain, points", "private_gain ±", ".2f"),
            Column("private gain − all", "private_gain_difference ±", "+.2f"),
            Column("gain, points", "gain ±", ".2f"),
            Column("gain − all", "gain_difference ±", "+.2f"),
            Column("kept", "kept ±", ".1%"),
            Column("dissent", "dissent ±", ".1%"),
            Column("dissent − all", "dissent_difference ±", "+.1f"),
            Column("leak ÷ charged", "leaked_over_charged ±", ".1%"),
            Column("tokens/s", "tokens_per_second", ",.0f"),
            Column("tokens/s ÷ all", "speed_ratio", ".2f"),
            Column("cache (kB)", "cache_kb", ",.1f"),
            Column("cache ÷ all", "cache_ratio", ".3f"),
            Column("training (s)", "training_seconds", ".1f"),
        ),
        rows.by_depth,
        rows.own_notes,
    ),
    rows_table(
        "tab:depth-rates",
        "depth",
        "Learning rates tried for each point: {trial_worlds} trial worlds, coupled Gumbel, on {positions_held:,} "
        "positions of {records_held} training records held out from them. Private: accuracy of the release at 2^-32; "
        "difference: to the best rate of the point, position by position; noiseless: a world's own vote; loss in nats "
        "a token. Errors over records.",
        (
            Column("layers", "{layers}"),
            Column("rank", "{rank}"),
            Column("learning rate", "learning_rate", ".4g"),
            Column("private", "accuracy_private ±", ".2%", mark="* is_chosen"),
            Column("difference", "difference ±", "+.2%"),
            Column("noiseless", "accuracy_noiseless ±", ".2%"),
            Column("dissent", "dissent ±", ".1%"),
            Column("loss", "loss ±", ".4f"),
        ),
        lambda result: result.select(kind="rate"),
        ("*: chosen, the smallest rate at most one standard error behind the best.",),
    ),
)
