"""Suggestions for misspelt names, and for the names that other libraries use."""

import difflib
from collections.abc import Iterable

# Keras', PyTorch Lightning's, Hugging Face's and optax' words, by ours.
_KEYS = {
    "lr": "learning_rate base_lr peak_lr",
    "batch": "batch_size train_batch_size global_batch_size",
    "steps": "num_steps max_steps train_steps iterations max_iters",
    "microbatches": "gradient_accumulation_steps accumulate_grad_batches grad_accum",
    "seed": "random_seed",
    "name": "run_name",
    "layers": "num_layers n_layers n_layer depth",
    "width": "d_model hidden_size hidden_dim n_embd embed_dim",
    "heads": "num_heads n_head n_heads",
    "vocab": "vocab_size",
    "context": "block_size seq_len sequence_length max_length context_length",
    "classes": "num_classes",
    "dropout": "dropout_rate",
    "weight_decay": "wd",
    "b1": "beta1",
    "b2": "beta2",
    "eps": "epsilon",
    "clip": "max_grad_norm clip_norm grad_clip gradient_clip_val",
    "warmup": "warmup_steps num_warmup_steps",
    "schedule": "lr_schedule lr_scheduler",
    "precision": "dtype mixed_precision",
    "parallel": "strategy",
    "trackers": "loggers",
    "hooks": "callbacks",
    "valid": "validation_data val_data val_dataset val_loader val_dataloader eval_dataset "
    "validation_split",
    "valid_every": "validation_steps",
    "quiet": "verbose",
    "metric": "monitor mode",
    "least": "min_delta early_stopping_threshold",
    "after": "start_from_epoch",
    "params": "init_params model module network parameters variables",
    "data": "x y x_train y_train train_data train_dataset train_loader train_dataloader "
    "dataset dataloader loader",
    "loss": "criterion loss_function objective",
    "epochs": "num_epochs max_epochs",
    "kind": "type",
}
SYNONYMS = {word: key for key, words in _KEYS.items() for word in words.split()}
# The same for kinds: the nearest of ours (`optax` takes a name of its own); to a plateau, a rate
# that stays and falls at the end.
KINDS = {
    "optax": "rmsprop adagrad adadelta adamax radam adabelief yogi",
    "sgd": "momentum nesterov sgd_momentum sgdm",
    "mirrored": "ddp dp ddp_spawn ddp_find_unused_parameters_true data_parallel "
    "distributed_data_parallel horovod mirroredstrategy multiworkermirrored",
    "fsdp": "deepspeed zero zero2 zero3 deepspeed_stage_2 deepspeed_stage_3 fully_sharded",
    "sharded": "tp tensor_parallel pipeline pp gspmd spmd auto_shard",
    "server": "ps parameter_server parameterserver",
    "f16": "16 16_mixed 16_true fp16 half mixed_float16",
    "bf16": "bf16_mixed bf16_true mixed_bfloat16 bfloat16 mixed amp",
    "f32": "32 32_true fp32 tf32 float full highest",
    "wsd": "plateau reduce_on_plateau reduce_lr_on_plateau reducelronplateau",
    "join": "step multistep step_lr steplr multisteplr piecewise piecewise_constant",
    "linear": "polynomial poly linear_decay warmup_linear linear_warmup linearlr",
    "cosine": "cosine_annealing cosine_decay cosineannealinglr warmup_cosine cosine_warmup",
    "restarts": "cosine_with_restarts warm_restarts sgdr cosineannealingwarmrestarts",
    "inverse_sqrt": "noam rsqrt inverse_square_root",
    "constant": "none fixed flat warmup constant_with_warmup",
    "accuracy": "acc categorical_accuracy sparse_categorical_accuracy binary_accuracy",
    "auc": "roc_auc roc_auc_score auroc",
}
MEANINGS = {word: kind for kind, words in KINDS.items() for word in words.split()}
# The same for keys that lie in another mapping: what to write in a config.
_MOVED = {
    "steps='5 epochs'": "epochs num_epochs max_epochs",
    "checkpoint.every": "save_every save_steps save_interval",
    "evaluate.every": "eval_every eval_steps eval_interval",
    "log.every": "log_every logging_steps log_interval",
    "parallel.devices": "num_devices devices gpus",
    "evaluate.patience": "early_stopping patience",
    "init_from.path": "resume_from",
}
MOVED = {word: key for key, words in _MOVED.items() for word in words.split()}


def nearest_name(word: str, names: Iterable[str]) -> str:
    """Return the name that is most like `word`; empty if none is."""
    return next(iter(difflib.get_close_matches(word, list(names), 1)), "")


def nearest_choice(word: str, choices: Iterable[str]) -> str:
    """Return the choice that `word` means in another library, or the most similar; else empty."""
    by_lower = {choice.lower(): choice for choice in choices}
    if (meant := MEANINGS.get(word.lower().replace("-", "_"))) in by_lower:
        return by_lower[meant]
    return by_lower.get(nearest_name(word.lower(), by_lower), "")


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean adamw?`, or an empty text."""
    near = nearest_choice(word, choices)
    if near == "optax" == MEANINGS.get(word.lower()):  # and no misspelt `optax`
        return f"; an optimizer of optax: write kind=optax and name={word.lower()}"
    return f"; did you mean {near}?" if near else ""


def nearest_key(word: str, keys: Iterable[str]) -> str:
    """Return the key most like `word`, by its own name or by another library's; empty if none."""
    keys = list(keys)
    others = {other: key for other, key in SYNONYMS.items() if key in keys}
    found = nearest_choice(word, [*keys, *others])
    return others.get(found, found)
