"""medconv/features/dicom/codes.py: codes as PS3.16 of the DICOM standard has them."""

import pytest

pytest.importorskip("pydicom", reason="the extra `dicom`")
from medconv.features.dicom.codes import concept_of, long_string

ORGAN = "91723000"  # Anatomical Structure
CODES = {  # class name: category, type, side
    "liver": (ORGAN, "10200004", None),
    "kidney_left": (ORGAN, "64033007", "7771000"),
    "Right kidney": (ORGAN, "64033007", "24028007"),
    "left ventricle": (ORGAN, "87878005", None),  # a concept of its own
    "lung_upper_lobe_left": (ORGAN, "45653009", "7771000"),
    "vertebrae_L1": (ORGAN, "66794005", None),
    "lymph nodes": (ORGAN, "59441001", None),
    "edema": ("49755003", "79654002", None),
    "fat": ("85756007", "55603005", None),
}


@pytest.mark.parametrize("name", CODES)
def test_a_class_has_the_code_of_its_words(name):
    concept = concept_of(name)
    assert concept is not None
    side = concept.side.value if concept.side else None
    assert (concept.category.value, concept.type.value, side) == CODES[name]


@pytest.mark.parametrize(
    "name",
    ["descending aorta", "left right kidney", "left fat", "left", "肝", "LV", ""],
    ids=["two concepts of one meaning", "both sides", "tissue", "side", "other letters", "short", "empty"],
)
def test_other_names_have_none(name):
    assert concept_of(name) is None


@pytest.mark.parametrize(
    ("name", "written"), [("left\\lung", "left/lung"), ("a\nb\x1b", "a b "), ("肝" * 80, "肝" * 64)]
)
def test_a_name_is_one_value_of_the_type_of_text(name, written):
    assert long_string(name) == written
