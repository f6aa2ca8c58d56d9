"""Names of earlier versions: the modules and public names that moved, and where each is now."""

import ast
import linecache
import re
import textwrap
import traceback
from collections.abc import Mapping

# Modules that kept their file name: the old package, the new one, and the files.
_FOLDERS = (
    ("", "core", "accumulate evaluate flops loop rows state step types"),
    ("", "config", "durations"),
    ("", "errors", "tracebacks"),
    ("", "models", "model_loss"),
    ("", "train", "experiment find_run fit foreign_arrays leaf_statistics predict run svg_chart"),
    ("", "train", "hooks trackers"),
    ("", "inspect", "debug plan report"),
    ("", "distributed", "cluster"),
    ("hooks", "train.hooks", "curve early_stop history log metrics pictures progress samples"),
    ("hooks", "train.hooks", "signals speed tracking"),
    ("trackers", "train.trackers", "mlflow tensorboard tracker wandb"),
    ("precision", "core.precision", "cast loss_scale"),
    ("data", "data.batches", "fingerprint mixed not_finite shuffle stream workers"),
    ("data", "data.images", "augment augmented digits fashion_mnist idx_images image_classes"),
    ("data", "data.images", "image_files image_folder mnist1d zoom"),
    ("data", "data.sources", "array_record arrays example files grain hugging_face idx"),
    ("data", "data.sources", "interleaved lines parquet read_rows records source subset"),
    ("data", "data.sources", "tfrecord torch_rows write_rows"),
    ("data", "data.text", "bpe byte_tokenizer characters documents line_corpus mixture packed"),
    ("data", "data.text", "packing prepare random_tokens shakespeare tiny_shakespeare"),
    ("data", "data.text", "token_corpus token_files tokenizer tokenizer_file tokenizing"),
    ("data", "data.text", "tokens windows"),
    ("models", "models.adapters", "equinox function haiku linen module_loss nnx statistics switch"),
    ("models", "models.attention", "causal positions rotary segments soft_cap"),
    ("models", "models.experts", "capacity dropless mixture"),
    ("models", "models.layers", "batch_norm classes convolution dropout embedding feed_forward"),
    ("models", "models.layers", "gelu group_norm images layer_norm linear norms pooling rms_norm"),
    ("models", "models.networks", "block decoder"),
    ("parallel", "parallel.strategies", "auto fsdp mirrored sharded single strategy"),
)
# Modules with another file name, under `jtrain.`.
_FILES = {
    "any_model": "models.adapters.any_model",
    "assemble": "train.setup",
    "cache": "train.compilation_cache",
    "directory": "train.run_dir",
    "first_batch": "train.first_batch.first_batch",
    "fitted": "train.fit_result",
    "given": "train.fit_arguments",
    "guard": "core.finite",
    "launch": "distributed.launcher",
    "load_run": "train.loaded_run",
    "terms": "core.loss",
    "trained": "train.restore_run",
    "trees": "core.pytree",
    "user_errors": "errors.user_code",
    "values": "config.configclass",
    "writing": "train.complete_text",
    "precision": "config.precision",
    "precision.kinds": "config.precision",
    "hooks.evaluating": "train.hooks.evaluation",
    "hooks.finite": "train.hooks.skipped_steps",
    "hooks.heartbeat": "train.hooks.function_hooks",
    "hooks.leaves": "train.hooks.leaf_log",
    "hooks.plain": "train.hooks.function_hooks",
    "hooks.recording": "train.hooks.step_record",
    "hooks.running": "train.hooks.bad_step_guard",
    "hooks.saving": "train.hooks.checkpointing",
    "hooks.twice": "train.hooks.recompute_check",
    "data.ahead": "data.batches.prefetch",
    "data.cached": "data.batches.row_cache",
    "data.calls": "data.batches.stacked",
    "data.check": "data.batches.scan",
    "data.decode_image": "data.images.decode",
    "data.draws": "data.batches.counter_rng",
    "data.find": "data.sources.known_sets",
    "data.labelled": "data.images.image_dataset",
    "data.loaded": "data.batches.loader_batches",
    "data.pictures": "data.images.transforms",
    "data.shared": "data.batches.sharded_stream",
    "data.sharing": "data.batches.file_sharding",
    "data.whole": "data.batches.by_step",
    "data.without": "data.batches.skip",
    "models.convolutional": "models.networks.cnn",
    "models.draws": "models.layers.dropout",
    "models.perceptron": "models.networks.mlp",
    "models.remembering": "models.attention.kv_cache",
    "models.residual_network": "models.networks.resnet",
    "models.vision_transformer": "models.networks.vit",
    "parallel.axes": "parallel.strategies.mesh_axes",
    "parallel.by_hand": "parallel.custom_loop",
    "parallel.flat": "parallel.strategies.shmap",
    "parallel.layout": "parallel.mesh",
    "parallel.leaves": "parallel.leaf_sharding",
    "parallel.schedule": "parallel.pipeline.schedule",
    "testing.subject": "testing.case",
}
# Modules that are part of another one now: the package, that module, and the files.
_MERGED = (
    ("checkpoint", "checkpoint.ownership", "record_check"),
    ("checkpoint", "checkpoint.writer", "thread_task"),
    ("cli", "cli.data_show", "pictures"),
    ("config", "config.lookup", "shipped_configs"),
    ("data.batches", "data.batches.by_step", "blocks full"),
    ("data.batches", "data.batches.file_sharding", "reader_counts"),
    ("data.batches", "data.batches.fingerprint", "digest"),
    ("data.batches", "data.batches.scan", "not_finite"),
    ("data.batches", "data.batches.workers", "thread_workers"),
    ("data.images", "data.images.augment", "augmented"),
    ("data.images", "data.images.idx_images", "fashion_mnist"),
    ("data.images", "data.images.transforms", "zoom"),
    ("data.sources", "data.sources.files", "decompress"),
    ("data.sources", "data.sources.records", "array_record"),
    ("data.sources", "data.sources.source", "optional_import"),
    ("data.sources", "data.sources.tfrecord", "crc32c"),
    ("data.text", "data.text.shakespeare", "tiny_shakespeare"),
    ("data.text", "data.text.token_files", "tokens"),
    ("data.text", "data.text.tokenizer", "byte_tokenizer"),
    ("distributed.cluster", "distributed.cluster.variables", "command_line cpu_devices"),
    ("distributed.heartbeat", "distributed.heartbeat.watchdog", "polling_thread"),
    ("distributed.launcher", "distributed.launcher.process_group", "culprit"),
    ("errors", "errors.old_names", "renamed"),
    ("config", "errors.spelling", "suggestions"),
    ("inspect.debug", "inspect.debug.dry_run", "stages"),
    ("inspect.plan", "inspect.plan.plan", "table"),
    ("inspect.report", "inspect.report.overview", "html"),
    ("io", "io.atomic_write", "private_files"),
    ("io", "io.lost_files", "message_backlog same_file"),
    ("losses", "losses.accuracy", "calibration confusion"),
    ("losses", "losses.balance", "z_loss"),
    ("losses", "losses.cross_entropy", "binary_cross_entropy distillation soft_cross_entropy"),
    ("losses", "losses.next_token", "perplexity"),
    ("losses", "losses.squared_error", "huber"),
    ("models.adapters", "models.adapters.library_modules", "statistics switch"),
    ("models.attention", "models.attention.scores", "segments soft_cap"),
    ("models.experts", "models.experts.dispatch", "capacity dropless"),
    ("models", "models.generate", "sampling"),
    ("models.layers", "models.layers.dropout", "key_sequence"),
    ("models.layers", "models.layers.feed_forward", "gelu"),
    ("models.layers", "models.layers.image_classes", "classes images"),
    ("models.layers", "models.layers.linear", "thin_product"),
    ("models.layers", "models.layers.norms", "layer_norm rms_norm"),
    ("models.presets", "models.presets.vision", "choose"),
    ("optim", "optim.adam", "adamw moments nadamw"),
    ("optim", "optim.evaluation", "average"),
    ("optim.schedules", "optim.schedules.cosine", "one_cycle restarts"),
    ("optim.schedules", "optim.schedules.simple", "constant inverse_sqrt linear wsd"),
    ("parallel", "parallel.memory_estimate", "memory"),
    ("parallel", "parallel.strategies.shmap", "flat_psum"),
    ("parallel.strategies", "parallel.strategies.shmap", "pmap"),
    ("parallel.strategies", "parallel.strategies.strategy", "base_config"),
    ("testing", "testing.result", "cause"),
    ("testing", "testing.run_step", "redo_update"),
    ("train", "train.auto_layout", "residuals"),
    ("train", "train.bad_step_policy", "overflow_check"),
    ("train", "train.fit_weights", "foreign_arrays"),
    ("train.hooks", "train.hooks.bad_step_guard", "running_mean"),
    ("train.hooks", "train.hooks.function_hooks", "heartbeat"),
    ("train.hooks", "train.hooks.metrics", "history"),
    ("train.hooks", "train.hooks.samples", "pictures"),
    ("train.hooks", "train.hooks.signals", "grace_period"),
    ("train.hooks", "train.hooks.skipped_steps", "recent_steps"),
    ("train", "train.hooks.tracking", "run_trackers"),
    ("train", "train.restore_run", "available_layout"),
    ("train", "train.run_record", "find_run"),
    ("train", "train.run_result", "finished_run"),
    ("train", "train.set_evaluations", "evaluation_sets"),
)
# Names that are called otherwise, or that left their module: the old path and the new one.
_NAMES = {
    "train": "train_loop",
    "values": "configclass",
    "values.values": "configclass",
    "types.Anywhere": "core.placement.Unplaced",
    "types.Attention": "parallel.attention.protocol.Attention",
    "types.Batches": "core.batches.Batches",
    "types.Layer": "core.placement.Layer",
    "types.Mean": "Mean",
    "types.Model": "Model",
    "types.Once": "core.batches.FiniteBatches",
    "types.Placement": "core.placement.Placement",
    "types.Terms": "Terms",
    "types.stateful": "stateful",
    "terms.in_terms": "core.loss.normalize_loss",
    "loop.Ended": "core.loop.LoopResult",
    "loop.train": "train_loop",
    "flops.flops": "core.flops.count_flops",
    "trees.elements": "core.pytree.num_elements",
    "rows.may_hide": "core.rows.allow_hidden_rows",
    "guard.Taken": "core.finite.UpdateResult",
    "guard.take_if": "core.finite.update_if",
    "durations.Lasts": "config.durations.DurationField",
    "assemble.Assembly": "train.setup.TrainSetup",
    "assemble.assemble": "train.setup.set_up",
    "directory.Directory": "train.run_dir.RunDir",
    "config.top.Checks": "config.top.ChecksConfig",
    "config.top.Evaluate": "config.top.EvaluateConfig",
    "config.top.Log": "config.top.LogConfig",
    "config.top.Top": "config.top.BaseConfig",
    "config.guard.Rollback": "config.guard.RollbackPolicy",
    "config.guard.Skip": "config.guard.SkipPolicy",
    "config.guard.Stop": "config.guard.StopPolicy",
    "precision.LossScale": "core.precision.loss_scale.LossScale",
    "precision.Unscaled": "core.precision.loss_scale.Unscaled",
    "precision.computed_in": "core.precision.cast.compute_in",
    "precision.narrowed": "core.precision.cast.cast_params",
    "precision.cast.computed_in": "core.precision.cast.compute_in",
    "precision.cast.narrowed": "core.precision.cast.cast_params",
    "hooks.Evaluate": "train.hooks.EvaluateEvery",
    "hooks.Finite": "train.hooks.SkippedSteps",
    "hooks.History": "train.hooks.MetricHistory",
    "hooks.Judge": "train.hooks.EvaluationListener",
    "hooks.Lines": "train.hooks.LogLines",
    "hooks.Log": "train.hooks.LogHook",
    "hooks.Metrics": "train.hooks.MetricsFile",
    "hooks.metrics.Metrics": "train.hooks.MetricsFile",
    "hooks.Pace": "train.hooks.SpeedReading",
    "hooks.Progress": "train.hooks.ProgressBar",
    "hooks.Result": "train.hooks.EvaluationResult",
    "hooks.Save": "train.hooks.SaveEvery",
    "hooks.evaluating.Evaluate": "train.hooks.EvaluateEvery",
    "hooks.evaluating.Judge": "train.hooks.EvaluationListener",
    "hooks.evaluating.Result": "train.hooks.EvaluationResult",
    "hooks.finite.Finite": "train.hooks.SkippedSteps",
    "hooks.heartbeat.Heartbeat": "train.hooks.function_hooks.HeartbeatHook",
    "hooks.history.History": "train.hooks.MetricHistory",
    "hooks.leaves.Leaves": "train.hooks.leaf_log.LeafLog",
    "hooks.log.Lines": "train.hooks.LogLines",
    "hooks.log.Log": "train.hooks.LogHook",
    "hooks.progress.Progress": "train.hooks.ProgressBar",
    "hooks.recording.Record": "train.hooks.step_record.StepRecorder",
    "hooks.running.Running": "train.hooks.bad_step_guard.RunningMean",
    "hooks.saving.Save": "train.hooks.SaveEvery",
    "hooks.speed.Pace": "train.hooks.SpeedReading",
    "hooks.twice.Twice": "train.hooks.recompute_check.RecomputeCheck",
    "trackers.About": "train.trackers.TrackedRun",
    "trackers.Opens": "train.trackers.TrackerBackend",
    "trackers.Writer": "train.trackers.TrackerRun",
    "trackers.tracker.About": "train.trackers.TrackedRun",
    "trackers.tracker.Opens": "train.trackers.TrackerBackend",
    "trackers.tracker.Writer": "train.trackers.TrackerRun",
    "data.Labelled": "data.ImageDataset",
    "data.Loaded": "data.LoaderBatches",
    "data.Mixed": "data.MixedBatches",
    "data.Shared": "data.ShardedStream",
    "data.batches.InOrder": "data.InOrder",
    "data.batches.Shuffled": "data.Shuffled",
    "data.batches.rows_of": "data.batches.by_step.count_rows",
    "data.text.Corpus": "data.text.text.Corpus",
    "data.text.Text": "data.text.text.Text",
    "data.text.corpus": "data.text.text.build_corpus",
    "data.augmented.Changes": "data.images.augment.Augmentation",
    "data.cached.Cached": "data.batches.row_cache.CachedRows",
    "data.cached.InMemory": "data.batches.row_cache.MemoryCache",
    "data.cached.OnDisk": "data.batches.row_cache.DiskCache",
    "data.decode_image.Size": "data.images.decode.ImageSize",
    "data.labelled.Labelled": "data.ImageDataset",
    "data.loaded.Loaded": "data.LoaderBatches",
    "data.mixed.Mixed": "data.MixedBatches",
    "data.mixture.Part": "data.text.mixture.MixturePart",
    "data.random_tokens.Numbers": "data.text.random_tokens.NumberVocabulary",
    "data.random_tokens.Random": "data.text.random_tokens.UniformTokens",
    "data.shared.Shared": "data.ShardedStream",
    "data.sharing.Sharing": "data.batches.file_sharding.FileShard",
    "data.tokenizing.ByBytes": "data.text.tokenizing.ByteTokens",
    "data.tokenizing.ByCharacters": "data.text.tokenizing.CharacterTokens",
    "data.tokenizing.ByPairs": "data.text.tokenizing.BytePairTokens",
    "data.tokenizing.FromFile": "data.text.tokenizing.PretrainedTokenizer",
    "data.whole.Whole": "data.batches.by_step.FullBatches",
    "data.without.Without": "data.batches.skip.SkipBatches",
    "models.attention.Implementation": "models.attention.attention.Implementation",
    "models.attention.attention": "models.attention.attention.attention",
    "models.experts.Capacity": "models.experts.experts.Capacity",
    "models.experts.Dropless": "models.experts.experts.Dropless",
    "models.experts.Experts": "models.experts.experts.Experts",
    "models.experts.NoExperts": "models.experts.experts.NoExperts",
    "models.layers.Remat": "models.layers.block_stack.Remat",
    "models.layers.stack_layers": "models.layers.block_stack.stack_layers",
    "models.layers.unstack_layers": "models.layers.block_stack.unstack_layers",
    "models.block.Block": "models.networks.block.TransformerBlock",
    "models.convolutional.Convolutional": "models.networks.cnn.CNNModule",
    "models.mixture.Mixture": "models.experts.mixture.MixtureOfExperts",
    "models.perceptron.Perceptron": "models.networks.mlp.MLPModule",
    "models.positions.Learned": "models.attention.positions.LearnedPositions",
    "models.remembering.Kept": "models.attention.kv_cache.KVCache",
    "models.residual_network.ResidualNetwork": "models.networks.resnet.ResNetModule",
    "models.vision_transformer.VisionTransformer": "models.networks.vit.ViTModule",
    "optim.Evaluated": "optim.WithEvalParams",
    "optim.Group": "optim.ParamGroup",
    "optim.Linear": "optim.LinearSchedule",
    "optim.Piece": "optim.SchedulePiece",
    "optim.average.averaged": "optim.evaluation.with_average",
    "optim.clip.clipped": "optim.clip.clip_by_norm",
    "optim.groups.Group": "optim.ParamGroup",
    "optim.recipe.Recipe": "optim.recipe.OptimizerConfig",
    "optim.schedules.Linear": "optim.LinearSchedule",
    "optim.schedules.Piece": "optim.SchedulePiece",
    "parallel.Decision": "parallel.LeafSharding",
    "parallel.Needs": "parallel.MemoryNeeds",
    "parallel.Schedule": "parallel.PipelineSchedule",
    "parallel.by_hand.per_device": "parallel.custom_loop.run_per_device",
    "parallel.layout.mesh_of": "parallel.mesh.make_mesh",
    "parallel.schedule.Schedule": "parallel.PipelineSchedule",
    "testing.Report": "testing.CheckReport",
    "checkpoint.Checkpoints": "checkpoint.CheckpointManager",
    "checkpoint.Retries": "checkpoint.SaveRetries",
    "checkpoint.Start": "checkpoint.WeightsPlan",
}


