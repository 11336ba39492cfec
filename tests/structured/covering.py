"""Covering arrays: few rows in which every few features take all the combinations of values that may stand together."""

import random
from itertools import combinations, product


def combinations_of(row, strength):
    """Every choice of so many features of a row, with their values."""
    return combinations(row.items(), strength)


def possible_combinations(features, is_possible, strength):
    """Combinations of values that some whole row has. `is_possible` judges a row of which some features are missing."""
    found = set()
    for names in combinations(features, strength):
        for values in product(*(features[name] for name in names)):
            chosen = tuple(zip(names, values, strict=True))
            if completed(dict(chosen), features, is_possible) is not None:
                found.add(chosen)
    return found


def completed(row, features, is_possible):
    """A whole possible row with these values, or None."""
    if not is_possible(row):
        return None
    missing = next((name for name in features if name not in row), None)
    if missing is None:
        return row
    candidates = (completed({**row, missing: value}, features, is_possible) for value in features[missing])
    return next((candidate for candidate in candidates if candidate is not None), None)


def covering_array(features, is_possible, strength=2, seed=0, num_tries=6):
    """Rows that hold every possible combination. Each is the best of several that were built value by value."""
    draw, places = random.Random(seed), {name: place for place, name in enumerate(features)}
    left = possible_combinations(features, is_possible, strength)
    rows = []
    while left:
        starts = draw.choices(sorted(left, key=repr), k=num_tries)
        tried = [_built(dict(start), features, is_possible, left, places, strength, draw) for start in starts]
        best = max(tried, key=lambda row: sum(each in left for each in combinations_of(row, strength)))
        left.difference_update(combinations_of(best, strength))
        rows.append(best)
    return rows


def _built(row, features, is_possible, left, places, strength, draw):
    """A possible row around these values: each further value covers as many of the combinations left as it can."""
    for name in draw.sample(sorted(set(features) - set(row)), len(features) - len(row)):
        others = list(combinations(row.items(), strength - 1))

        def gain(value, name=name, others=others):
            pair = (name, value)
            return sum(tuple(sorted((*other, pair), key=lambda item: places[item[0]])) in left for other in others)

        values = draw.sample(features[name], len(features[name]))
        for value in sorted(values, key=gain, reverse=True):
            if completed({**row, name: value}, features, is_possible) is not None:
                row = {**row, name: value}
                break
    return {name: row[name] for name in features}
