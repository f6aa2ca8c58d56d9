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
from jtrain.data.text.token_rows import Packed, Windows
from jtrain.errors import ConfigError
from jtrain.inspect.eject.assemble import Section, Values
from jtrain.models import CNN, ResNet, ViT
from jtrain.models.attention.rotary import NoScaling
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
        **_fields(config.data),
        **_fields(config.model),
        **_describe_optimizer(config.optimizer, config.steps),
        **{key.upper(): getattr(config, key) for key in ("seed", "batch", "microbatches", "steps")},
        "JAX": jax.__version__,
        "STACKED": False,
        "BF16": isinstance(config.precision, BF16),
        **study.values,
        **data_values,
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
    if not isinstance(config.precision, F32 | BF16):
        raise refuse("precision.kind", config.precision.kind, "f32 or bf16")
    if config.parallel.kind == "server":
        raise refuse("parallel.kind", "server", "the steps of one program: parallel.kind=single")
    if config.lora.rank:
        raise refuse("lora.rank", config.lora.rank, "whole weights: leave lora out")
    if config.stages:
        raise refuse("stages", [x.set for x in config.stages], "no stages: leave stages out")
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
        wanted = "rows that are shuffled as they are: no mixtures, streams and augmentation"
        raise refuse("data", type(train).__name__, wanted)
    source, beside = train.source, {"DATA": f"{name}.npz"}
    if isinstance(source, RandomTokens):
        config: Any = resolved.config
        sizes = {"ROWS": len(source), "KINDS": config.data.vocab}
        return ["shuffle", "random_tokens"], sizes, {}
    if isinstance(source, Packed):
        raise refuse("data.pack", True, "data.pack=false")
    if isinstance(source, Windows) and isinstance(source.tokens, TokenRange):
        tokens, files = source.tokens, source.tokens.files
        paths = tuple(str(files.path / shard["name"]) for shard in files.header["shards"])
        values = {"PATHS": paths, "DTYPE": files.dtype.str}
        values |= {"BEGIN": tokens.first, "END": tokens.last}
        return ["shuffle", "token_files"], values, {}
    if isinstance(source, Windows):
        return ["shuffle", "tokens"], beside, {"tokens": np.asarray(source.tokens)}
    size = len(source) * sum(x.nbytes for x in source[np.arange(1)].values())
    if size > LARGEST:
        raise refuse("data", f"{size:,} bytes", f"arrays of at most {LARGEST:,} bytes")
    arrays = {key: np.asarray(x) for key, x in source[np.arange(len(source))].items()}
    return ["shuffle", "rows"], {**beside, "FIELDS": tuple(arrays)}, arrays


def _describe_optimizer(optimizer: OptimizerConfig, steps: int) -> dict[str, Any]:
    kind = {SGD: "sgd", Adam: "adam", AdamW: "adamw"}.get(type(optimizer))
    if kind is None:
        raise refuse("optimizer.kind", getattr(optimizer, "kind", "?"), "adamw, adam or sgd")
    for key in ("clip_value", "decay", "groups", "ema"):
        if getattr(optimizer, key):
            raise refuse(f"optimizer.{key}", getattr(optimizer, key), "none: leave it out")
    schedule, known = optimizer.schedule, (Constant, Cosine, LinearSchedule, OneCycle)
    if not isinstance(schedule, known):
        wanted = "constant, linear, cosine or one_cycle"
        raise refuse("optimizer.schedule.kind", schedule.kind, wanted)
    own = {"OPTIMIZER": kind, "SCHEDULE": schedule.kind, "SPAN": schedule.steps or steps}
    absent = dict.fromkeys(("B1", "B2", "EPS", "MOMENTUM", "NESTEROV"), 0)
    absent |= dict.fromkeys(("WARMUP", "FINAL", "RISE", "FIRST"), 0)
    return absent | _fields(optimizer) | _fields(schedule) | own


def _fields(config: Any) -> dict[str, Any]:
    """Return the values of a config by the names of pieces: those of its fields, upper case."""
    return {field.name.upper(): getattr(config, field.name) for field in dataclasses.fields(config)}


def _check_values(key: str, config: Any, wanted: Mapping[str, Any]) -> None:
    """Raise unless a config has these values: pieces have no other ones."""
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise refuse(f"{key}.{name}", getattr(config, name), f"{key}.{name}={value}")


def _digits(config: Any) -> Study:
    values = {"SIZES": (64, *config.model.widths, 10)}
    return Study(["layers", "mlp", "classifier_mlp"], CLASSIFY, values)


def _vae(config: Any) -> Study:
    return Study(["layers", "mlp"], ["sums", "vae"], {"DROPOUT": 0.0})


def _heat(config: Any) -> Study:
    return Study(["heat"], ["sums", "heat_loss"], {}, ["shuffle", "heat_rows"])


