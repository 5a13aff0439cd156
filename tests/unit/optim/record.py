"""Record what torch and optax make of the cases: writes ``recorded.json`` beside this file.

    pip install torch optax
    python tests/unit/optim/record.py

Nothing but this program imports them. Weights, gradients and cases come from `optim_cases.py`, by
formulas without a random number; the names of the versions go into the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import optim_cases as cases

# The others are optax's, by our names.
TORCH = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop", "adagrad": "Adagrad"}
# Their names for our hyper-parameters.
WORDS = {"learning_rate": "lr", "epsilon": "eps", "beta_1": "b1", "beta_2": "b2"}
WORDS_OF_OPTAX = {"trust": "trust_coefficient"} | WORDS | {"learning_rate": "learning_rate"}


def by_torch(case, dtype):
    import torch

    given = {WORDS.get(name, name): value for name, value in case.given.items()}
    if case.name == "rmsprop":
        given["alpha"] = given.pop("b2", 0.99)
    elif "b1" in given or "b2" in given:
        given["betas"] = (given.pop("b1", 0.9), given.pop("b2", 0.999))
    weights = [torch.tensor(w, requires_grad=True) for w in cases.weights(dtype)]
    optimizer = getattr(torch.optim, TORCH[case.name])(weights, **given)
    for step in range(cases.STEPS):
        for k, weight in enumerate(weights):
            weight.grad = torch.tensor(cases.gradient(step, k, weight.detach().numpy()))
        optimizer.step()
        yield [weight.detach().numpy() for weight in weights]


def by_optax(case, dtype):
    import jax
    import optax

    given = {WORDS_OF_OPTAX.get(name, name): value for name, value in case.given.items()}
    optimizer = getattr(optax, case.name)(**given)
    weights = [jax.numpy.asarray(w) for w in cases.weights(dtype)]
    state = optimizer.init(weights)
    for step in range(cases.STEPS):
        gradients = [cases.gradient(step, k, np.asarray(w)) for k, w in enumerate(weights)]
        updates, state = optimizer.update(gradients, state, weights)
        weights = optax.apply_updates(weights, updates)
        assert all(w.dtype == dtype for w in weights)
        yield [np.asarray(w) for w in weights]


def main():
    import jax
    import optax
    import torch

    jax.config.update("jax_enable_x64", True)
    recorded = {"versions": {"torch": torch.__version__, "optax": optax.__version__}}
    for title, case in cases.CASES.items():
        made = by_torch if case.name in TORCH else by_optax
        for dtype in ("float64", "float32"):
            steps = {}
            for step, weights in enumerate(made(case, dtype), 1):
                if step in cases.SHOWN:
                    # float.hex is exact, and short.
                    steps[step] = [[float(x).hex() for x in w.ravel()] for w in weights]
            recorded[f"{title} {dtype}"] = steps
    recorded["schedules"] = {}
    for title, (_, name, args) in cases.SCHEDULES.items():
        schedule = getattr(optax, name)(*args)
        recorded["schedules"][title] = [float(schedule(step)) for step in cases.SCHEDULE_STEPS]
    path = Path(__file__).parent / "recorded.json"
    path.write_text(json.dumps(recorded, indent=0) + "\n")


if __name__ == "__main__":
    main()
