"""Models as pure functions: configs of networks, and adapters for models of other libraries."""

from typing import TYPE_CHECKING

from jtrain.io.lazy_names import lazy_names

if TYPE_CHECKING:
    from jtrain.core.pytree import named_leaves as named_leaves
    from jtrain.models import attention as attention
    from jtrain.models import depth as depth
    from jtrain.models.adapters import from_function as from_function
    from jtrain.models.adapters import mean_of_slices as mean_of_slices
    from jtrain.models.adapters.libraries import from_equinox as from_equinox
    from jtrain.models.adapters.libraries import from_haiku as from_haiku
    from jtrain.models.adapters.libraries import from_linen as from_linen
    from jtrain.models.adapters.nnx import from_nnx as from_nnx
    from jtrain.models.attention.blockwise import Causal as Causal
    from jtrain.models.attention.rotary import Rotary as Rotary
    from jtrain.models.classifiers import CNN as CNN
    from jtrain.models.classifiers import MLP as MLP
    from jtrain.models.classifiers import EfficientNetLite as EfficientNetLite
    from jtrain.models.classifiers import ResNet as ResNet
    from jtrain.models.classifiers import ViT as ViT
    from jtrain.models.embeddings import hard_negatives as hard_negatives
    from jtrain.models.embeddings import map_rows as map_rows
    from jtrain.models.embeddings import mean_pool as mean_pool
    from jtrain.models.encoder import Encoder as Encoder
    from jtrain.models.experts import NoExperts as NoExperts
    from jtrain.models.images import classes as classes
    from jtrain.models.pretrained.families import family_of as family_of
    from jtrain.models.pretrained.source import PretrainedWeights as PretrainedWeights
    from jtrain.models.pretrained.source import check_vocabulary as check_vocabulary
    from jtrain.models.pretrained.source import params_from_timm as params_from_timm
    from jtrain.models.pretrained.write import write_folder as write_folder
    from jtrain.models.transformer import Transformer as Transformer
else:  # reading a config imports no flax
    __getattr__, __dir__ = lazy_names(__name__)
