"""A generator of synthetic clinic notes: the private corpus that paclm brings along.

Everything is invented. The people, their illnesses, the staff, the towns and every event are drawn by chance from word
lists and phrases written for this purpose; no real record was read, copied or imitated, and nothing in the notes is
medical advice. Every note says on itself that it is synthetic.

    dice ─► grammar ─► phrases, conditions, people,
                       medicines, measurements ─► visits ─► scribe ─► registers ─► notes
"""

from paclm.worlds.clinic.notes import generate_notes

__all__ = ["generate_notes"]
