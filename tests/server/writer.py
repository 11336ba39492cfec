"""An engine that follows grammars: it wants to write one text, and writes what the mask allows of it."""

import numpy as np

from curator.deployments import ScriptedEngine, allowed_tokens


class Writer(ScriptedEngine):
    """All worlds vote for the longest allowed token that continues `text`, else for the lowest allowed one.

    With `dissent`, some worlds vote for another allowed token instead, so a place with one allowed token has none.
    """

    def __init__(self, tokenizer, text="", dissent=0.0, context=1024):
        super().__init__(vocabulary=len(tokenizer), dissent=dissent)
        self.text = text
        self.context, self.num_blocks = context, self.num_slots * context
        self._end = tokenizer.eos_token_id
        self._tokenizer = tokenizer
        self._tokens = {tokenizer.decode([token]): token for token in range(self.vocabulary)}
        self._longest = max(map(len, self._tokens))
        self._prompts = {}
        self.num_allowed = []
        """At each token of each answer."""

    def add(self, tokens, max_new_tokens=0, owner=None):
        handle = super().add(tokens, max_new_tokens, owner)
        self._prompts[handle] = len(tokens)
        return handle

    def launch(self, handles, coins, temperature, allowed):
        if allowed is None:
            allowed = np.full((len(handles), -(-self.vocabulary // 32)), 2**32 - 1, dtype=np.uint32)
        super().launch(handles, coins, temperature, allowed)
        self.launched = [(*row, self._prompts[row[0]]) for row in self.launched]

    def _vote(self, context, coins, temperature, mask=None, num_prompt=0):
        tokens = np.arange(1, self.vocabulary) if mask is None else allowed_tokens(mask)
        tokens = tokens[tokens < self.vocabulary]
        self.num_allowed.append(tokens.size)
        wanted = self._wanted(self._tokenizer.decode(context[num_prompt:]), set(tokens.tolist()))
        others = tokens[tokens != wanted][: self.support_size - 1]
        support = np.full(self.support_size, -1)
        support[: others.size + 1] = np.sort([wanted, *others])
        votes = np.full(self.num_worlds, wanted)
        if others.size and np.random.default_rng(context).random() < self.dissent:
            votes[: self.num_worlds // 2] = others[0]
        return support, votes, wanted

    def _wanted(self, written, allowed):
        rest = self.text[len(written) :] if self.text.startswith(written) else ""
        for size in range(min(len(rest), self._longest), 0, -1):
            if self._tokens.get(rest[:size]) in allowed:
                return self._tokens[rest[:size]]
        return self._end if self._end in allowed else min(allowed)
