"""What happens to one patient over the years. Knows nothing about how it is written down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date, timedelta

from paclm.worlds.clinic.conditions import Condition, eligible
from paclm.worlds.clinic.dice import Dice
from paclm.worlds.clinic.hospital import Hospital
from paclm.worlds.clinic.measurements import ANALYTES, Analyte, Vitals, draw_vitals
from paclm.worlds.clinic.medicines import MEDICINES, Medicine
from paclm.worlds.clinic.people import Patient

# What a few days of illness hardly move.
_SLOW = frozenset(("creatinine", "sodium", "potassium", "hb", "glucose", "hba1c", "platelets", "calcium"))


@dataclass(frozen=True, slots=True)
class Prescription:
    """A medicine at one step of its ladder of doses."""

    medicine: Medicine
    step: int
    rhythm: str

    @property
    def dose(self) -> str:
        return self.medicine.doses[self.step]


@dataclass(frozen=True, slots=True)
class Change:
    """What was done to one prescription: start, raise, lower, stop or keep."""

    kind: str
    now: Prescription
    old_dose: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """A measured value, and the one before it."""

    analyte: Analyte
    value: float
    previous: float | None


@dataclass(slots=True)
class Problem:
    """One condition of one patient, as it stands; only `Course` moves it."""

    condition: Condition
    side: str
    severity: float
    prescriptions: list[Prescription] = field(default_factory=list)
    last_seen: date | None = None
    last_changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class Visit:
    """Everything a note may speak of."""

    patient: Patient
    day: date
    condition: Condition
    side: str
    trend: str
    """new, better, same or worse."""
    is_acute: bool
    vitals: Vitals
    readings: tuple[Reading, ...]
    changes: tuple[Change, ...]
    taken: tuple[Prescription, ...]
    """What the patient took on arrival."""
    prescriptions: tuple[Prescription, ...]
    """What the patient takes from now on."""
    background: tuple[str, ...]
    """The other lasting conditions."""

    @property
    def age(self) -> int:
        return self.patient.age_on(self.day)


class Course:
    """The moving state of one patient between visits."""

    def __init__(self, patient: Patient, first_visit: date, hospital: Hospital, dice: Dice) -> None:
        self._patient = patient
        self._hospital = hospital
        self._dice = dice
        self._day = first_visit
        self._readings: dict[str, float] = {}
        possible = eligible(hospital.chronic, patient.age_on(first_visit), patient.sex)
        chosen = {dice.favour(possible).name: None for _ in range(dice.between(1, 3))} if possible else {}
        self._lasting = [self._problem(one) for one in possible if one.name in chosen]
        self._passing: Problem | None = None
        for problem in self._lasting:
            self._prescribe_first(problem)

    def visits(self, count: int) -> Iterator[Visit]:
        for index in range(count):
            if index:
                self._wait()
            yield self._visit(self._choose_problem())

    def _problem(self, condition: Condition) -> Problem:
        return Problem(condition, self._dice.pick(("left", "right")), 0.15 + 0.8 * self._dice.uniform())

    def _wait(self) -> None:
        soon = self._passing is not None and self._dice.chance(0.7)
        days = self._dice.between(2, 24) if soon else self._dice.between(12, 150) + int(500 * self._dice.tail())
        self._day += timedelta(days=days)
        if not soon:
            self._passing = None

    def _choose_problem(self) -> Problem:
        dice = self._dice
        if self._passing is not None:
            return self._passing
        if self._lasting and dice.chance(0.62):
            return dice.favour(self._lasting)
        possible = eligible(self._hospital.acute, self._patient.age_on(self._day), self._patient.sex)
        self._passing = self._problem(dice.favour(possible or self._hospital.acute))
        return self._passing

    def _visit(self, problem: Problem) -> Visit:
        trend = self._move(problem)
        taken = self._prescriptions(problem)
        changes = self._treat(problem, trend)
        readings = self._measure(problem)
        visit = Visit(
            patient=self._patient,
            day=self._day,
            condition=problem.condition,
            side=problem.side,
            trend=trend,
            is_acute=problem is self._passing,
            vitals=self._vitals(problem),
            readings=readings,
            changes=changes,
            taken=taken,
            prescriptions=self._prescriptions(problem),
            background=tuple(
                other.condition.name.replace("<side>", other.side) for other in self._lasting if other is not problem
            ),
        )
        problem.last_seen = self._day
        problem.last_changes = tuple(change for change in changes if change.kind != "keep")
        if problem is self._passing and trend == "better" and self._dice.chance(0.75):
            self._passing = None
        return visit

    def _prescriptions(self, problem: Problem) -> tuple[Prescription, ...]:
        return tuple(one for other in self._known(problem) for one in other.prescriptions)

    def _known(self, problem: Problem) -> list[Problem]:
        return [problem, *(other for other in self._lasting if other is not problem)]

    def _move(self, problem: Problem) -> str:
        """Let the severity move since the last visit and say which way it went."""
        dice = self._dice
        before = problem.severity
        if problem.last_seen is None:
            return "new" if problem is self._passing else ("worse" if before > 0.7 else "same")
        if problem is self._passing:
            problem.severity *= 0.2 + 0.5 * dice.uniform() if dice.chance(0.8) else 1.0 + 0.15 * dice.uniform()
        else:
            helped = any(change.kind in ("raise", "start") for change in problem.last_changes)
            problem.severity += 0.18 * dice.bell() + (-0.2 if helped else 0.04)
        problem.severity = min(1.0, max(0.03, problem.severity))
        moved = problem.severity - before
        return "better" if moved < -0.08 else "worse" if moved > 0.06 else "same"

    def _prescribe_first(self, problem: Problem) -> None:
        dice = self._dice
        names = self._free_medicines(problem)
        if names:
            name = names[0] if dice.chance(0.9) else names[-1]
            problem.prescriptions.append(self._prescription(MEDICINES[name]))

    def _free_medicines(self, problem: Problem) -> list[str]:
        """What would help and is not taken already, for this or for anything else."""
        taken = {one.medicine.name for other in self._known(problem) for one in other.prescriptions}
        choices = self._hospital.practices[problem.condition.name].medicines
        return [name for name in choices if name not in taken]

    def _prescription(self, medicine: Medicine) -> Prescription:
        step = min(len(medicine.doses) - 1, int(1.4 * self._dice.uniform()))
        return Prescription(medicine, step, medicine.rhythms[0])

    def _treat(self, problem: Problem, trend: str) -> tuple[Change, ...]:
        """Change the prescriptions as the trend asks for."""
        dice = self._dice
        if trend == "new" and not problem.prescriptions:
            self._prescribe_first(problem)
            return tuple(Change("start", one) for one in problem.prescriptions)
        if problem.prescriptions and dice.chance(0.8):
            index = dice.between(0, len(problem.prescriptions) - 1)
            one = problem.prescriptions[index]
            top = len(one.medicine.doses) - 1
            if trend == "worse" and one.step < top:
                problem.prescriptions[index] = Prescription(one.medicine, one.step + 1, one.rhythm)
                return (Change("raise", problem.prescriptions[index], one.dose),)
            if trend == "better" and one.step > 0 and dice.chance(0.35):
                problem.prescriptions[index] = Prescription(one.medicine, one.step - 1, one.rhythm)
                return (Change("lower", problem.prescriptions[index], one.dose),)
            if trend == "better" and problem is self._passing and dice.chance(0.4):
                del problem.prescriptions[index]
                return (Change("stop", one),)
        others = self._free_medicines(problem)
        if trend == "worse" and others:
            problem.prescriptions.append(self._prescription(MEDICINES[others[0]]))
            return (Change("start", problem.prescriptions[-1]),)
        return tuple(Change("keep", one) for one in problem.prescriptions[:1])

    def _measure(self, problem: Problem) -> tuple[Reading, ...]:
        """The hospital's order set for this problem."""
        found: dict[str, Reading] = {}
        for key in self._hospital.practices[problem.condition.name].labs:
            analyte = ANALYTES[key]
            value = analyte.draw(self._severity_of(key, problem), self._dice)
            found[analyte.short] = Reading(analyte, value, self._readings.get(analyte.short))
            self._readings[analyte.short] = value
        return tuple(found.values())

    def _severity_of(self, key: str, problem: Problem) -> float:
        """How far from healthy this value is; a passing illness hardly moves the slow ones."""
        return max(
            (
                other.severity * (0.3 if other is self._passing and key in _SLOW else 1.0)
                for other in self._known(problem)
                if key in other.condition.labs
            ),
            default=0.04,
        )

    def _vitals(self, problem: Problem) -> Vitals:
        def worst(tag: str) -> float:
            return max((one.severity for one in self._known(problem) if tag in one.condition.tags), default=0.0)

        return draw_vitals(
            self._dice,
            age=self._patient.age_on(self._day),
            pressure=worst("pressure"),
            fever=worst("fever"),
            lungs=worst("lungs"),
            heart=worst("heart"),
        )
