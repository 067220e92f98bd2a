"""Training with gradients derived by hand: one attention layer learns associative recall, on CuPy or NumPy.

Each item is the sum of a name's and a colour's embedding; a query is a name's embedding alone. The layer must find the
item with that name and read its colour out. The backward pass is written next to the forward, line by line;
`attention_vjp` supplies the line for attention.

    python examples/cupy_training_step.py
"""

import numpy as np

import cupyflash

try:
    import cupy

    xp = cupy if cupy.cuda.is_available() else np
except ImportError:
    xp = np

NAMES, COLOURS = 64, 8
BATCH, ITEMS, QUERIES = 32, 48, 16
HEADS, HEAD_DIM = 4, 16
WIDTH = HEADS * HEAD_DIM
STEPS, LEARNING_RATE = 120, 3e-3


def initial_parameters(rng):
    shapes = {
        "name": (NAMES, WIDTH),
        "colour": (COLOURS, WIDTH),
        "Wq": (WIDTH, WIDTH),
        "Wk": (WIDTH, WIDTH),
        "Wv": (WIDTH, WIDTH),
        "Wo": (WIDTH, COLOURS),
    }
    return {
        key: xp.asarray(rng.standard_normal(shape) * (1 if key in ("name", "colour") else WIDTH**-0.5), dtype="float32")
        for key, shape in shapes.items()
    }


def sample(rng):
    """Names and colours of the items, positions of the queried ones: within a sequence each name occurs once."""
    names = rng.permuted(np.tile(np.arange(NAMES), (BATCH, 1)), axis=1)[:, :ITEMS]
    colours = rng.integers(0, COLOURS, (BATCH, ITEMS))
    asked = rng.integers(0, ITEMS, (BATCH, QUERIES))
    rows = np.arange(BATCH)[:, None]
    return tuple(xp.asarray(x) for x in (names, colours, names[rows, asked], colours[rows, asked]))


def loss_and_gradients(p, names, colours, asked, answers):
    """Cross-entropy of the answers, and its gradient for every parameter."""

    def heads(x):
        return x.reshape(*x.shape[:2], HEADS, HEAD_DIM)

    def flat(x):
        return x.reshape(-1, x.shape[-1])

    items = p["name"][names] + p["colour"][colours]
    queries = p["name"][asked]
    q, k, v = heads(queries @ p["Wq"]), heads(items @ p["Wk"]), heads(items @ p["Wv"])
    attended, attention_backward = cupyflash.attention_vjp(q, k, v)
    context = attended.reshape(BATCH, QUERIES, WIDTH)
    logits = context @ p["Wo"]
    logits -= logits.max(axis=-1, keepdims=True)
    log_probability = logits - xp.log(xp.exp(logits).sum(axis=-1, keepdims=True))
    answered = xp.eye(COLOURS, dtype="float32")[answers]
    loss = -(log_probability * answered).sum() / answers.size

    dlogits = (xp.exp(log_probability) - answered) / np.float32(answers.size)
    dcontext = dlogits @ p["Wo"].T
    dq, dk, dv = (flat(x.reshape(*x.shape[:2], WIDTH)) for x in attention_backward(heads(dcontext)))
    ditems = dk @ p["Wk"].T + dv @ p["Wv"].T
    gradients = {
        "Wo": flat(context).T @ flat(dlogits),
        "Wq": flat(queries).T @ dq,
        "Wk": flat(items).T @ dk,
        "Wv": flat(items).T @ dv,
        "name": xp.zeros_like(p["name"]),
        "colour": xp.zeros_like(p["colour"]),
    }
    xp.add.at(gradients["name"], names.ravel(), ditems)
    xp.add.at(gradients["colour"], colours.ravel(), ditems)
    xp.add.at(gradients["name"], asked.ravel(), dq @ p["Wq"].T)
    accuracy = (logits.argmax(axis=-1) == answers).mean()
    return float(loss), float(accuracy), gradients


class Adam:
    """Kingma and Ba, arXiv:1412.6980."""

    def __init__(self, parameters):
        self.mean = {key: xp.zeros_like(value) for key, value in parameters.items()}
        self.square = {key: xp.zeros_like(value) for key, value in parameters.items()}
        self.step = 0

    def update(self, parameters, gradients):
        self.step += 1
        for key, gradient in gradients.items():
            self.mean[key] += 0.1 * (gradient - self.mean[key])
            self.square[key] += 0.001 * (gradient**2 - self.square[key])
            mean = self.mean[key] / (1 - 0.9**self.step)
            square = self.square[key] / (1 - 0.999**self.step)
            parameters[key] -= LEARNING_RATE * mean / (xp.sqrt(square) + 1e-8)


def train(steps=STEPS, say=print):
    """Trains and returns the last step's loss and accuracy."""
    rng = np.random.default_rng(0)
    parameters = initial_parameters(rng)
    optimiser = Adam(parameters)
    say(f"{xp.__name__}: {BATCH} sequences of {ITEMS} items, {QUERIES} queries each, {HEADS} heads of {HEAD_DIM}")
    for step in range(1, steps + 1):
        loss, accuracy, gradients = loss_and_gradients(parameters, *sample(rng))
        optimiser.update(parameters, gradients)
        if step == 1 or step % 20 == 0:
            say(f"step {step:4}   loss {loss:.4f}   right answers {accuracy:.1%}")
    return loss, accuracy


if __name__ == "__main__":
    train()
