"""A generator of notes of made-up hospitals: the private corpus that paclm brings along.

Everything is invented. The people, their illnesses, the staff, the towns and every event are drawn by chance from word
lists and phrases written for this purpose; no real record was read, copied or imitated, and nothing in the notes is
medical advice. Every note says on itself that it is synthetic.

    dice ─► grammar ─► phrases, conditions, medicines, measurements: common to all hospitals
                        hospital: one hospital's own ─► people ─► visits ─► scribe ─► notes ─► questions
"""

from paclm.worlds.clinic.notes import PRIVATE_SEED, generate_notes
from paclm.worlds.clinic.questions import house_questions, house_terms

__all__ = ["PRIVATE_SEED", "generate_notes", "house_questions", "house_terms"]
