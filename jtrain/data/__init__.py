"""Data sets as rows by index, and batches as functions of the step; numpy only.

Configs import pydantic and are in modules of their own:

- text: `Text`, `Shakespeare`, `TinyShakespeare`, `Tokens`, `Mixture`, `TextLines`;
- images: `FashionMnist`, `Digits`, `IdxImages`, `ImageFolder`, `Augment`;
- batches: `Workers`.
"""

from jtrain.data.batches.by_step import InOrder, Shuffled
from jtrain.data.batches.loader_batches import LoaderBatches
from jtrain.data.batches.mixed import MixedBatches
from jtrain.data.batches.prefetch import ReadAhead
from jtrain.data.batches.scan import check_finite, check_labels
from jtrain.data.batches.sharded_stream import ShardedStream
from jtrain.data.batches.stream import Stream, Streamed
from jtrain.data.images.image_dataset import ImageDataset, read_labelled
from jtrain.data.sources.arrays import Arrays
from jtrain.data.sources.example import read_example
from jtrain.data.sources.grain import GrainRows
from jtrain.data.sources.hugging_face import HuggingFace
from jtrain.data.sources.idx import read_idx
from jtrain.data.sources.interleaved import Interleaved
from jtrain.data.sources.known_sets import find_set
from jtrain.data.sources.lines import Lines, make_line_rows
from jtrain.data.sources.parquet import ParquetRows
from jtrain.data.sources.records import ArrayRecords
from jtrain.data.sources.source import Source
from jtrain.data.sources.subset import Subset, hold_out
from jtrain.data.sources.tfrecord import TFRecords
from jtrain.data.text.characters import Vocabulary, read_text
from jtrain.data.text.packed import Packed
from jtrain.data.text.token_files import TokenFiles, read_tokens
from jtrain.data.text.tokenizer import Tokenizer
from jtrain.data.text.windows import Windows

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
