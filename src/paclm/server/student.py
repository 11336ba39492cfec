"""A student over HTTP: what its endpoints say of the claims in its student.json."""

from __future__ import annotations

from collections.abc import Mapping

from paclm.config import format_budget
from paclm.privacy.bounds import format_bound
from paclm.privacy.dp import format_up
from paclm.server.openai_format import Figures
from paclm.server.openapi import StudentPlan, StudentPrivacy
from paclm.server.plain import PlainService, router_of

NO_BUDGET = (
    "Nothing is charged: the student was trained on released text alone, and its answers are post-processing of that "
    "text. Only a key's own quota limits what it may ask."
)
CLAIMED = (
    "These figures are what the student.json of this student claims. Its hashes show that the adapter is the one it "
    "was written for; that the claims are true cannot be checked here: trust them as you trust the folder's source."
)
_NOT_HALF = (
    "Whether a record is among the private ones at all is not hidden: half of them were drawn in secret, and the bound "
    "is about which half, against someone who knows nothing of that beforehand. If the total was extended after this "
    "student was made, the bound on all that the secret served together is higher. Facts, names and sentences of "
    "records may be emitted."
)
_NOT_CORPUS = (
    "The bound is about one unit, whatever else is known. What many records have in common is learnt, and any text may "
    "be emitted. Trainings on the same corpus after this student was made add to ε, tokens served under half void it, "
    "and neither is known here."
)

router = router_of(StudentPrivacy, StudentPlan)


class StudentService(PlainService):
    """A student answers."""

    promise = "student"
    in_replies = ("promise", "mia_bound", "world_id_bound", "total_nats", "epsilon", "delta", "unit")
    budget = NO_BUDGET

    def guarantee(self, figures: Figures) -> str:
        """The claim in words."""
        return guarantee(figures, self.setup.unit)

    def not_promised(self, figures: Figures) -> str:
        """What the claim does not cover, and that it is one."""
        return f"{CLAIMED} {_NOT_HALF if figures['promise'] == 'half' else _NOT_CORPUS}"

    def gauges(self, figures: Figures) -> Mapping[str, float]:
        """None: the claims are constants."""
        return {}


def guarantee(figures: Figures, unit: str) -> str:
    """What the text that the student learnt from was released under."""
    mia = format_bound(figures["mia_bound"])
    if figures["promise"] == "corpus":
        return (
            f"No attack on whether {unit} in the corpus succeeds more than {mia} of the time, whatever is asked and "
            f"however often; a guess: 1/2 (ε = {format_up(figures['epsilon'])}, δ = "
            f"{format_up(figures['delta'])})."
        )
    return (
        f"No attack on whether {unit} in the half of the corpus that was used succeeds more than {mia} of the time (a "
        f"guess: 1/2), and none names the realized world more than {format_bound(figures['world_id_bound'])} of the "
        f"time (a guess: 1/{figures['worlds']}), whatever is asked and however often. The bound is at the committed "
        f"total of {format_budget(figures['total_nats'])} nats, shared with everything else that was, or will "
        "be, served from the same secret."
    )
