"""Names of arguments in PyTorch, optax and Keras, with their equivalents here, for error texts."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterable
from typing import TypeVar

__all__ = ["NamedArguments", "suggest_names"]

Self = TypeVar("Self", bound="NamedArguments")

# The equivalent is the first of these names that the class has.
_EQUIVALENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("lr", "rate", "scheduler", "schedule", "lr_schedule"), ("learning_rate",)),
    "betas": ("beta_1", "beta_2"),
    **dict.fromkeys(("beta1", "b1"), ("beta_1",)),
    **dict.fromkeys(("beta2", "b2", "rho"), ("beta_2",)),
    **dict.fromkeys(("beta", "mu", "momentum", "momentum_decay"), ("momentum", "beta_1")),
    "use_nesterov": ("nesterov",),
    **dict.fromkeys(("eps", "eps_root"), ("epsilon",)),
    **dict.fromkeys(("wd", "decay", "l2", "decoupled_weight_decay"), ("weight_decay",)),
    **dict.fromkeys(("trust_coefficient", "trust_coeff"), ("trust",)),
    **dict.fromkeys(
        ("clipnorm", "global_clipnorm", "clip_norm", "max_grad_norm", "clipvalue", "clip_value"),
        ("clip",),
    ),
    **dict.fromkeys(("use_ema", "ema_momentum", "ema_decay"), ("ema",)),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulation_steps", "every_k_schedule"), ("accumulate",)
    ),
    **dict.fromkeys(("param_groups", "mask"), ("groups",)),
    **dict.fromkeys(("scale", "initial_scale"), ("loss_scale", "start")),
    # Of loss scales, clipping and schedules.
    **dict.fromkeys(("init_scale", "init_value", "initial_learning_rate"), ("start", "value")),
    "growth_factor": ("growth",),
    "backoff_factor": ("backoff",),
    "growth_interval": ("every",),
    **dict.fromkeys(("max_norm", "max_delta"), ("limit",)),
    **dict.fromkeys(("end_value", "eta_min"), ("stop",)),
    "alpha": ("stop", "beta_2"),  # of a schedule, and of RMSprop
    "initial_accumulator": ("initial_accumulator_value",),
    **dict.fromkeys(("decay_steps", "T_max", "transition_steps", "total_iters"), ("steps",)),
    "warmup_steps": ("steps",),
    **dict.fromkeys(("gamma", "decay_rate"), ("factor",)),
    **dict.fromkeys(("milestones", "boundaries"), ("at",)),
    "step_size": ("every",),
}


def suggest_names(words: Iterable[str], available_names: Collection[str]) -> str:
    """Return a suggestion for unknown arguments; empty if no known name is similar.

    Args:
      words: The unknown arguments.
      available_names: The names of the known arguments.

    Example:
      >>> suggest_names(["lr", "betas"], ["learning_rate", "beta_1", "beta_2"])
      ' (did you mean learning_rate, beta_1 and beta_2?)'
    """
    meanings: dict[str, None] = {}
    for word in words:
        known_names = [name for name in _EQUIVALENTS.get(word, ()) if name in available_names]
        # The main hyper-parameter of a class comes first in the table.
        known_names = known_names if word == "betas" else known_names[:1]
        meanings |= dict.fromkeys(
            known_names or difflib.get_close_matches(word, available_names, n=1)
        )
    if not meanings:
        return ""
    *first_names, last_name = meanings
    text = " and ".join([", ".join(first_names), last_name] if first_names else [last_name])
    return f" (did you mean {text}?)"


class NamedArguments:
    """A base of dataclasses whose errors list the arguments.

    Raises:
      TypeError: An argument is not a field; the error names the equivalent of a word of PyTorch,
        optax or Keras.
    """

    def __new__(cls: type[Self], *args: object, **kwargs: object) -> Self:
        """Check the names of the arguments; the fields are set by ``__init__``."""
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        if unknown := [word for word in kwargs if word not in names]:
            raise TypeError(
                f"{cls.__name__} has no argument {', '.join(unknown)}"
                f"{suggest_names(unknown, names)}. It takes {', '.join(names)}."
            )
        return super().__new__(cls)
