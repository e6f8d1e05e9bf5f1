"""Blocks drawn at random: what a criterion has to beat."""

from __future__ import annotations

import numpy as np

from stages.removal.ranking import lowest


def random(allowed: set[int], count: int, spacing: int, seed: int) -> tuple[list[int], dict[int, float]]:
    """`count` allowed blocks by a random score in [0, 1), and those scores."""
    draws = np.random.default_rng(seed).random(len(allowed))
    scores = dict(zip(sorted(allowed), draws.tolist(), strict=True))
    return lowest(scores, count, spacing), scores
