"""What each criterion thinks of every block, on numbers small enough to order by eye."""

from __future__ import annotations

import pandas as pd

from stages.removal.order import by_block, by_window, greedy


def test_least_first_and_ties_by_depth() -> None:
    assert by_block({3: 0.2, 1: 0.5, 2: 0.2}) == [(2, 0.2), (3, 0.2), (1, 0.5)]
    assert by_block({3: 0.2, 1: 0.5, 2: 0.2}, highest_first=True) == [(1, 0.5), (2, 0.2), (3, 0.2)]


def test_ties_go_as_the_selection_has_them() -> None:
    scores = {16: 0.2, 17: 0.2, 3: 0.2, 5: 0.1}
    assert [block for block, _ in by_block(scores, ties={17: 0.1, 16: 0.3})] == [5, 17, 16, 3]


def test_a_block_stands_where_its_best_window_does() -> None:
    cosines = {1: 0.5, 2: 0.9, 3: 0.1}  # windows of two blocks: 1-2, 2-3, 3-4
    assert by_window(cosines, 2, highest_first=True) == [(2, 0.9), (3, 0.9), (1, 0.5), (4, 0.1)]
    assert by_window(cosines, 2) == [(3, 0.1), (4, 0.1), (1, 0.5), (2, 0.5)]


def test_the_greedy_order_then_what_was_left() -> None:
    tried = [(1, 5, 0.1, 1), (1, 6, 0.2, 0), (1, 7, 0.9, 0), (1, 8, 0.4, 0), (2, 6, 0.7, 0), (2, 7, 0.3, 1), (2, 8, 0.6, 0)]
    steps = pd.DataFrame(tried, columns=["step", "block", "divergence", "removed"])
    assert greedy(steps, set()) == [(5, 0.1), (7, 0.3), (8, 0.6), (6, 0.7)]
    assert greedy(steps, {7, 8}) == [(5, 0.1), (6, 0.7)]
    assert greedy(steps.head(0), set()) == []
