"""Codes of the DICOM standard for class names: kidney_left is SCT 64033007 Kidney with SCT 7771000 Left."""

import re
from functools import cache
from typing import NamedTuple

from pydicom import Dataset
from pydicom.sr.codedict import codes
from pydicom.sr.coding import Code

# Tables of PS3.16 for what a segment is, the first that has a name counts: table -> its category in CID 7150
_CATEGORY_OF = {
    "cid7192": "AnatomicalStructure",
    "cid7191": "Tissue",
    "cid7194": "MorphologicallyAbnormalStructure",
    "cid7197": "BodySubstance",
    "cid7193": "PhysicalObject",
}
_CATEGORIES = codes.cid7150.concepts
ANATOMY = _CATEGORIES["AnatomicalStructure"]
_SIDES = {"left": codes.SCT.Left, "right": codes.SCT.Right}
_FILLERS = {"of", "the", "and", "structure"}


class Concept(NamedTuple):
    """What a segment is, in codes of the standard.

    Args:
        category: such as Anatomical Structure.
        type: such as Kidney.
        side: Left or Right, where the type does not say it; else None.
    """

    category: Code
    type: Code
    side: Code | None

    def type_item(self) -> Dataset:
        """The type as an item of a sequence of codes, with the side as its modifier."""
        item = _item(self.type)
        if self.side is not None:
            item.SegmentedPropertyTypeModifierCodeSequence = [_item(self.side)]
        return item


def _item(code: Code) -> Dataset:
    item = Dataset()
    item.CodeValue = code.value
    item.CodingSchemeDesignator = code.scheme_designator
    item.CodeMeaning = code.meaning
    return item


def long_string(name: str) -> str:
    """A class name as DICOM's text type LO: at most 64 characters, without controls and the backslash, which
    separates values there.
    """
    return "".join(letter if letter.isprintable() else " " for letter in name.replace("\\", "/"))[:64]


def concept_of(name: str) -> Concept | None:
    """The concept with the words of a class name, in any order, one or many; None: the standard has none."""
    words = _words(name)
    for table, category in _CATEGORY_OF.items():
        if words in _types(table):
            return Concept(_CATEGORIES[category], _types(table)[words], None)
    sides = words & _SIDES.keys()
    paired = _types("cid7192").get(words - sides)
    if len(sides) != 1 or paired is None:
        return None
    return Concept(ANATOMY, paired, _SIDES[min(sides)])


@cache
def _types(table: str) -> dict[frozenset[str], Code]:
    """The codes of a table by the words of their meanings, without meanings that have several codes."""
    types: dict[frozenset[str], Code] = {}
    ambiguous = set()
    for code in getattr(codes, table).concepts.values():
        words = _words(code.meaning)
        if types.setdefault(words, code).value != code.value:
            ambiguous.add(words)
    return {words: code for words, code in types.items() if words not in ambiguous}


def _words(text: str) -> frozenset[str]:
    """Small letters, without fillers and the ends of plurals: lungs is lung, and vertebrae vertebra."""
    words = set(re.findall(r"[a-z0-9]+", text.lower())) - _FILLERS
    return frozenset(word.removesuffix("s").removesuffix("e") for word in words)
