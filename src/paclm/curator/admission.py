"""Which requests may be promised an answer. Pure checks: knows neither secret nor belief, and changes nothing."""

from __future__ import annotations

from paclm.curator.streams import Request
from paclm.errors import BudgetExceeded, InvalidInput
from paclm.privacy.accounting import Account, nats_up


def check_prompt(prompt: object) -> None:
    """Refuse bytes: they are a sequence of small integers, and would pass for token ids."""
    if isinstance(prompt, (bytes, bytearray, memoryview)):
        raise InvalidInput(
            f"A prompt is a text or a sequence of token ids, not {type(prompt).__name__}. Decode it first: "
            'prompt.decode("utf-8")'
        )


def check_request(request: Request, vocabulary: int, context: int) -> None:
    """Refuse what would fail in the middle of a step."""
    if not request.prompt or not all(type(token) is int and 0 <= token < vocabulary for token in request.prompt):
        raise InvalidInput(f"A prompt needs token ids, integers from 0 to {vocabulary - 1}.")
    asked = len(request.prompt) + request.max_new_tokens
    if asked > context:
        raise InvalidInput(
            f"The prompt has {len(request.prompt)} tokens and {request.max_new_tokens} more were asked for, "
            f"{asked} together; the context holds {context}. Shorten the prompt or ask for fewer."
        )


def check_fits(account: Account, *, held: int, units: int, worst: int) -> None:
    """Refuse what the budget cannot cover beside what is held for others; `worst` is the price of one token."""
    if account.affords(held + units):
        return
    free = max(0, account.remaining_units - held)
    fewer = f"Ask for at most {free // worst:,} tokens, extend" if free >= worst else "Extend"
    raise BudgetExceeded(
        f"The request may cost {nats_up(units):.6g} nats ({units // worst:,} tokens), and {nats_up(free):.6g} are "
        f"free: of {account.total_nats:.6g}, {account.spent_nats:.6g} are spent and {nats_up(held):.6g} "
        f"held for other requests. {fewer} the total with "
        '`paclm ledger extend`, or set on_exhausted = "public" in [mechanism].'
    )
