"""What one section asks of another: refused before any stage does any work."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from pipeline.checking import check_params, unread_notes
from pipeline.params import ParamsError, read_params, section_models
from pipeline.study.plan import merged
from tests.toy import REPOSITORY


def changed(**settings: Any) -> dict[str, Any]:
    """params.yaml with `section__key` set."""
    return merged(read_params(REPOSITORY / "params.yaml"), {key.replace("__", "."): value for key, value in settings.items()})


@pytest.mark.parametrize(
    ("wrong", "mend", "says"),
    [
        ({"removal__method": "iterative", "search__steps": 2}, {"search__steps": 3}, r"'iterative'.*search\.steps of 3"),
        ({"removal__method": "iterative"}, {"search__steps": 3}, r"'iterative'.*search\.steps.*it is 0"),
        ({"removal__method": "recoverable"}, {"search__windows": [1, 3]}, r"'recoverable'.*3 in search\.windows.*\[\]"),
        ({"removal__method": "recoverable", "search__windows": [1]}, {"removal__count": 1}, r"3 in search\.windows.*\[1\]"),
        ({"removal__method": "replacement", "redundancy__swaps": False}, {"redundancy__swaps": True}, r"redundancy\.swaps"),
        ({"removal__method": "interchange", "redundancy__swaps": False}, {"removal__method": "shortgpt"}, r"redundancy\.swaps"),
        ({"removal__method": "deletion", "redundancy__swaps": False}, {"removal__method": "none"}, r"redundancy\.swaps"),
        (
            {"allocation__method": "measured", "sensitivity__method": "none"},
            {"sensitivity__method": "kl"},
            r"'measured' needs sensitivity\.method",
        ),
        (
            {"allocation__method": "gradient", "statistics__gradient_windows": 0},
            {"statistics__gradient_windows": 1},
            r"'gradient' needs statistics\.gradient_windows",
        ),
        ({"yes__maps": "families", "yes__windows": 17}, {"yes__windows": 16}, r"yes\.windows = 17: there are 16"),
        ({"yes__maps": "families", "yes__scored": 15}, {"yes__scored": 14}, r"yes\.scored = 15: there are 14"),
        ({"yes__maps": "families", "yes__test_windows": 17}, {"yes__maps": "none"}, r"yes\.test_windows = 17: there are 16"),
        (
            {"yes__maps": "direct", "yes__initial": "pretrained", "yes__pretrained": "gone"},
            {"yes__pretrained": "data/made-by-a-stage"},
            r"yes\.pretrained = 'gone': no such folder",
        ),
        ({"yes__matrices": ["mlp.*"]}, {"yes__grid": "binary"}, r"yes: matrices = \['mlp\.\*'\] needs grid to be set"),
        ({"yes__maps": "best"}, {"yes__maps": "1-4-4-4"}, r"yes\.maps = 'best': no map 'best'; allowed: none, staircases"),
        ({"yes__maps": [4]}, {"yes__maps": ["4"]}, r"yes\.maps = \[4\]: should be one of none, staircases, families, or a list"),
    ],
)
def test_what_another_stage_leaves_out(wrong: dict[str, Any], mend: dict[str, Any], says: str) -> None:
    with pytest.raises(ParamsError, match=f"^params.yaml: .*{says}"):
        check_params(changed(**wrong))
    check_params(changed(**wrong | mend))


def test_a_map_by_its_bare_name_is_a_list_of_one() -> None:
    sections: dict[str, Any] = check_params(changed(yes__maps="direct"))
    assert sections["yes"].maps == ["direct"]
    with pytest.raises(ParamsError) as caught:
        check_params(changed(yes__maps="best"))
    assert len(str(caught.value).splitlines()) == 1


def test_all_that_is_wrong_is_listed() -> None:
    wrong = changed(
        removal__method="deletion", redundancy__swaps=False, allocation__method="measured", sensitivity__method="none"
    )
    with pytest.raises(ParamsError) as caught:
        check_params(wrong)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"ghost__rank": 32}, "ghost.rank"),
        ({"ghost__rank": 32, "ghost__method": "ghost_lowrank"}, ""),
        ({"ghost__sink_weight": 0.5, "ghost__sinks": "restore"}, "ghost.sink_weight"),
        ({"masking__method": "magnitude", "masking__activations": "tape"}, "masking.activations"),
        ({"masking__activations": "tape"}, ""),
        ({"masking__sparsegpt": {"damping": 0.1}}, "masking.sparsegpt"),
        ({"masking__sparsegpt": {"damping": 0.1}, "masking__method": "sparsegpt"}, ""),
        ({"allocation__method": "owl", "allocation__pals__slope": 0.1}, "allocation.pals"),
        ({"tokens__custom__stride": 256}, "tokens.custom"),
        ({"training__revision": "v1"}, "training.revision"),
        ({"training__width": 64}, "training.width"),
        ({"training__width": 64, "training__method": "llama"}, ""),
        ({"sensitivity__windows": 2, "sensitivity__method": "none"}, "sensitivity.windows"),
        ({"tokens__seed": 5, "tokens__sampling": "first"}, "tokens.seed"),
        ({"tokens__seed": 5}, ""),
        ({"zeroshot__shots": 5}, "zeroshot.shots"),
        ({"zeroshot__shots": 5, "zeroshot__tasks": ["arc_easy"]}, ""),
        ({"yes__steps": 5}, "yes.steps"),
        ({"yes__steps": 5, "yes__maps": "direct"}, ""),
        ({}, ""),
    ],
)
def test_a_key_that_was_changed_and_that_nothing_reads_is_said(settings: dict[str, Any], key: str) -> None:
    lines = [line for name, section in check_params(changed(**settings)).items() for line in unread_notes(name, section)]
    assert [line.split()[1] for line in lines] == ([key] if key else [])


def test_what_decides_whether_a_key_is_read_is_there() -> None:
    for name, model in section_models().items():
        for key, (by, values) in getattr(model, "READ_WHEN", {}).items():
            assert key in model.model_fields, f"{name}.{key}"
            known = get_args(model.model_fields[by].annotation)
            assert by == "pattern" or (set(values) < set(known) and values), f"{name}.{key}: {by} in {values}"
        by, off = getattr(model, "OFF_WHEN", ("", None))
        assert not by or model.model_fields[by].get_default() == off or name == "sensitivity", f"{name}: {by} is {off}"
