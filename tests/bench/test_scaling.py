"""What a run of bench/scale.py printed becomes repetitions, and goals are on cases that it has."""

from __future__ import annotations

from bench.scaling import CLOCK, CPU, OBJECTS, RANKS, beside_smaller, case, goals, objects_case, samples_of
from bench.scenarios import DIRECT, LIMIT, PHALANX, SMALLER
from bench.stats import Sample, rows_of

TAKEN = {"clock": [0.05, 0.06], "cpu": [0.002, 0.003], "net": [0.001, 0.002], "cpu of ranks": [0.1, 0.1]}
WAYS = ("empty, relays", "empty, direct", "argument, relays", "argument, direct")


def all_samples() -> list[Sample]:
    runs = [{"ranks": ranks, "relays": 1, **dict.fromkeys(WAYS, TAKEN)} for ranks in RANKS]
    runs += [{"objects": ranks, "hops": 3, "empty, relays": TAKEN} for ranks in OBJECTS]
    samples = [sample for run in runs for sample in samples_of(run)]
    return [*samples, *beside_smaller(samples)]


def test_each_way_of_a_call_has_its_repetitions() -> None:
    rows = {row.case: row.summaries for row in rows_of(all_samples(), {})}

    assert rows[case(64, "argument", CLOCK)][DIRECT].high == 0.06
    assert rows[case(16, "empty", CPU)][PHALANX].low == 0.002
    assert set(rows[case(128, "empty", CPU)]) == {PHALANX, DIRECT, SMALLER}
    assert set(rows[objects_case(4096)]) == {PHALANX, LIMIT}


def test_every_goal_is_judged() -> None:
    judged = {row.case: row.goals for row in rows_of(all_samples(), goals()) if row.goals}

    assert set(judged) == set(goals())
    assert all(met is not None for some in judged.values() for _, met in some)
