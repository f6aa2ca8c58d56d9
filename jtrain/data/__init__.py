"""Data sets as rows by index, and batches as functions of the step; numpy only."""

from typing import TYPE_CHECKING

from jtrain.io.lazy_names import lazy_names

if TYPE_CHECKING:
    from jtrain.data.batches.by_step import InOrder as InOrder
    from jtrain.data.batches.by_step import Shuffled as Shuffled
    from jtrain.data.batches.mixed import MixedBatches as MixedBatches
    from jtrain.data.batches.prefetch import ReadAhead as ReadAhead
    from jtrain.data.batches.row_cache import cache_rows as cache_rows
    from jtrain.data.batches.scan import check_finite as check_finite
    from jtrain.data.batches.scan import check_labels as check_labels
    from jtrain.data.batches.shuffle import permute as permute
    from jtrain.data.batches.step_batches import SkipBatches as SkipBatches
    from jtrain.data.batches.step_batches import StepBatches as StepBatches
    from jtrain.data.batches.stream import LoaderBatches as LoaderBatches
    from jtrain.data.batches.stream import ShardedStream as ShardedStream
    from jtrain.data.batches.stream import Stream as Stream
    from jtrain.data.batches.stream import Streamed as Streamed
    from jtrain.data.batches.stream import shard_files as shard_files
    from jtrain.data.batches.workers import Workers as Workers
    from jtrain.data.images.augment import Augment as Augment
    from jtrain.data.images.hub_images import HubImages as HubImages
    from jtrain.data.images.image_dataset import ImageDataset as ImageDataset
    from jtrain.data.images.image_dataset import read_idx as read_idx
    from jtrain.data.images.image_dataset import read_labelled as read_labelled
    from jtrain.data.images.image_folder import ImageFolder as ImageFolder
    from jtrain.data.known_sets import INKS as INKS
    from jtrain.data.known_sets import Digits as Digits
    from jtrain.data.known_sets import FashionMnist as FashionMnist
    from jtrain.data.known_sets import IdxImages as IdxImages
    from jtrain.data.known_sets import Shakespeare as Shakespeare
    from jtrain.data.known_sets import TinyShakespeare as TinyShakespeare
    from jtrain.data.known_sets import read_plays as read_plays
    from jtrain.data.sources.arrays import SPLIT as SPLIT
    from jtrain.data.sources.arrays import Arrays as Arrays
    from jtrain.data.sources.arrays import Subset as Subset
    from jtrain.data.sources.arrays import hold_out as hold_out
    from jtrain.data.sources.files import find_set as find_set
    from jtrain.data.sources.foreign import GrainRows as GrainRows
    from jtrain.data.sources.foreign import HuggingFace as HuggingFace
    from jtrain.data.sources.foreign import load_hub_set as load_hub_set
    from jtrain.data.sources.parquet import ParquetRows as ParquetRows
    from jtrain.data.sources.records import ArrayRecords as ArrayRecords
    from jtrain.data.sources.records import TFRecords as TFRecords
    from jtrain.data.sources.records import read_example as read_example
    from jtrain.data.sources.source import Source as Source
    from jtrain.data.text.chat_template import ChatTemplate as ChatTemplate
    from jtrain.data.text.conversations import Chat as Chat
    from jtrain.data.text.conversations import ChatRows as ChatRows
    from jtrain.data.text.conversations import encode_conversation as encode_conversation
    from jtrain.data.text.conversations import end_of_turn as end_of_turn
    from jtrain.data.text.corpora import Corpus as Corpus
    from jtrain.data.text.corpora import Mixture as Mixture
    from jtrain.data.text.corpora import Text as Text
    from jtrain.data.text.corpora import TextLines as TextLines
    from jtrain.data.text.corpora import TextPairs as TextPairs
    from jtrain.data.text.corpora import Tokens as Tokens
    from jtrain.data.text.corpora import UniformTokens as UniformTokens
    from jtrain.data.text.documents import read_text as read_text
    from jtrain.data.text.hub_texts import HubTexts as HubTexts
    from jtrain.data.text.lines import Lines as Lines
    from jtrain.data.text.lines import make_line_rows as make_line_rows
    from jtrain.data.text.prepare import prepare as prepare
    from jtrain.data.text.token_files import TokenFiles as TokenFiles
    from jtrain.data.text.token_rows import Packed as Packed
    from jtrain.data.text.token_rows import Windows as Windows
    from jtrain.data.text.tokenizer_file import read_tokenizer as read_tokenizer
    from jtrain.data.text.tokenizers import BPE as BPE
    from jtrain.data.text.tokenizers import Tokenizer as Tokenizer
    from jtrain.data.text.tokenizers import Vocabulary as Vocabulary
    from jtrain.data.text.tokenizers import fingerprint as fingerprint
    from jtrain.data.text.tokenizing import BytePairTokens as BytePairTokens
    from jtrain.data.text.tokenizing import CharacterTokens as CharacterTokens
else:  # a worker that reads rows imports no pydantic
    __getattr__, __dir__ = lazy_names(__name__)
