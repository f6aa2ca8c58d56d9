"""Data sets as rows by index, and batches as functions of the step; numpy only.

The values of configs lie in files of their own, which import pydantic: `jtrain.data.text.Text`,
`jtrain.data.shakespeare.Shakespeare`.
"""

from jtrain.data.ahead import ReadAhead
from jtrain.data.arrays import Arrays
from jtrain.data.batches import InOrder, Shuffled
from jtrain.data.characters import Vocabulary, read_text
from jtrain.data.check import check_finite, check_labels
from jtrain.data.grain import GrainRows
from jtrain.data.source import Source
from jtrain.data.tokens import read_tokens
from jtrain.data.windows import Windows

__all__ = [
    "Arrays",
    "GrainRows",
    "InOrder",
    "ReadAhead",
    "Shuffled",
    "Source",
    "Vocabulary",
    "Windows",
    "check_finite",
    "check_labels",
    "read_text",
    "read_tokens",
]