def _images(config: Any) -> Study:
    """Describe a classifier of images: a CNN, a ResNet or a ViT."""
    data, model = config.data, config.model
    if data.augment != type(data.augment)():
        raise refuse("data.augment", data.augment, "images as they are: leave data.augment out")
    if getattr(model, "pixels", Pixels()) != Pixels():
        raise refuse("model.pixels", model.pixels, "the size of the data: leave model.pixels out")
    values: dict[str, Any] = {"IMAGE": (28, 28, 1), "CLASSES": 10}
    if isinstance(model, CNN):
        values |= {"WIDTHS": (*model.widths, 10)}
        return Study(["images", "layers", "cnn"], CLASSIFY, values)
    if isinstance(model, ResNet):
        _check_values("model", model, {"norm": "batch", "statistics": "batch", "stem": "cifar"})
        return Study(["images", "layers", "resnet"], CLASSIFY, values)
    if isinstance(model, ViT):
        model = dataclasses.replace(model, image=values["IMAGE"])
        values |= {"POSITIONS": model.positions, "CLASS_TOKEN": model.pool == "class"}
        values |= {**_describe_blocks(model), "STD_OUT": STD}
        return Study(["images", "layers", "norms", "block", "vit"], CLASSIFY, values)
    raise refuse("model.kind", model.kind, "cnn, resnet or vit")


def _shakespeare(config: Any) -> Study:
    values = _describe_transformer(config, config.data.context)
    return Study(TRANSFORMER, ["sums", "cross_entropy", "next_token"], values)


def _language(config: Any) -> Study:
    values, experts = _describe_transformer(config, config.data.context), config.model.experts
    slopes = values["TOKENS"] * (2 if isinstance(config.precision, BF16) else 4)
    values |= {
        "CHUNK": config.logits_chunk,
        "BF16_LOGITS": config.precision.logits == "bfloat16",
        # As `chunked_next_token`: whether the slopes are smaller than the head's gradient.
        "KEEP": slopes <= config.model.width * 4,
    }
    if experts.kind == "none":
        return Study(TRANSFORMER, ["chunked_next_token", "language"], values)
    plain = {"kind": "dropless", "group": "row", "bias_update_rate": None}
    _check_values("model.experts", experts, plain)
    if experts.weights == "sigmoid":
        raise refuse("model.experts.weights", experts.weights, "chosen or all")
    values |= {"UNEVEN": experts.uneven, "ROUTER_Z": experts.z}
    return Study(TRANSFORMER, ["sums", "chunked_next_token", "balance"], values)


def _grpo(config: Any) -> Study:
    policy, task = config.policy, config.data.build()
    plain = {"loss": "grpo", "updates": 1, "beta": 0.0}
    plain |= {"top_k": 0, "top_p": 1.0, "cache": True}
    _check_values("policy", policy, plain)
    below, above = policy.clip or (0.2, 0.2)
    values = _describe_transformer(config, task.sizes[0]) | {
        **{"GROUP": policy.group, "ANSWER": task.sizes[1], "MARK": task.end, "DROPOUT": 0.0},
        **{"TEMPERATURE": policy.temperature, "BELOW": below, "ABOVE": above},
    }
    return Study(TRANSFORMER, ["sums", "cross_entropy", "group_policy"], values)


CLASSIFY = ["sums", "cross_entropy", "classify"]
STD = 0.02  # of the kernels and embeddings of a transformer
TRANSFORMER = ["layers", "norms", "block", "transformer"]
PLAIN = {"post_norm": False, "zero_centered": False, "embedding_scale": 1.0, "qk_norm": False}
PLAIN |= {"multi_token_depth": 0}
PLAIN |= dict.fromkeys(("window", "attention_cap", "attention_scale", "logit_cap"), None)


def _describe_transformer(config: Any, context: int) -> dict[str, Any]:
    """Return the values of a transformer, or raise for those that are not plain."""
    model = config.model.for_tokens(len(config.data.build().vocabulary))
    positions, experts = model.positions, model.experts
    _check_values("model", model, PLAIN)
    if model.remat not in ("none", "full", "dots"):
        raise refuse("model.remat", model.remat, "none, full or dots")
    if positions.kind == "rotary":
        _check_values("model.positions", positions, {"scaling": NoScaling(), "local_base": None})
    tokens = config.batch // config.microbatches * context
    return {
        **_describe_blocks(model),
        "TOKENS": tokens,
        "VOCAB": model.vocab,
        "STD_OUT": STD / math.sqrt(2 * model.layers),
        "ROTARY": positions.kind == "rotary",
        "LEARNED": positions.kind == "learned",
        "BASE": getattr(positions, "base", 0.0),
        "POSITIONS": model.context,
        "CAUSAL": True,
        "STACKED": model.scan,
        # As `look_up` of jtrain.models.layers.linear: blocks of 4,096 tokens.
        "TABLES": max(1, min(32, tokens // 4096, tokens // (8 * model.vocab))),
        "EXPERTS": getattr(experts, "count", 0),
        "TOP_K": getattr(experts, "top_k", 0),
        "CHOSEN": getattr(experts, "weights", "") == "chosen",
    }


def _describe_blocks(model: Any) -> dict[str, Any]:
    """Return the values of the blocks of a decoder or an encoder that are no fields of both."""
    return {
        **{key.upper(): getattr(model, key) for key in ("norm", "bias", "activation")},
        "QKV_BIAS": model.bias or model.qkv_bias,
        "KV_HEADS": model.groups,
        "HEAD_SIZE": model.size_of_head,
        "HIDDEN": model.size_of_hidden,
        "STD": STD,
        "ROTARY": False,
        "CAUSAL": False,
        "EXPERTS": 0,
        "TOP_K": 0,
        "CHOSEN": False,
    }


STUDIES: Mapping[str, Callable[[Any], Study]] = {
    "digits": _digits,
    "fashion_mnist": _images,
    "grpo": _grpo,
    "heat": _heat,
    "language": _language,
    "shakespeare": _shakespeare,
    "vae": _vae,
}
