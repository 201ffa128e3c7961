"""How the authors of a checkpoint use it: beams, lengths, early stopping and the words before a source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thalweg.errors import ConfigError, nearest

# Searches here count generated symbols; there the symbol that starts the decoder counts too.
_START = 1
_SEARCH = (
    "num_beams",
    "max_length",
    "min_length",
    "early_stopping",
    "length_penalty",
    "no_repeat_ngram_size",
    "prefix",
)
NO_TASK = "none"
"""As ``model.task_params``: none of the checkpoint's."""


@dataclass(frozen=True)
class TaskParameters:
    """What a checkpoint's ``task_specific_params`` and generation config say of its search.

    Attributes:
        name: the task; empty where the checkpoint names none, or several and none was chosen.
        values: the parameters by their names there.
        others: tasks that could be chosen.

    >>> french = {"num_beams": 4, "max_length": 300, "prefix": "x: "}
    >>> config = {"task_specific_params": {"translation_en_to_fr": french}}
    >>> found = TaskParameters.read(config, {}, "")
    >>> found.name, found.prefix, found.search()
    ('translation_en_to_fr', 'x: ', {'search': 'beam', 'width': 4, 'max_length': 299, 'length_penalty': 1.0})
    """

    name: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    @classmethod
    def read(cls, config: Mapping[str, Any], generation: Mapping[str, Any], chosen: str) -> TaskParameters:
        """Those of a config and generation config; ``chosen`` is the task, empty for the only one, or ``none`` of them.

        >>> TaskParameters.read({"task_specific_params": {"a": {}, "b": {}}}, {}, "c")
        Traceback (most recent call last):
        ...
        thalweg.errors.ConfigError: model.task_params `c` is not among those of the checkpoint; choose one of: a, b
        """
        tasks = config.get("task_specific_params")
        tasks = tasks if isinstance(tasks, Mapping) else {}
        none = chosen == NO_TASK and NO_TASK not in tasks
        if chosen and chosen not in tasks and not none:
            remedy = nearest(chosen, tasks) if tasks else "it has none; leave it out"
            raise ConfigError(f"model.task_params `{chosen}` is not among those of the checkpoint; {remedy}")
        name = "" if none else chosen or (next(iter(tasks)) if len(tasks) == 1 else "")
        told = {key: generation[key] for key in _SEARCH if generation.get(key) is not None}
        own = tasks.get(name) if name else None
        values = {**told, **(own if isinstance(own, Mapping) else {})}
        return cls(name, dict(values), () if none else tuple(task for task in tasks if task != name))

    @property
    def prefix(self) -> str:
        """The text before every source."""
        return str(self.values.get("prefix") or "")

    def search(self) -> dict[str, Any]:
        """The search as our settings have it; empty where the checkpoint says nothing of beams.

        A search here ends when nothing better can come, which ``early_stopping`` is not needed for.
        """
        beams, longest = self.values.get("num_beams"), self.values.get("max_length")
        found: dict[str, Any] = {}
        if isinstance(beams, int) and beams > 1:
            found = {"search": "beam", "width": beams}
        if isinstance(longest, int) and longest > _START and (self.name or beams):
            found["max_length"] = longest - _START
        if found:
            found["length_penalty"] = float(self.values.get("length_penalty", 1.0))
            least = self.values.get("min_length")  # theirs counts the start, ours the end
            found |= {"min_length": least} if isinstance(least, int) and least > 1 else {}
        return found

    @property
    def no_repeat(self) -> int:
        """n, where no n symbols may come twice in an answer; a rule of the model under every search."""
        found = self.values.get("no_repeat_ngram_size")
        return found if isinstance(found, int) else 0

    def lines(self) -> list[str]:
        """What a person is told."""
        shown = ", ".join(f"{key} {value!r}" for key, value in self.values.items())
        lines = [f"task    {self.name or 'generation config'}: {shown}"] if shown else []
        if self.others and not self.name:
            lines.append(f"task    the checkpoint knows {', '.join(self.others)}; model.task_params=NAME applies one")
        return lines
