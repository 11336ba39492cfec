"""What structured output has to work with, and which of it can stand together."""

FEATURES = {
    "release": ("gaussian", "plurality", "mixture", "channel", "dp"),  # dp: the promise `corpus`; all others: `half`
    "grammar": ("none", "json", "regex", "choice", "lark"),
    "model": ("gpt2", "llama", "generic"),
    "budget": ("ample", "public", "refuse", "none"),  # what happens if it ends before the answers do
    "charge": ("every-token", "dissent", "none"),
    "decoder": ("greedy", "gumbel"),
    "workers": (1, 2),
    "layers": ("all", "top"),  # top: there is a trunk
    "page": (4, 64),
    "chunk": (6, 128),
    "support": (3, 200),
    "stop": (False, True),
    "logprobs": (None, 5),
    "streams": (1, 4),
}
ONLY_CORPUS = {("release", "dp"), ("budget", "none"), ("charge", "none"), ("logprobs", 5)}
ONLY_HALF = {("workers", 2)} | {
    (name, value)
    for name in ("release", "budget", "charge")
    for value in FEATURES[name]
    if (name, value) not in ONLY_CORPUS
}


def is_possible(row):
    """Judges what a row has so far. One DP adapter has nothing to share with workers, and votes have no logprobs."""
    chosen = set(row.items())
    if chosen & ONLY_CORPUS and chosen & ONLY_HALF:
        return False
    return not {("model", "generic"), ("page", 4)} <= chosen  # there a block holds a whole sequence