def _full(path: str) -> str:
    return f"jtrain.{path}"


def _modules() -> dict[str, str]:
    merged = {f"{old}.{file}": new for old, new, files in _MERGED for file in files.split()}
    moved = merged | _FILES
    for old, new, files in _FOLDERS:
        for file in files.split():
            path = f"{new}.{file}"
            moved[f"{old}.{file}".lstrip(".")] = merged.get(path, path)
    return {_full(old): _full(new) for old, new in moved.items()}


MODULES: Mapping[str, str] = _modules()
"""The modules that moved, by their old path."""
NAMES: Mapping[str, str] = {_full(old): _full(new) for old, new in _NAMES.items()}
"""The names that changed or left their module, by their old path."""


_ATTRIBUTE = re.compile(r"module '(jtrain[\w.]*)' has no attribute '(\w+)'")


def rename_advice(error: BaseException) -> str | None:
    """Return what to write for a name of jtrain that moved; None for every other error."""
    if isinstance(error, AttributeError):
        found = _ATTRIBUTE.search(str(error))
        path = f"{found[1]}.{found[2]}" if found else ""
        moved = NAMES.get(path) or MODULES.get(path)
        return f"{path} is called {moved} now." if moved else None
    if isinstance(error, ImportError):
        statement = _failed_import(error)
        lines = _rewritten(statement) if statement else _module_line(error.name)
        if lines:
            return "Names of jtrain have moved. Write:\n" + textwrap.indent(
                "\n".join(lines), "    "
            )
    return None


