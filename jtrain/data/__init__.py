"""Data sets as rows by index, and batches as functions of the step; numpy only.

The values of configs lie in files of their own, which import pydantic: `jtrain.data.text.Text`,
`jtrain.data.shakespeare.Shakespeare`, `jtrain.data.fashion_mnist.FashionMnist`,
`jtrain.data.digits.Digits`, `jtrain.data.augment.Augment`, `jtrain.data.token_corpus.Tokens`,
`jtrain.data.mixture.Mixture`, `jtrain.data.line_corpus.TextLines`,
`jtrain.data.image_folder.ImageFolder`, `jtrain.data.workers.Workers`.
"""

from jtrain.data.ahead import ReadAhead
from jtrain.data.array_record import ArrayRecords
from jtrain.data.arrays import Arrays
from jtrain.data.batches import InOrder, Shuffled
from jtrain.data.characters import Vocabulary, read_text
from jtrain.data.check import check_finite, check_labels
from jtrain.data.example import read_example
from jtrain.data.find import find_set
from jtrain.data.grain import GrainRows
from jtrain.data.hugging_face import HuggingFace
from jtrain.data.idx import read_idx
from jtrain.data.interleaved import Interleaved
from jtrain.data.labelled import Labelled, read_labelled
from jtrain.data.lines import Lines, line_rows
from jtrain.data.loaded import Loaded
from jtrain.data.mixed import Mixed
from jtrain.data.packed import Packed
from jtrain.data.parquet import ParquetRows
from jtrain.data.shared import Shared
from jtrain.data.source import Source
from jtrain.data.stream import Stream, Streamed
from jtrain.data.subset import Subset, keep_back
from jtrain.data.tfrecord import TFRecords
from jtrain.data.token_files import TokenFiles
from jtrain.data.tokenizer import Tokenizer
from jtrain.data.tokens import read_tokens
from jtrain.data.windows import Windows

__all__ = [
    "ArrayRecords",
    "Arrays",
    "GrainRows",
    "HuggingFace",
    "InOrder",
    "Interleaved",
    "Labelled",
    "Lines",
    "Loaded",
    "Mixed",
    "Packed",
    "ParquetRows",
    "ReadAhead",
    "Shared",
    "Shuffled",
    "Source",
    "Stream",
    "Streamed",
    "Subset",
    "TFRecords",
    "TokenFiles",
    "Tokenizer",
    "Vocabulary",
    "Windows",
    "check_finite",
    "check_labels",
    "find_set",
    "keep_back",
    "line_rows",
    "read_example",
    "read_idx",
    "read_labelled",
    "read_text",
    "read_tokens",
]
