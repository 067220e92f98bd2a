"""The examples run and do what they say."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_training_step_learns():
    """Hand-derived gradients that were wrong in any factor would not reach this."""
    training = example("cupy_training_step")
    loss, accuracy = training.train(steps=100, say=lambda line: None)
    assert loss < 0.5
    assert accuracy > 0.9


def test_training_step_gradients_are_slopes():
    """Along a random direction in parameter space, against a finite difference."""
    training = example("cupy_training_step")
    xp, rng = training.xp, training.np.random.default_rng(1)
    parameters = training.initial_parameters(rng)
    batch = training.sample(rng)
    _, _, gradients = training.loss_and_gradients(parameters, *batch)
    direction = {
        key: xp.asarray(rng.standard_normal(value.shape), dtype="float32") for key, value in parameters.items()
    }
    slope = sum(float((gradients[key] * direction[key]).sum()) for key in parameters)

    def loss(step):
        moved = {key: parameters[key] + step * direction[key] for key in parameters}
        return training.loss_and_gradients(moved, *batch)[0]

    assert slope == pytest.approx((loss(1e-2) - loss(-1e-2)) / 2e-2, rel=2e-2)


def test_torch_interop():
    pytest.importorskip("torch")
    assert max(example("torch_interop").largest_differences()) < 1e-5
