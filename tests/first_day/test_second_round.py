"""Problems of a second round of new users: a model used later, and several processes."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from comparison import assert_close
from flax import nnx
from tf_config_process import X, Y, fitted
from two_processes import in_two_processes

import jtrain as jt
from jtrain.errors import ConfigError, LossError

SCRIPT = Path(__file__).parent.parent / "tf_config_process.py"


def layers(seed: int) -> nnx.Module:
    rngs = nnx.Rngs(seed)
    norm = nnx.BatchNorm(4, rngs=rngs)
    return nnx.Sequential(nnx.Linear(6, 4, rngs=rngs), norm, nnx.Linear(4, 3, rngs=rngs))


@pytest.mark.slow
def test_a_module_of_a_run_is_used_by_another_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = layers(0)
    how = {"steps": 3, "batch": 16, "lr": 0.1, "parallel": "single", "quiet": True}
    result = jt.fit(jt.classifier(net), net, (X, Y), **how, name="kept")
    run, model = jt.load("kept", parallel="single"), jt.classifier(layers(1))
    assert isinstance(run.params["layers"], list), "not the module's own dicts"
    expected = result.predict(X)
    assert_close(run.predict(X, model), expected, 1e-5)  # another program, which rounds otherwise
    found = jt.predict(model, run.params, X, extra=run.extra, parallel="single")
    assert_close(found, expected, 1e-5)
    judged = jt.evaluate(model, run.params, (X, Y), extra=run.extra, parallel="single")
    assert judged["loss"] == pytest.approx(result.evaluate((X, Y))["loss"], rel=1e-6)
    with pytest.raises(LossError, match=r"apply is called as apply\(params, batch\)"):
        run.predict(X, lambda params: params)


def test_alone_a_process_stays_so(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert jt.join_processes().processes == 1


@pytest.mark.thorough
def test_two_workers_of_tf_config_train_one_model(tmp_path: Path, capfd):
    words = lambda port, index: (port, index, tmp_path / f"{index}.npz")
    in_two_processes(SCRIPT, words, patience=400)
    spoken = capfd.readouterr().out
    assert spoken.count("mirrored over 2 cpu devices") == 1, "the first process alone speaks"
    alone = fitted()
    for index in range(2):
        found = np.load(tmp_path / f"{index}.npz")
        # Sums over two devices round otherwise: a few parts in 1e7 a step, six steps.
        assert_close(found["judged"], alone.evaluate((X, Y))["loss"], 1e-5)
        assert_close(found["predicted"], alone.predict(X), 1e-4)


@pytest.mark.slow
def test_arrays_before_the_processes_met_are_told_of(tmp_path: Path):
    late = tmp_path / "late.py"
    text = SCRIPT.read_text().replace("import jtrain as jt", "import jtrain as jt\njax.devices()")
    late.write_text(text)
    command = [sys.executable, "-W", "error", str(late)]
    from jtrain.distributed.launcher.port import free_port

    port = str(free_port())
    both = [
        subprocess.Popen(
            [*command, port, str(index), str(tmp_path / "none.npz")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        said = [process.communicate(timeout=400)[1] for process in both]
        # The first to see it ends, and the other may find nobody there any more.
        assert any("jt.join_processes() as the first line" in text for text in said), said
        assert 2 in [process.returncode for process in both]
        assert 0 not in [process.returncode for process in both]
    finally:
        for process in both:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hooks": print}, "hooks= takes a list, and one hook was given"),
        ({"valid_every": -1}, "valid_every=-1: must be a whole number at least 0"),
        ({"best": "loss"}, "has none: there is no `valid`; give a set `valid`"),
    ],
)
def test_an_argument_of_fit_is_named_as_it_was_typed(arguments, words):
    loss = lambda params, batch, rng: jt.Mean.of(batch["x"] @ params, batch["mask"])
    data = np.ones((8, 2), np.float32)
    with pytest.raises(ConfigError, match=re.escape(words)):
        jt.fit(loss, np.zeros(2), data, steps=1, parallel="single", quiet=True, **arguments)


@pytest.mark.parametrize(
    ("y", "lr", "words"),
    [(np.nan, 0.1, 'repeat the call with guard="skip".'), (1.0, 3e38, "the call with lr=0.001.")],
)
def test_a_bad_step_of_fit_advises_another_call(y, lr, words):
    loss = lambda params, batch, rng: jt.Mean.of((batch["x"] @ params - y) ** 2, batch["mask"])
    how = {"steps": 1, "parallel": "single", "quiet": True, "guard": "stop"}
    with pytest.raises(LossError, match=re.escape(words)) as caught:
        jt.fit(loss, np.zeros(2), np.ones((8, 2), np.float32), "sgd", lr=lr, **how)
    assert "jtrain run" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "argument"),
    [
        (["model"], "params="),
        (["model", "x", "y"], "params=, data="),
        (["dataset"], "data="),
        (["train_loader"], "data="),
        (["epochs_"], "epochs="),
        (["criterion"], "loss="),
        (["batch_size"], "batch="),
        (["learning_rate"], "lr="),
        (["callbacks"], "hooks="),
        (["validation_data"], "valid="),
        (["val_loader"], "valid="),
        (["verbose"], "quiet="),
    ],
)
def test_an_argument_of_another_library_has_its_name_here(typed: list[str], argument: str):
    with pytest.raises(ConfigError, match=f"Did you mean {argument}\\?$"):
        jt.fit(**dict.fromkeys(typed))  # pyright: ignore
