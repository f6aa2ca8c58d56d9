"""Data sets as rows by index, and batches as functions of the step; numpy only.

Configs import pydantic and are in modules of their own:

- text: `Text`, `Shakespeare`, `TinyShakespeare`, `Tokens`, `Mixture`, `TextLines`;
- images: `FashionMnist`, `Digits`, `IdxImages`, `ImageFolder`, `Augment`;
- batches: `Workers`.
"""

from jtrain.data.batches.by_step import InOrder, Shuffled
from jtrain.data.batches.mixed import MixedBatches
from jtrain.data.batches.prefetch import ReadAhead
from jtrain.data.batches.scan import check_finite, check_labels
from jtrain.data.batches.stream import LoaderBatches, ShardedStream, Stream, Streamed
from jtrain.data.images.image_dataset import ImageDataset, read_idx, read_labelled
from jtrain.data.sources.arrays import Arrays, Interleaved, Subset, hold_out
from jtrain.data.sources.files import find_set
from jtrain.data.sources.foreign import GrainRows, HuggingFace
from jtrain.data.sources.parquet import ParquetRows
from jtrain.data.sources.records import ArrayRecords, TFRecords, read_example
from jtrain.data.sources.source import Source
from jtrain.data.text.documents import read_text
from jtrain.data.text.lines import Lines, make_line_rows
from jtrain.data.text.token_files import TokenFiles, read_tokens
from jtrain.data.text.token_rows import Packed, Windows
from jtrain.data.text.tokenizers import Tokenizer, Vocabulary

__all__ = [
    "ArrayRecords",
    "Arrays",
    "GrainRows",
    "HuggingFace",
    "ImageDataset",
    "InOrder",
    "Interleaved",
    "Lines",
    "LoaderBatches",
    "MixedBatches",
    "Packed",
    "ParquetRows",
    "ReadAhead",
    "ShardedStream",
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
    "hold_out",
    "make_line_rows",
    "read_example",
    "read_idx",
    "read_labelled",
    "read_text",
    "read_tokens",
]