def new_path(path: str) -> str | None:
    """Return the path of a module or name today; None if it did not move."""
    module, _, name = path.rpartition(".")
    if path in NAMES or path in MODULES:
        return NAMES.get(path) or MODULES[path]
    return f"{MODULES[module]}.{name}" if module in MODULES else None


def _failed_import(error: BaseException) -> ast.Import | ast.ImportFrom | None:
    """Return the last import of jtrain in the traceback, parsed."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        first, last = frame.lineno or 1, frame.end_lineno or frame.lineno or 1
        source = "".join(linecache.getline(frame.filename, n) for n in range(first, last + 1))
        try:
            (statement,) = ast.parse(textwrap.dedent(source)).body
        except (SyntaxError, ValueError):
            continue
        if isinstance(statement, (ast.Import, ast.ImportFrom)) and "jtrain" in source:
            return statement
    return None


def _rewritten(statement: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the lines that import the same names from where they are today; [] if none moved."""
    if isinstance(statement, ast.Import):
        moved = [(alias, new_path(alias.name)) for alias in statement.names]
        lines = [f"import {path or alias.name}" + _bound(alias.asname) for alias, path in moved]
        return lines if any(path for _, path in moved) else []
    by_module: dict[str, list[str]] = {}
    changed = False
    for alias in statement.names:
        path = new_path(f"{statement.module}.{alias.name}")
        changed = changed or path is not None
        module, _, name = (path or f"{statement.module}.{alias.name}").rpartition(".")
        bound = alias.asname or alias.name
        by_module.setdefault(module, []).append(name + _bound(bound if bound != name else None))
    if not changed:
        return []
    return [f"from {module} import {', '.join(names)}" for module, names in by_module.items()]


def _bound(name: str | None) -> str:
    return f" as {name}" if name else ""


def _module_line(module: str | None) -> list[str]:
    path = new_path(module or "")
    return [f"import {path}  # was {module}"] if path else []
