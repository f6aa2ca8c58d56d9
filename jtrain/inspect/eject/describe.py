"""What the file of a config is made of: pieces, their values, and its training data."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrain.config.precision import BF16, F32
from jtrain.data import Shuffled
from jtrain.data.text.corpora import RandomTokens
from jtrain.data.text.token_files import TokenRange
from jtrain.data.text.token_rows import Windows
from jtrain.errors import ConfigError
from jtrain.inspect.eject.assemble import Section, Values
from jtrain.models import CNN, ResNet, ViT
from jtrain.models.images import Pixels
from jtrain.optim import SGD, Adam, AdamW
from jtrain.optim.recipe import OptimizerConfig
from jtrain.optim.schedules import Constant, Cosine, LinearSchedule, OneCycle
from jtrain.train.experiment import RunConfig
from jtrain.train.resolve import Resolved

LARGEST = 4 << 30  # bytes of a data set that is written beside the file


class Description(NamedTuple):
    """Sections of a file, the values of its pieces, and arrays that are written beside it."""

    sections: Sequence[Section]
    values: Values
    arrays: Mapping[str, np.ndarray]


class Study(NamedTuple):
    """Pieces of the model and of the loss, and their values."""

    model: Sequence[str]
    loss: Sequence[str]
    values: Values
    data: Sequence[str] = ()
    """Pieces of data that are no arrays."""


def describe(resolved: Resolved, name: str) -> Description:
    """Describe the file of a config.

    Args:
        name: of the data, without suffix.

    Raises:
        ConfigError: if a part of the config cannot be ejected, with what to do.
    """
    config: Any = resolved.config
    _check_parts(config)
    find_study = STUDIES.get(config.experiment)
    if find_study is None:
        raise refuse("experiment", config.experiment, f"one of {', '.join(STUDIES)}")
    study = find_study(config)
    data, data_values, arrays = _describe_data(resolved, study, name)
    values = {
        "JAX": jax.__version__,
        "SEED": config.seed,
        "BATCH": config.batch,
        "MICROBATCHES": config.microbatches,
        "STEPS": config.steps,
        "STACKED": False,
        "BF16": isinstance(config.precision, BF16),
        **_describe_optimizer(config.optimizer, config.steps),
        **data_values,
        **study.values,
    }
    sections = [
        ("1. Data", data),
        ("2. Model", study.model),
        ("3. Loss", study.loss),
        ("4. Step", ["optimizer", "step"]),
        ("5. Loop", ["safetensors", "loop"]),
    ]
    return Description(sections, values, arrays)


def refuse(key: str, found: Any, wanted: str) -> ConfigError:
    """Return the error for a value that cannot be ejected."""
    return ConfigError(f"jtrain eject: {key}={found} cannot be ejected. It takes {wanted}.")


def _check_parts(config: RunConfig) -> None:
    precision, parallel = config.precision, config.parallel
    if not isinstance(precision, F32 | BF16):
        raise refuse("precision.kind", precision.kind, "precision.kind=f32 or bf16")
    if parallel.kind == "server":
        raise refuse(
            "parallel.kind", "server", "the steps of any other strategy: parallel.kind=single"
        )
    if config.lora.rank:
        raise refuse(
            "lora.rank", config.lora.rank, "whole weights: merge the adapter (docs/lora.md)"
        )
    if config.guard.without:
        raise refuse("guard.without", config.guard.without, "all batches: guard.without=[]")


def _describe_data(
    resolved: Resolved, study: Study, name: str
) -> tuple[Sequence[str], dict[str, Any], dict[str, np.ndarray]]:
    """Return the pieces that read the training data, their values, and the arrays to write."""
    if study.data:
        return study.data, {}, {}
    train = resolved.experiment.train
    if not isinstance(train, Shuffled) or train.end != "cross":
        kind = type(train).__name__
        raise refuse(
            "data", kind, "rows that are shuffled as they are: no augmentation, no streams"
        )
    source = train.source
    if isinstance(source, RandomTokens):
        sizes = {"ROWS": len(source), "CONTEXT": source._context, "KINDS": source._vocab}
        return ["shuffle", "random_tokens"], sizes, {}
    if isinstance(source, Windows) and source.stride == 1:
        return _describe_tokens(source, name)
    probe = source[np.arange(1)]
    size = len(source) * sum(x.nbytes for x in probe.values())
    if size > LARGEST:
        raise refuse("data", f"{size:,} bytes", f"arrays of at most {LARGEST:,} bytes")
    arrays = {name: np.asarray(x) for name, x in source[np.arange(len(source))].items()}
    return ["shuffle", "rows"], {"DATA": f"{name}.npz", "FIELDS": tuple(arrays)}, arrays


def _describe_tokens(
    source: Windows, name: str
) -> tuple[Sequence[str], dict[str, Any], dict[str, np.ndarray]]:
    tokens, values = source.tokens, {"CONTEXT": source.context}
    if isinstance(tokens, TokenRange):
        paths = [str(tokens.files.path / shard["name"]) for shard in tokens.files.header["shards"]]
        values |= {"PATHS": tuple(paths), "DTYPE": tokens.files.dtype.str}
        values |= {"FIRST": tokens.first, "LAST": tokens.last}
        return ["shuffle", "token_files"], values, {}
    values |= {"DATA": f"{name}.npz"}
    return ["shuffle", "tokens"], values, {"tokens": np.asarray(tokens)}


def _describe_optimizer(optimizer: OptimizerConfig, steps: int) -> dict[str, Any]:
    kinds = {SGD: "sgd", Adam: "adam", AdamW: "adamw"}
    kind = kinds.get(type(optimizer))
    if kind is None:
        raise refuse("optimizer.kind", getattr(optimizer, "kind", "?"), "adamw, adam or sgd")
    for key in ("clip_value", "decay", "groups", "ema"):
        if getattr(optimizer, key):
            raise refuse(f"optimizer.{key}", getattr(optimizer, key), "none: leave it out")
    schedule = optimizer.schedule
    if not isinstance(schedule, Constant | Cosine | LinearSchedule | OneCycle):
        raise refuse(
            "optimizer.schedule.kind", schedule.kind, "constant, linear, cosine or one_cycle"
        )
    return {
        "OPTIMIZER": kind,
        "RATE": optimizer.lr,
        "SCHEDULE": schedule.kind,
        "SPAN": schedule.steps or steps,
        "CLIP": optimizer.clip,
        "DECAY": optimizer.weight_decay,
        **{key.upper(): getattr(optimizer, key, 0.0) for key in ("b1", "b2", "eps", "momentum")},
        "NESTEROV": getattr(optimizer, "nesterov", False),
        **{key.upper(): getattr(schedule, key, 0) for key in ("warmup", "final", "rise", "first")},
    }


def _digits(config: Any) -> Study:
    widths, dropout = config.model.widths, config.model.dropout
    values = {"SIZES": (64, *widths, 10), "DROPOUT": dropout}
    return Study(["layers", "mlp", "classifier_mlp"], ["sums", "cross_entropy", "classify"], values)


def _vae(config: Any) -> Study:
    values = {"WIDTHS": config.model.widths, "LATENTS": config.model.latents, "DROPOUT": 0.0}
    return Study(["layers", "mlp"], ["sums", "vae"], values)


def _heat(config: Any) -> Study:
    data, model = config.data, config.model
    values = {"CONDUCTIVITY": data.conductivity, "WAVES": data.waves, "WIDTHS": model.widths}
    values |= {"START": model.start, "ENDS": model.ends}
    return Study(["heat"], ["sums", "heat_loss"], values, ["shuffle", "heat_rows"])


def _images(config: Any) -> Study:
    """Describe a classifier of images: a CNN, a ResNet or a ViT."""
    data, model = config.data, config.model
    if data.augment != type(data.augment)():
        raise refuse("data.augment", data.augment, "images as they are: leave data.augment out")
    if getattr(model, "pixels", Pixels()) != Pixels():
        raise refuse("model.pixels", model.pixels, "the size of the data: leave model.pixels out")
    image, classes = (28, 28, 1), 10
    values = {"IMAGE": image, "DROPOUT": model.dropout, "CLASSES": classes}
    if isinstance(model, CNN):
        values |= {"CHANNELS": model.channels, "KERNEL": model.kernel}
        return Study(
            ["images", "layers", "cnn"], CLASSIFY, values | {"WIDTHS": (*model.widths, 10)}
        )
    if isinstance(model, ResNet):
        for key, wanted in {"norm": "batch", "statistics": "batch", "stem": "cifar"}.items():
            if getattr(model, key) != wanted:
                raise refuse(f"model.{key}", getattr(model, key), f"model.{key}={wanted}")
        values |= {"BLOCKS": model.blocks, "CHANNELS": model.width, "QUIET": model.quiet}
        values |= {"BOTTLENECK": model.bottleneck}
        return Study(["images", "layers", "resnet"], CLASSIFY, values)
    if isinstance(model, ViT):
        model = dataclasses.replace(model, image=image)
        values |= _describe_blocks(model)
        values |= {"PATCH": model.patch, "POSITIONS": model.positions, "STD_OUT": STD}
        values |= {"CLASS_TOKEN": model.pool == "class", "ACTIVATION": model.activation}
        return Study(["images", "layers", "norms", "block", "vit"], CLASSIFY, values)
    raise refuse("model.kind", model.kind, "cnn, resnet or vit")


def _shakespeare(config: Any) -> Study:
    transformer = _describe_transformer(config, config.data.build().vocabulary)
    return Study(TRANSFORMER, ["sums", "cross_entropy", "next_token"], transformer)


def _language(config: Any) -> Study:
    values = _describe_transformer(config, config.data.build().vocabulary)
    bits = 2 if isinstance(config.precision, BF16) else 4
    rows = config.batch // config.microbatches * config.data.context
    values |= {
        "CHUNK": config.logits_chunk,
        "BF16_LOGITS": config.precision.logits == "bfloat16",
        # As `chunked_next_token`: whether the slopes are smaller than the head's gradient.
        "KEEP": rows * bits <= config.model.width * 4,
    }
    experts = config.model.experts
    if experts.kind == "none":
        return Study(TRANSFORMER, ["chunked_next_token", "language"], values)
    if experts.group != "row":
        raise refuse("model.experts.group", experts.group, "model.experts.group=row")
    values |= {"UNEVEN": experts.uneven, "ROUTER_Z": experts.z}
    return Study(TRANSFORMER, ["sums", "chunked_next_token", "balance"], values)


CLASSIFY = ["sums", "cross_entropy", "classify"]
STD = 0.02  # of the kernels and embeddings of a transformer
TRANSFORMER = ["layers", "norms", "block", "experts", "transformer"]
PLAIN: Mapping[str, Any] = {
    "post_norm": False,
    "zero_centered": False,
    "embedding_scale": 1.0,
    "qk_norm": False,
    "window": None,
    "attention_cap": None,
    "attention_scale": None,
    "logit_cap": None,
}
"""Values of a transformer that an ejected file has no other one of."""


def _describe_transformer(config: Any, vocabulary: Any) -> dict[str, Any]:
    """Return the values of a transformer, or raise for those that are not plain."""
    model = config.model.for_tokens(len(vocabulary))
    for key, wanted in PLAIN.items():
        if getattr(model, key) != wanted:
            raise refuse(f"model.{key}", getattr(model, key), f"model.{key}={wanted}")
    if model.remat not in ("none", "full", "dots"):
        raise refuse("model.remat", model.remat, "model.remat=none, full or dots")
    if model.experts.kind == "capacity":
        raise refuse("model.experts.kind", "capacity", "model.experts.kind=dropless or none")
    rotary = model.positions.kind == "rotary"
    if rotary and (model.positions.scaling.kind != "none" or model.positions.local_base):
        raise refuse("model.positions", "scaled angles", "model.positions.scaling.kind=none")
    rows = config.batch // config.microbatches * config.data.context
    experts = model.experts
    return {
        **_describe_blocks(model),
        **{key.upper(): getattr(model, key) for key in ("vocab", "activation", "tied", "scan")},
        "DROPOUT": model.dropout,
        "REMAT": model.remat,
        "QKV_BIAS": model.bias or model.qkv_bias,
        "STD_OUT": STD / math.sqrt(2 * model.layers),
        "ROTARY": rotary,
        "BASE": getattr(model.positions, "base", 0.0),
        "LEARNED": model.positions.kind == "learned",
        "POSITIONS": model.context,
        "CAUSAL": True,
        "STACKED": model.scan,
        # As `look_up` of jtrain.models.layers.linear: blocks of 4,096 tokens.
        "TABLES": max(1, min(32, rows // 4096, rows // (8 * model.vocab))),
        "EXPERTS": getattr(experts, "count", 0),
        "TOP_K": getattr(experts, "top_k", 0),
        "CHOSEN": getattr(experts, "weights", "") == "chosen",
    }


def _describe_blocks(model: Any) -> dict[str, Any]:
    """Return the values of the blocks of a decoder or an encoder."""
    return {
        **{key.upper(): getattr(model, key) for key in ("layers", "width", "heads")},
        **{key.upper(): getattr(model, key) for key in ("norm", "epsilon", "bias", "qkv_bias")},
        "KV_HEADS": model.groups,
        "HEAD_SIZE": model.size_of_head,
        "HIDDEN": model.size_of_hidden,
        "STD": STD,
        "ROTARY": False,
        "CAUSAL": False,
        "EXPERTS": 0,
    }


STUDIES: Mapping[str, Callable[[Any], Study]] = {
    "digits": _digits,
    "fashion_mnist": _images,
    "heat": _heat,
    "language": _language,
    "shakespeare": _shakespeare,
    "vae": _vae,
}
