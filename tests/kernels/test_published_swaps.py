"""The published swap scores of two models, run through the selection functions, give the sets that follow from them.

Scores: result files of the repository of arXiv 2605.16234 (MIT), in nats: of the pairs (i, i + 1), rounded to six digits.
The sets are those of an audit of these files: neither rule gives the sets that the paper prints for the first model.
"""

from __future__ import annotations

import pytest

from stages.removal.pairwise import pairwise

QWEN_REPLACEMENT = [
    9.4847, 0.533368, 0.62839, 0.84915, 0.791705, 6.29598, 5.21786, 0.48244, 0.52472, 0.626598, 0.416631, 0.39389,
    0.384632, 0.323008, 0.278013, 0.236585, 0.215863, 0.220402, 0.234485, 0.236934, 0.219112, 0.275034, 0.345633,
    0.420267, 0.48726, 0.3339, 0.359741, 0.444292, 0.367602, 0.411942, 0.375609, 0.450592, 0.343691, 0.400752, 11.961,
]  # fmt: skip
QWEN_INTERCHANGE = [
    9.02471, 0.584463, 0.200718, 0.989344, 0.388991, 0.347789, 0.335197, 0.216049, 0.215224, 0.219329, 0.183583, 0.167554,
    0.144187, 0.131347, 0.115175, 0.093611, 0.0856281, 0.0779757, 0.0740814, 0.0759959, 0.0612091, 0.0730647, 0.0849193,
    0.0879197, 0.0867824, 0.055658, 0.0583555, 0.0599823, 0.0580509, 0.0801109, 0.0843053, 0.0953086, 0.0928676, 0.198437,
    7.59828,
]  # fmt: skip
# slot i runs block i + 1, the one direction that was measured
LLAMA_REPLACEMENT = [
    14.4292, 4.32969, 0.0185979, 0.0149756, 0.0145718, 0.0103951, 0.0103948, 0.00897875, 0.00777251, 0.00682993,
    0.00621262, 0.00536777, 0.00986069, 0.0095438, 0.0129589, 0.0164679, 0.0269035, 0.0172284, 0.0181082, 0.0147645,
    0.019332, 0.0144901, 0.0134546, 0.0132002, 0.0142594, 0.0111043, 0.0125817, 0.0142937, 0.0172503, 0.169349, 0.203825,
]  # fmt: skip
LLAMA_INTERCHANGE = [
    13.8028, 0.0635482, 0.00898888, 0.00920048, 0.00617821, 0.00463573, 0.00393487, 0.0030309, 0.0022619, 0.00268608,
    0.00247307, 0.00232134, 0.00269177, 0.00289268, 0.00346008, 0.00442793, 0.00494119, 0.00348939, 0.00307748,
    0.00224967, 0.00287198, 0.00234345, 0.0019151, 0.00205357, 0.00157119, 0.00142315, 0.00182603, 0.0033224, 0.00341621,
    0.0392414, 0.112764,
]  # fmt: skip


TABLE, CODE = ("min", 1), ("left", 0)


@pytest.mark.parametrize(
    ("scores", "rule", "sets"),
    [
        (QWEN_INTERCHANGE, TABLE, ([25], [20, 25, 28], [18, 20, 22, 25, 28])),
        (QWEN_INTERCHANGE, CODE, ([25], [25, 26, 28], [20, 25, 26, 27, 28])),
        (QWEN_REPLACEMENT, TABLE, ([16], [16, 18, 20], [14, 16, 18, 20, 22])),
        (QWEN_REPLACEMENT, CODE, ([16], [16, 17, 20], [15, 16, 17, 18, 20])),
        (LLAMA_INTERCHANGE, CODE, ([25], [24, 25, 26], [22, 23, 24, 25, 26])),
        (LLAMA_REPLACEMENT, CODE, ([11], [9, 10, 11], [7, 8, 9, 10, 11])),
        (LLAMA_INTERCHANGE, TABLE, ([25], [22, 25, 27], [8, 19, 22, 25, 27])),
    ],
)
def test_published_scores_give_these_sets(scores: list[float], rule: tuple[str, int], sets: tuple[list[int], ...]) -> None:
    inner = set(range(1, len(scores)))
    for expected in sets:
        chosen, _ = pairwise({(i, i + 1): value for i, value in enumerate(scores)}, len(expected), inner, *rule, {})
        assert chosen == expected
